// Sharded packed scoring on one GPU, rank by rank: all ranks of a TP x CP grid are threads that share the device, so
// what the grid takes beyond one rank is what sharding itself costs, without a network.
//
//   local_ranks --case N,H,V [--grid TP,CP]... [--reps 10] [--commit ID] [--out FILE]
//
// Every grid, 1,1 among them, runs forward and forward + backward (bf16, differentiable entropy, sequence parallelism
// where tp > 1) in turns; wall times until every stream is done, medians. Log-probs and entropies must have the bits of
// one rank, or nothing is timed. One JSON line a measurement: inverse_efficiency = ms / one_rank_ms, since the ranks'
// times add up on one device.
#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu_exact.h"
#include "gpu_memory.h"
#include "lmhead/parallel.h"

namespace lmhead::bench {
namespace {

constexpr DType kType = DType::kBFloat16;
constexpr std::size_t kElement = 2;
constexpr std::int64_t kSequences = 8;

/// The whole problem: X ~ N(0, 1), W ~ N(0, 1.5^2 / H).
struct Data {
  std::int64_t n, h, v;
  Memory hidden, weight;
  std::unique_ptr<Memory> ids, a, g;

  Data(std::int64_t tokens, std::int64_t width, std::int64_t vocab)
      : n(tokens),
        h(width),
        v(vocab),
        hidden(static_cast<std::size_t>(n * h) * kElement),
        weight(static_cast<std::size_t>(v * h) * kElement) {
    fill_normal(hidden.data(), kType, n * h, 1, 1.0f);
    fill_normal(weight.data(), kType, v * h, 2, 1.5f / std::sqrt(static_cast<float>(h)));
    std::mt19937 random(3);
    std::vector<std::int64_t> id(static_cast<std::size_t>(n));
    for (std::int64_t& i : id) i = std::uniform_int_distribution<std::int64_t>(0, v - 1)(random);
    ids = std::make_unique<Memory>(id);
    for (auto* upstream : {&a, &g}) {
      std::vector<float> values(static_cast<std::size_t>(n));
      for (float& x : values) x = std::normal_distribution<float>()(random);
      *upstream = std::make_unique<Memory>(values);
    }
    require(cudaDeviceSynchronize());
  }
};

/// One rank's tensors and calls.
struct Rank {
  const Data& data;
  const PackedLayout& layout;
  std::unique_ptr<Communicator> tp, cp;
  cudaStream_t stream = nullptr;
  std::unique_ptr<Memory> hidden, dx, dw, logprob, entropy, lse, forward_memory, backward_memory;
  PackedProblem problem;
  BackwardOutputs gradients;
  Execution execution;

  Rank(const Data& d, const PackedLayout& l, std::unique_ptr<Communicator> t, std::unique_ptr<Communicator> c)
      : data(d), layout(l), tp(std::move(t)), cp(std::move(c)) {
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const bool scattered = tp->size() > 1;
    const std::int64_t local = layout.local_total(), rows = local / (scattered ? tp->size() : 1);
    const std::size_t row = static_cast<std::size_t>(data.h) * kElement;
    hidden = std::make_unique<Memory>(static_cast<std::size_t>(rows) * row);
    const std::vector<std::int64_t> global = layout.local_rows(cp->rank()).value();
    for (std::int64_t i = 0; i < rows; ++i)  // equal sequences need no padding: source rows are global rows
      require(cudaMemcpyAsync(
          hidden->data() + static_cast<std::size_t>(i) * row,
          data.hidden.data() +
              static_cast<std::size_t>(global[static_cast<std::size_t>(i + (scattered ? rows * tp->rank() : 0))]) * row,
          row, cudaMemcpyDeviceToDevice, stream));
    const VocabShard shard = vocab_shard(data.v, tp->rank(), tp->size());
    const std::size_t weight = static_cast<std::size_t>(shard.size) * row;
    dx = std::make_unique<Memory>(hidden->bytes());
    dw = std::make_unique<Memory>(weight);
    for (auto* result : {&logprob, &entropy})
      *result = std::make_unique<Memory>(static_cast<std::size_t>(data.n) * sizeof(float));
    lse = std::make_unique<Memory>(static_cast<std::size_t>(local) * sizeof(float));
    problem.head.hidden = {hidden->data(), rows, data.h, data.h, kType};
    problem.head.weight = {data.weight.data() + static_cast<std::size_t>(shard.start) * row, shard.size, data.h, data.h,
                           kType};
    problem.head.vocab_start = shard.start;
    problem.head.vocab_size = data.v;
    problem.head.entropy = EntropyMode::kGrad;
    problem.layout = &layout;
    problem.input_ids = {data.ids->data(), data.n, 1, DType::kInt64};
    problem.sequence_parallel = scattered;
    gradients.hidden = {dx->data(), rows, data.h, data.h, kType};
    gradients.weight = {dw->data(), shard.size, data.h, data.h, kType};
    execution.device = Device::kCuda;
    execution.stream = stream;
    forward_memory = std::make_unique<Memory>(workspace(Operation::kForward));
    backward_memory = std::make_unique<Memory>(workspace(Operation::kBackward));
    require(cudaStreamSynchronize(stream));
  }
  ~Rank() { cudaStreamDestroy(stream); }

