// Packed sequences over tensor- and context-parallel threads against fp64 of the same tokens on one rank.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "core/element.h"
#include "lmhead/parallel.h"
#include "sharded_run.h"
#include "testing.h"

namespace lmhead {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

/// Sequences, and the problem that one rank would solve: row i's target is the next id of its own sequence.
struct Packed {
  std::vector<std::int64_t> lengths, cu_seqlens{0}, ids;
  TestProblem problem;

  Packed(const std::vector<std::int64_t>& sequence_lengths, Case spec)
      : lengths(sequence_lengths), problem(with_rows(spec, sequence_lengths)) {
    for (const std::int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
    for (std::int64_t i = 0; i < problem.spec.n; ++i) ids.push_back((i * 7919 + 13) % problem.spec.v);
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      for (std::int64_t i = cu_seqlens[s]; i + 1 < cu_seqlens[s + 1]; ++i)
        problem.targets.set_id(i, ids[static_cast<std::size_t>(i + 1)]);
      problem.targets.set_id(cu_seqlens[s + 1] - 1, problem.spec.ignore_index);
    }
  }

  static Case with_rows(Case spec, const std::vector<std::int64_t>& lengths) {
    spec.n = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    return spec;
  }
};

struct Layout2D {
  int tp, cp;
  bool sequence_parallel = false;
  ReduceHiddenGrad reduce = ReduceHiddenGrad::kSum;
};

/// What one rank holds and gets.
struct Rank {
  Status status;
  Traffic tp, cp;
  std::vector<double> logprob, entropy, dx, dw;
  std::vector<std::int64_t> source;  ///< of each hidden row; -1 padding
};

using Edit = std::function<void(PackedProblem&, int tp, int cp)>;

Rank run_rank(const BackendInfo& backend, const Packed& packed, const Layout2D& l, const Precision precision,
              Communicator& tp, Communicator& cp, const Edit& edit) {
  Rank out;
  const TestProblem& whole = packed.problem;
  const auto layout = PackedLayout::make(packed.lengths, {.tp = l.tp, .cp = l.cp, .precision = precision});
  const std::vector<std::int64_t> global = layout->local_rows(cp.rank()).value(), source = layout->source_rows();
  const std::int64_t local = layout->local_total(), h = whole.spec.h, tokens = layout->num_tokens();
  const std::int64_t rows = l.sequence_parallel ? local / l.tp : local;
  const std::int64_t first = l.sequence_parallel ? rows * tp.rank() : 0;
  HostTensor hidden(whole.spec.hidden, rows, h, h);
  for (std::int64_t i = 0; i < rows; ++i) {
    out.source.push_back(source[static_cast<std::size_t>(global[static_cast<std::size_t>(first + i)])]);
    for (std::int64_t k = 0; k < h; ++k)  // padding rows hold NaN: nothing of them may reach a result
      hidden.set(
          i, k,
          out.source.back() < 0 ? std::numeric_limits<double>::quiet_NaN() : whole.hidden.at(out.source.back(), k));
  }
  Arena& memory = arena(backend.device);
  const Stream stream(memory);
  const PlacedProblem placed(whole, memory);
  const Buffer own_hidden(memory, hidden.bytes);
  std::vector<std::byte> id_bytes(packed.ids.size() * sizeof(std::int64_t));
  std::memcpy(id_bytes.data(), packed.ids.data(), id_bytes.size());
  const Buffer ids(memory, id_bytes);
  PackedProblem p;
  const VocabShard shard = vocab_shard(whole.spec.v, tp.rank(), l.tp);
  p.head = shard_of(placed.problem(), shard);
  p.head.hidden = hidden.matrix(own_hidden.data());
  p.loss_mask = p.head.active;
  p.row_temperature = p.head.row_temperature;
  p.head.targets = p.head.active = p.head.row_temperature = {};
  p.layout = &*layout;
  p.input_ids = {ids.data(), tokens, 1, DType::kInt64};
  p.sequence_parallel = l.sequence_parallel;
  if (edit) edit(p, tp.rank(), cp.rank());

  constexpr DType kF32 = DType::kFloat32;
  const RankOutput logprob(memory, kF32, tokens), entropy(memory, kF32, tokens), lse(memory, kF32, local);
  Execution execution;
  execution.backend = backend.name.c_str();
  execution.device = backend.device;
  execution.stream = stream.get();
  execution.threads = 1;
  execution.check = true;
  const ParallelGroups groups{l.tp == 1 ? nullptr : &tp, l.cp == 1 ? nullptr : &cp};
  const int number = cp.rank() * l.tp + tp.rank();
  Execution forward = execution;
  const RankWorkspace forward_memory(
      memory, number, packed_workspace_size(p, groups, Operation::kForward, ReduceHiddenGrad::kNone, {}, execution),
      forward);
  out.status = packed_forward(p, groups, {logprob.vector(), entropy.vector(), lse.vector()}, forward);
  out.logprob = logprob.values();
  out.entropy = entropy.values();
  EXPECT_TRUE(forward_memory.intact()) << "memory around the workspace of the forward was written";
  if (!out.status.ok()) {
    for (const double value : out.logprob) EXPECT_TRUE(std::isnan(value)) << "a partial result";
    return out;
  }
  out.tp = tp.traffic();
  out.cp = cp.traffic();
  const RankOutput dx(memory, kF32, rows * h), dw(memory, kF32, shard.size * h);
  BackwardInputs inputs;
  inputs.lse = lse.input();
  inputs.entropy = entropy.input();
  inputs.dlogprob = placed.dlogprob();
  inputs.dentropy = placed.dentropy();
  BackwardOutputs gradients;
  gradients.hidden = dx.matrix(h);
  if (shard.size > 0) gradients.weight = dw.matrix(h);
  const ReduceHiddenGrad reduce = l.sequence_parallel ? ReduceHiddenGrad::kNone : l.reduce;
  Execution backward = execution;
  const RankWorkspace backward_memory(
      memory, number, packed_workspace_size(p, groups, Operation::kBackward, reduce, gradients, execution), backward);
  out.status = packed_backward(p, groups, inputs, gradients, reduce, backward);
  out.dx = dx.values();
  out.dw = dw.values();
  EXPECT_TRUE(backward_memory.intact()) << "memory around the workspace of the backward was written";
  EXPECT_EQ(placed.changed_input(), "");
  if (l.cp > 1) {
    EXPECT_EQ(cp.traffic().all_gathers + cp.traffic().all_reduces + cp.traffic().reduce_scatters, 1);
  }
  return out;
}

/// Ranks [cp][tp] as threads.
std::vector<std::vector<Rank>> run_grid(const BackendInfo& backend, const Packed& packed, const Layout2D& l,
                                        Precision precision = Precision::kNone, const Edit& edit = {},
                                        std::pair<int, int> dead = {-1, -1}) {
  const auto timeout = std::chrono::seconds(30);
  std::vector<std::vector<std::unique_ptr<Communicator>>> tp_groups, cp_groups;
  for (int c = 0; c < l.cp; ++c) tp_groups.push_back(local_communicators(l.tp, timeout, backend.device).value());
  for (int t = 0; t < l.tp; ++t) cp_groups.push_back(local_communicators(l.cp, timeout, backend.device).value());
  std::vector<std::vector<Rank>> ranks(static_cast<std::size_t>(l.cp));
  for (auto& row : ranks) row.resize(static_cast<std::size_t>(l.tp));
  std::vector<std::thread> threads;
  for (std::size_t c = 0; c < ranks.size(); ++c) {
    for (std::size_t t = 0; t < ranks[c].size(); ++t)
      threads.emplace_back([&, c, t] {
        std::unique_ptr<Communicator> tp = std::move(tp_groups[c][t]), cp = std::move(cp_groups[t][c]);
        if (std::pair(static_cast<int>(t), static_cast<int>(c)) != dead)
          ranks[c][t] = run_rank(backend, packed, l, precision, *tp, *cp, edit);
      });
  }
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

/// The ranks' results as one rank's; dW summed over cp in fp32, as a trainer does.
Outcome assemble(const Packed& packed, const Layout2D& l, const std::vector<std::vector<Rank>>& ranks,
                 std::string& failure) {
  Outcome all;
  const std::int64_t n = packed.problem.spec.n, h = packed.problem.spec.h;
  all.dx.assign(static_cast<std::size_t>(n * h), 0.0);
  for (const auto& row : ranks) {
    for (const Rank& rank : row) {
      if (!rank.status.ok()) {
        all.status = rank.status;
        return all;
      }
      if (!same_bits(rank.logprob, ranks[0][0].logprob) || !same_bits(rank.entropy, ranks[0][0].entropy))
        failure += "a rank got other results than rank (0, 0); ";
      const bool counts = l.sequence_parallel || l.reduce == ReduceHiddenGrad::kNone || &rank == &row.front();
      for (std::size_t i = 0; i < rank.source.size(); ++i) {
        for (std::size_t k = 0; k < static_cast<std::size_t>(h); ++k) {
          const double value = rank.dx[i * static_cast<std::size_t>(h) + k];
          if (rank.source[i] < 0) {
            if (!(value == 0)) failure += "dX of a padding row is not 0; ";
          } else if (counts) {
            all.dx[static_cast<std::size_t>(rank.source[i] * h) + k] += value;
          }
        }
      }
    }
  }
  for (std::size_t t = 0; t < ranks[0].size(); ++t) {
    std::vector<double> sum = ranks[0][t].dw;
    for (std::size_t c = 1; c < ranks.size(); ++c)
      for (std::size_t i = 0; i < sum.size(); ++i)
        sum[i] = static_cast<float>(sum[i]) + static_cast<float>(ranks[c][t].dw[i]);
    all.dw.insert(all.dw.end(), sum.begin(), sum.end());
  }
  all.logprob = ranks[0][0].logprob;
  all.entropy = ranks[0][0].entropy;
  return all;
}

Outcome expect_bounds(const BackendInfo& backend, const Packed& packed, const Layout2D& l,
                      Precision precision = Precision::kNone) {
  std::string failure;
  const auto ranks = run_grid(backend, packed, l, precision);
  const Outcome outcome = assemble(packed, l, ranks, failure);
  if (outcome.status.code() == StatusCode::kUnsupported && !must_run(backend, packed.problem)) return outcome;
  const std::string what = backend.name + " tp " + std::to_string(l.tp) + " cp " + std::to_string(l.cp) +
                           (l.sequence_parallel ? " sp " : " ") + packed.problem.spec.name();
  EXPECT_TRUE(outcome.ok()) << what << ": " << outcome.message();
  EXPECT_EQ(failure, "") << what;
  if (!outcome.ok()) return outcome;
  RunOptions run;
  run.fp32_gradients = true;
  run.want_db = false;
  const Report report = check(packed.problem, run, outcome, arena(backend.device));
  EXPECT_TRUE(report.ok()) << what << ": " << report.failure;
  const Rank& rank = ranks[0][0];
  if (l.tp > 1) {
    EXPECT_EQ(rank.tp.all_gathers, l.sequence_parallel ? 2 : 1) << what;
  }
  if (l.cp > 1) {
    EXPECT_EQ(rank.cp.all_gathers, 1) << what;
  }
  return outcome;
}

/// Every backend of this machine: on a CUDA device all ranks share it.
class PackedBackends : public BackendTest {};

TEST_P(PackedBackends, EveryTpAndCp) {
  const Case spec{.h = 24,
                  .v = 8 * 33,
                  .data = Data::kPeaked,
                  .row_temperature = true,
                  .active = DType::kUInt8,
                  .inactive_every = 5};
  // A few rows a rank, where matrix products have their narrow cases, at every size; many rows at the corners.
  for (const std::vector<std::int64_t>& lengths :
       std::vector<std::vector<std::int64_t>>{{5, 1, 3, 7, 2}, {37, 1, 52, 60, 13}}) {
    const Packed packed(lengths, spec);
    Outcome one;
    for (const int cp : {1, 2, 4}) {
      for (const int tp : {1, 2, 3, 4, 8}) {
        if (lengths[0] == 37 && (tp == 2 || tp == 4 || cp == 2)) continue;
        const Outcome outcome =
            expect_bounds(backend(), packed, {.tp = tp, .cp = cp, .sequence_parallel = tp % 2 == 0});
        if (tp == 1 && cp == 1) one = outcome;
        if (tp == 3 || !is_batch_invariant(backend())) continue;
        // Rows are batch-invariant, so CP changes no bit either.
        EXPECT_EQ(first_difference(outcome.logprob, one.logprob), "") << "tp " << tp << " cp " << cp;
        EXPECT_EQ(first_difference(outcome.entropy, one.entropy), "") << "tp " << tp << " cp " << cp;
      }
    }
  }
}

TEST_P(PackedBackends, ReductionsPrecisionsAndShortSequences) {
  const Case spec{.h = 16, .v = 136};
  for (const std::vector<std::int64_t>& lengths :
       std::vector<std::vector<std::int64_t>>{{1}, {1, 1, 1}, {3}, {33, 31, 64}}) {
    const Packed packed(lengths, spec);
    for (const Precision precision : {Precision::kNone, Precision::kFp8, Precision::kMxFp8})
      expect_bounds(backend(), packed, {.tp = 2, .cp = 2, .sequence_parallel = true}, precision);
    expect_bounds(backend(), packed, {.tp = 2, .cp = 2, .reduce = ReduceHiddenGrad::kNone});
    expect_bounds(backend(), packed, {.tp = 1, .cp = 2, .reduce = ReduceHiddenGrad::kNone});
  }
}

/// SkyRL's packed case: TP2 CP2, one sequence of 64, V 4096, H 256, the loss on rows 8:29 and 37:, an fp32 weight; and
/// with a bf16 one, which every backend takes.
TEST_P(PackedBackends, SkyRlPackedCase) {
  if (backend().name == "reference") GTEST_SKIP() << "slow at this size, and checked at the others";
  for (const DType weight : {DType::kFloat32, DType::kBFloat16}) {
    Packed packed({64}, {.h = 256, .v = 4096, .hidden = DType::kBFloat16, .weight = weight, .active = DType::kBool});
    if (!must_run(backend(), packed.problem)) continue;
    for (std::int64_t i = 0; i < 64; ++i) packed.problem.active.set_id(i, (i >= 8 && i < 29) || i >= 37);
    const Outcome outcome =
        expect_bounds(backend(), packed, {.tp = 2, .cp = 2, .sequence_parallel = weight == DType::kBFloat16});
    const Scores exact = score(packed.problem, exact_products(packed.problem));
    ASSERT_EQ(outcome.logprob.size(), 64u);
    for (std::size_t i = 0; i < 64; ++i) {
      EXPECT_TRUE(std::fabs(outcome.logprob[i] - exact.logprob[i]) <= 2e-2) << i;
      EXPECT_TRUE(std::fabs(outcome.entropy[i] - exact.entropy[i]) <= 2e-2) << i;
    }
  }
}

TEST(Packed, AFaultOnOneRankReachesEveryRank) {
  const Packed packed({9, 5}, {.h = 8, .v = 24});
  const Packed other({10, 4}, {.h = 8, .v = 24});
  std::vector<std::int64_t> bad = packed.ids;
  bad[4] = 24;
  std::vector<std::uint8_t> all(14, 1), fewer = all;
  fewer[6] = 0;
  const auto other_layout = PackedLayout::make(other.lengths, {.tp = 2, .cp = 2});
  struct Fault {
    const char* message;
    Edit edit;
  };
  const auto on_one = [](const Edit& edit) {
    return [edit](PackedProblem& p, int tp, int cp) {
      if (tp == 1 && cp == 1) edit(p, tp, cp);
    };
  };
  const Fault faults[] = {
      {"targets: expected ids in [0, 24)",
       [&](PackedProblem& p, int, int) { p.input_ids.data = bad.data(); }},  // rows of one cp rank only
      {"temperature: expected", on_one([](PackedProblem& p, int, int) { p.head.temperature = 0; })},
      {"ranks disagree", on_one([&](PackedProblem& p, int, int) { p.layout = &*other_layout; })},
      {"ranks disagree", on_one([](PackedProblem& p, int, int) { p.head.softcap = 3; })},
      // Each tp group agrees by itself.
      {"ranks disagree",
       [&](PackedProblem& p, int, int cp) {
         p.loss_mask = {cp == 1 ? fewer.data() : all.data(), 14, 1, DType::kUInt8};
       }},
      {"input_ids: expected [14]", on_one([](PackedProblem& p, int, int) { p.input_ids.size = 13; })},
  };
  for (const Fault& fault : faults) {
    for (const auto& row : run_grid(cpu_backends().front(), packed, {.tp = 2, .cp = 2}, Precision::kNone, fault.edit)) {
      for (const Rank& rank : row)
        EXPECT_NE(rank.status.message().find(fault.message), std::string::npos)
            << fault.message << ": " << rank.status.to_string();
    }
  }
  const auto ranks = run_grid(cpu_backends().front(), packed, {.tp = 2, .cp = 2}, Precision::kNone, {}, {1, 0});
  for (std::size_t c = 0; c < 2; ++c) {
    for (std::size_t t = 0; t < 2; ++t)
      if (!(t == 1 && c == 0)) {
        EXPECT_EQ(ranks[c][t].status.code(), StatusCode::kCommunication) << t << " " << c;
      }
  }
}

TEST(Packed, ArgumentsAreChecked) {
  const Packed packed({5}, {.h = 4, .v = 9});
  const auto message = [&](const Edit& edit) {
    return run_grid(cpu_backends().front(), packed, {.tp = 1, .cp = 1}, Precision::kNone, edit)[0][0].status.message();
  };
  EXPECT_EQ(message([](PackedProblem& p, int, int) { p.layout = nullptr; }),
            "layout: expected one, got a null pointer");
  EXPECT_EQ(message([](PackedProblem& p, int, int) { p.head.hidden.rows = 4; }),
            "hidden: expected [5, H] (this rank's rows of the layout), got [4, 4]");
  for (const bool gathered : {false, true}) {
    EXPECT_EQ(
        message([&](PackedProblem& p, int, int) { p.sequence_parallel = gathered, p.head.hidden.data = nullptr; }),
        "hidden: expected data for [5, 4], got a null pointer");
    EXPECT_EQ(
        message([&](PackedProblem& p, int, int) { p.sequence_parallel = gathered, p.head.hidden.row_stride = 3; }),
        "hidden: expected row stride >= 4 (contiguous columns), got 3");
  }
  EXPECT_EQ(message([](PackedProblem& p, int, int) { p.input_ids.data = nullptr; }),
            "input_ids: expected data for [5], got a null pointer");
  EXPECT_EQ(message([](PackedProblem& p, int, int) { p.loss_mask = p.input_ids, p.loss_mask.dtype = DType::kFloat32; }),
            "loss_mask: expected bool or an integer type, got float32");
  EXPECT_EQ(message([](PackedProblem& p, int, int) { p.input_ids.dtype = DType::kInt16; }),
            "input_ids: expected int32 or int64, got int16");
  EXPECT_NE(message([](PackedProblem& p, int, int) { p.head.targets = p.input_ids; }).find("head: expected no targets"),
            std::string::npos);
}

LMHEAD_TEST_EVERY_BACKEND(PackedBackends);

}  // namespace
}  // namespace lmhead
