// Sharded calls over MPI processes. Run under mpirun with 1 to 8 ranks: `mpi_test [fault]`.
// Every rank checks its own results and prints one line; a fault case ends in MPI_Abort by design, so the
// verdict is what was printed.
#include <mpi.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "core/element.h"
#include "rank_threads.h"
#include "sharded_run.h"
#include "testing/check.h"

namespace {

using namespace lmhead;           // NOLINT(google-build-using-namespace)
using namespace lmhead::testing;  // NOLINT(google-build-using-namespace)

int failures = 0;
void expect(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::fprintf(stderr, "mpi_test: %s\n", what.c_str());
}

/// The same bits as threads give, which vocab_parallel_test holds against fp64; and the counts.
void compare_with_threads(Communicator& world) {
  const BackendInfo backend = cpu_backends().front();
  for (const std::int64_t v : {8 * 1030, 1237}) {
    const TestProblem problem({.n = 24, .h = 32, .v = v, .data = Data::kPeaked, .row_temperature = true});
    for (const ReduceHiddenGrad reduce :
         {ReduceHiddenGrad::kNone, ReduceHiddenGrad::kSum, ReduceHiddenGrad::kReduceScatter}) {
      const ShardedOptions options{.reduce = reduce};
      const RankResult mine = run_rank(backend, problem, world, options);
      expect(mine.status.ok(), mine.status.to_string());
      expect(mine.forward.all_gathers == 1 && mine.forward.exchanges == 1, "one all-gather and one header a forward");
      expect(mine.backward.all_gathers == 0, "no all-gather in a backward");
      RankResult same;
      run_ranks(world.size(), [&](Communicator& c) {
        RankResult result = run_rank(backend, problem, c, options);
        if (c.rank() == world.rank()) same = result;
        return result.status;
      });
      expect(same_bits(mine.logprob, same.logprob) && same_bits(mine.entropy, same.entropy), "results as of threads");
      expect(same_bits(mine.dx, same.dx) && same_bits(mine.dw, same.dw), "gradients as of threads");
    }
  }
}

/// A message of several chunks, and sums in every floating type.
void large_and_small_messages(Communicator& world) {
  const std::size_t bytes = (std::size_t{16} << 20) + 12345;
  std::vector<unsigned char> own(bytes, static_cast<unsigned char>(world.rank() + 1));
  std::vector<unsigned char> all(bytes * static_cast<std::size_t>(world.size()));
  expect(world.all_gather(own.data(), all.data(), bytes).ok(), "a large all_gather");
  for (std::size_t r = 0; r < static_cast<std::size_t>(world.size()); ++r)
    expect(all[r * bytes] == r + 1 && all[(r + 1) * bytes - 1] == r + 1, "the parts of a large all_gather");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    std::vector<std::byte> data(5 * size_of(dtype));
    for (std::int64_t i = 0; i < 5; ++i) store_float(data.data(), dtype, i, static_cast<double>(i + world.rank()));
    expect(world.all_reduce_sum(data.data(), 5, dtype).ok(), "all_reduce_sum");
    const int p = world.size();
    for (std::int64_t i = 0; i < 5; ++i)
      expect(load_float(data.data(), dtype, i) == static_cast<double>(i * p + p * (p - 1) / 2), "a sum");
  }
  expect(world.all_gather(nullptr, nullptr, 0).ok(), "an empty all_gather");
}

/// A bad target, other sizes and other options on the last rank only: an error everywhere, nothing written, and the
/// group goes on.
void soft_faults(Communicator& world) {
  const TestProblem problem({.n = 5, .h = 8, .v = 24}), longer({.n = 6, .h = 8, .v = 24});
  TestProblem bad = problem;
  bad.targets.set_id(3, 24);
  const VocabShard shard = vocab_shard(24, world.rank(), world.size());
  const char* messages[] = {"targets: expected ids in [0, 24)", "ranks disagree on N", "ranks disagree on temperature"};
  for (int fault = 0; fault < 3; ++fault) {
    Problem p = shard_of(problem, shard);
    if (world.rank() == world.size() - 1) {
      if (fault == 0) p = shard_of(bad, shard);
      if (fault == 1) p = shard_of(longer, shard);
      if (fault == 2) p.temperature = 2;
    }
    std::vector<float> logprob(static_cast<std::size_t>(p.hidden.rows), NAN);
    const Status status = sharded_forward(p, world, {{logprob.data(), p.hidden.rows, 1, DType::kFloat32}, {}, {}});
    expect(status.message().find(messages[fault]) != std::string::npos, status.to_string());
    for (const float value : logprob) expect(std::isnan(value), "no partial result");
  }
}

/// A rank that is silent, or killed: the others end with an error within the timeout.
int hard_fault(bool kill_it) {
  auto world = mpi_communicator(nullptr, std::chrono::milliseconds(1500));
  Communicator& c = **world;
  if (c.rank() == 1) {
    if (kill_it) raise(SIGKILL);
    std::this_thread::sleep_for(std::chrono::seconds(5));
    MPI_Abort(MPI_COMM_WORLD, 0);
  }
  const TestProblem problem({.n = 5, .h = 8, .v = 24});
  std::vector<float> logprob(5, NAN);
  const auto start = std::chrono::steady_clock::now();
  const Status status = sharded_forward(shard_of(problem, vocab_shard(24, c.rank(), c.size())), c,
                                        {{logprob.data(), 5, 1, DType::kFloat32}, {}, {}});
  const bool in_time = std::chrono::steady_clock::now() - start < std::chrono::seconds(4);
  const bool empty = std::isnan(logprob[0]) && std::isnan(logprob[4]);
  std::printf("rank %d: %s: %s\n", c.rank(),
              status.code() == StatusCode::kCommunication && in_time && empty ? "noticed" : "WRONG",
              status.message().c_str());
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // let the other ranks say theirs before mpirun ends all
  MPI_Abort(MPI_COMM_WORLD, 0);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &provided);
  if (argc > 1) return hard_fault(std::strcmp(argv[1], "killed") == 0);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  {
    auto world = mpi_communicator(nullptr, std::chrono::seconds(60));
    expect(world.ok() && std::string((*world)->transport()) == "mpi", world.status().to_string());
    compare_with_threads(**world);
    large_and_small_messages(**world);
    if (ranks > 1) soft_faults(**world);
  }
  int all = 0;
  MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (rank == 0) std::printf("mpi_test: %d ranks, %d failures\n", ranks, all);
  MPI_Finalize();
  return all == 0 ? 0 : 1;
}