  ParallelGroups groups() const { return {tp.get(), cp.get()}; }
  std::size_t workspace(Operation operation) const {
    const auto size =
        packed_workspace_size(problem, groups(), operation, ReduceHiddenGrad::kNone, gradients, execution);
    require(size.status());
    return size->bytes;
  }
  Execution with(const Memory& memory) const {
    Execution e = execution;
    e.workspace = memory.data();
    e.workspace_bytes = memory.bytes();
    return e;
  }
  void forward() {
    require(packed_forward(problem, groups(), {logprob->floats(), entropy->floats(), lse->floats()},
                           with(*forward_memory)));
  }
  void backward() {
    require(packed_backward(problem, groups(),
                            {.lse = lse->inputs(),
                             .entropy = entropy->inputs(),
                             .dlogprob = data.a->inputs(),
                             .dentropy = data.g->inputs()},
                            gradients, ReduceHiddenGrad::kNone, with(*backward_memory)));
  }
};

/// The ranks of one grid, each on its thread for the life of the object.
class Grid {
 public:
  const int tp, cp;
  std::vector<double> times[2];  ///< forward, forward + backward
  std::string backend;

  Grid(const Data& data, int tp_ranks, int cp_ranks)
      : tp(tp_ranks),
        cp(cp_ranks),
        layout_(PackedLayout::make(std::vector<std::int64_t>(kSequences, data.n / kSequences), {.tp = tp, .cp = cp})
                    .value()),
        turn_(tp * cp + 1) {
    std::vector<std::vector<std::unique_ptr<Communicator>>> across;
    for (int t = 0; t < tp; ++t) across.push_back(local_communicators(cp, kDefaultTimeout, Device::kCuda).value());
    for (int c = 0; c < cp; ++c) {
      auto group = local_communicators(tp, kDefaultTimeout, Device::kCuda).value();
      for (int t = 0; t < tp; ++t)
        ranks_.push_back(
            std::make_unique<Rank>(data, layout_, std::move(group[static_cast<std::size_t>(t)]),
                                   std::move(across[static_cast<std::size_t>(t)][static_cast<std::size_t>(c)])));
    }
    for (auto& rank : ranks_) threads_.emplace_back([this, &rank] { serve(*rank); });
  }
  ~Grid() {
    stop_ = true;
    turn_.arrive_and_wait();
    for (std::thread& thread : threads_) thread.join();
  }

  double run(bool backward) {
    backward_ = backward;
    const auto start = std::chrono::steady_clock::now();
    turn_.arrive_and_wait();
    turn_.arrive_and_wait();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  }
  std::vector<float> results() const {
    const std::size_t n = ranks_[0]->logprob->bytes() / sizeof(float);
    std::vector<float> host(2 * n);
    require(cudaMemcpy(host.data(), ranks_[0]->logprob->data(), n * sizeof(float), cudaMemcpyDeviceToHost));
    require(cudaMemcpy(host.data() + n, ranks_[0]->entropy->data(), n * sizeof(float), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  void serve(Rank& rank) {
    for (;;) {
      turn_.arrive_and_wait();
      if (stop_) return;
      rank.forward();
      if (backward_) rank.backward();
      require(cudaStreamSynchronize(rank.stream));
      if (&rank == ranks_[0].get()) backend = last_backend();
      turn_.arrive_and_wait();
    }
  }

  const PackedLayout layout_;
  std::barrier<> turn_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::thread> threads_;
  bool stop_ = false, backward_ = false;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

int main(int argc, char** argv) {
  std::int64_t n = 16384, h = 4096, v = 131072;
  std::vector<std::pair<int, int>> grids;
  int reps = 10;
  std::string commit = "unknown", out, command = "local_ranks";
  for (int i = 1; i < argc; ++i) command += std::string(" ") + argv[i];
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    int tp = 0, cp = 0;
    if (name == "--case" && std::sscanf(value.c_str(), "%ld,%ld,%ld", &n, &h, &v) == 3) continue;
    if (name == "--grid" && std::sscanf(value.c_str(), "%d,%d", &tp, &cp) == 2 && tp > 0 && cp > 0) {
      grids.emplace_back(tp, cp);
    } else if (name == "--reps") {
      reps = std::atoi(value.c_str());
    } else if (name == "--commit") {
      commit = value;
    } else if (name == "--out") {
      out = value;
    } else {
      fail(name + ": expected --case N,H,V, --grid TP,CP, --reps, --commit or --out, got " + value);
    }
  }
  cudaDeviceProp device{};
  require(cudaGetDeviceProperties(&device, 0));
  const Data data(n, h, v);
  std::vector<std::unique_ptr<Grid>> all;
  all.push_back(std::make_unique<Grid>(data, 1, 1));
  for (const auto& [tp, cp] : grids) all.push_back(std::make_unique<Grid>(data, tp, cp));
  for (auto& grid : all) {
    grid->run(true);
    if (grid->results() != all[0]->results())
      fail("tp " + std::to_string(grid->tp) + " cp " + std::to_string(grid->cp) +
           ": results differ from one rank, nothing was timed");
  }
  for (int i = 0; i < reps + 2; ++i) {
    for (const bool backward : {false, true}) {
      for (auto& grid : all) {
        const double ms = grid->run(backward);
        if (i >= 2) grid->times[backward].push_back(ms);
      }
    }
  }
  std::ofstream file;
  if (!out.empty()) file.open(out, std::ios::app);
  for (const bool backward : {false, true}) {
    const double one = median(all[0]->times[backward]);
    for (const auto& grid : all) {
      const double ms = median(grid->times[backward]);
      char line[1024];
      std::snprintf(
          line, sizeof line,
          "{\"op\": \"%s\", \"backend\": \"%s\", \"transport\": \"local\", \"n\": %ld, \"h\": %ld, \"v\": %ld, "
          "\"dtype\": \"bfloat16\", \"entropy\": \"grad\", \"tp\": %d, \"cp\": %d, \"sequence_parallel\": %s, "
          "\"ms\": %.5g, \"one_rank_ms\": %.5g, \"inverse_efficiency\": %.4g, \"bits_equal\": true, "
          "\"rounds\": %d, \"device\": \"%s\", \"commit\": \"%s\", \"command\": \"%s\"}",
          backward ? "forward_backward" : "forward", grid->backend.c_str(), static_cast<long>(n), static_cast<long>(h),
          static_cast<long>(v), grid->tp, grid->cp, grid->tp > 1 ? "true" : "false", ms, one, ms / one, reps,
          device.name, commit.c_str(), command.c_str());
      std::printf("%s\n", line);
      if (file) file << line << '\n';
    }
  }
  return 0;
}

}  // namespace
}  // namespace lmhead::bench

int main(int argc, char** argv) { return lmhead::bench::main(argc, argv); }
