// Sharded heads against one rank: bits over equal shards, ragged and empty shards, reductions, traffic, faults.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "lmhead/parallel.h"
#include "rank_threads.h"
#include "sharded_run.h"
#include "testing.h"

namespace lmhead {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

RunOptions as_run(const ShardedOptions& options, bool entropy_gradient = true) {
  RunOptions run;
  run.fp32_gradients = options.fp32_gradients;
  run.use_dentropy = entropy_gradient;
  return run;
}

/// Every backend of this machine: on a CUDA device all ranks share it.
class ShardedBackends : public BackendTest {};

/// Runs over `tp` threads and checks every promise of section 2 against fp64. Not ok where the backend may refuse the
/// problem.
Outcome expect_bounds(const BackendInfo& backend, const TestProblem& problem, int tp, const ShardedOptions& options) {
  std::string failure;
  const Outcome outcome = run_threads(backend, problem, tp, options, failure);
  if (outcome.status.code() == StatusCode::kUnsupported && !must_run(backend, problem)) return outcome;
  const std::string what = backend.name + " tp " + std::to_string(tp) + " " + problem.spec.name();
  EXPECT_TRUE(outcome.ok()) << what << ": " << outcome.message();
  EXPECT_EQ(failure, "") << what;
  if (outcome.ok()) {
    const Report report = check(problem, as_run(options), outcome, arena(backend.device));
    EXPECT_TRUE(report.ok()) << what << ": " << report.failure;
  }
  return outcome;
}

TEST(VocabShard, CutsAsTorchChunkDoes) {
  const auto cut = [](std::int64_t v, int ranks) {
    std::string text;
    for (int r = 0; r < ranks; ++r) {
      const VocabShard s = vocab_shard(v, r, ranks);
      text += std::to_string(s.start) + "+" + std::to_string(s.size) + " ";
    }
    return text;
  };
  EXPECT_EQ(cut(8, 4), "0+2 2+2 4+2 6+2 ");
  EXPECT_EQ(cut(50257, 3), "0+16753 16753+16753 33506+16751 ");
  EXPECT_EQ(cut(5, 4), "0+2 2+2 4+1 5+0 ");
  EXPECT_EQ(cut(1, 3), "0+1 1+0 1+0 ");
}

/// tp 1, 2, 4, 8 give one set of bits; 3 and every other cut stay within the bounds.
TEST_P(ShardedBackends, ValuesBitsAndGradientsOverTp) {
  for (const Data data : {Data::kFlat, Data::kVeryPeaked, Data::kLow, Data::kOutliers}) {
    const TestProblem problem(
        {.n = 24, .h = 40, .v = 8 * 331, .data = data, .bias = DType::kFloat32, .ignore_every = 7});
    Outcome one;
    for (const int tp : {1, 2, 3, 4, 8}) {
      for (const ReduceHiddenGrad reduce :
           {ReduceHiddenGrad::kNone, ReduceHiddenGrad::kSum, ReduceHiddenGrad::kReduceScatter}) {
        // A part that the caller sums is compared in fp32: how it is rounded is the caller's.
        const Outcome outcome = expect_bounds(backend(), problem, tp,
                                              {.reduce = reduce, .fp32_gradients = reduce == ReduceHiddenGrad::kNone});
        if (tp == 1) one = outcome;
        if (tp == 3 || !is_batch_invariant(backend())) continue;
        EXPECT_EQ(first_difference(outcome.logprob, one.logprob), "") << "tp " << tp;
        EXPECT_EQ(first_difference(outcome.entropy, one.entropy), "") << "tp " << tp;
        EXPECT_EQ(first_difference(outcome.lse, one.lse), "") << "tp " << tp;
      }
    }
  }
}

/// The reduced gradient of hidden, or a rank's own, is added to what its fp32 buffer holds.
TEST_P(ShardedBackends, TheHiddenGradientAccumulates) {
  const TestProblem problem({.n = 24, .h = 40, .v = 8 * 331, .ignore_every = 7});
  for (const ReduceHiddenGrad reduce : {ReduceHiddenGrad::kSum, ReduceHiddenGrad::kReduceScatter})
    for (const int tp : {1, 2, 4})
      expect_bounds(backend(), problem, tp, {.reduce = reduce, .fp32_gradients = true, .accumulate_hidden = true});
  expect_bounds(backend(), problem, 1,
                {.reduce = ReduceHiddenGrad::kNone, .fp32_gradients = true, .accumulate_hidden = true});
}

TEST_P(ShardedBackends, OctantsLongerThanASegmentKeepTheirBits) {
  const TestProblem problem({.n = 5, .h = 16, .v = 8 * 1100});
  const Outcome one = expect_bounds(backend(), problem, 1, {});
  for (const int tp : {2, 4, 8}) {
    const Outcome outcome = expect_bounds(backend(), problem, tp, {});
    if (!is_batch_invariant(backend())) continue;
    EXPECT_EQ(first_difference(outcome.logprob, one.logprob), "") << "tp " << tp;
    EXPECT_EQ(first_difference(outcome.entropy, one.entropy), "") << "tp " << tp;
  }
}

TEST_P(ShardedBackends, RaggedAndEmptyShardsAndSmallSizes) {
  for (const std::int64_t v : {50257, 49155}) expect_bounds(backend(), TestProblem({.n = 3, .h = 8, .v = v}), 3, {});
  const TestProblem problem({.n = 6, .h = 16, .v = 2050, .row_temperature = true, .softcap = 5.0, .valid_vocab = 2049});
  for (const std::vector<std::int64_t>& shards :
       std::vector<std::vector<std::int64_t>>{{0, 2050}, {2050, 0, 0}, {1, 2048, 1}, {1023, 0, 1027}})
    expect_bounds(backend(), problem, static_cast<int>(shards.size()), {.shards = shards});
  expect_bounds(backend(), TestProblem({.n = 1, .h = 1, .v = 1}), 3, {});
  expect_bounds(backend(), TestProblem({.n = 4, .h = 3, .v = 2}), 4, {.reduce = ReduceHiddenGrad::kReduceScatter});
  for (const DType dtype : {DType::kFloat16, DType::kFloat32, DType::kFloat64})
    expect_bounds(backend(), TestProblem({.n = 8, .h = 24, .v = 272, .hidden = dtype, .weight = dtype}), 4, {});
  std::string failure;
  EXPECT_TRUE(run_threads(backend(), TestProblem({.n = 0, .h = 8, .v = 9}), 2, {}, failure).ok());
}

/// The heads of shapes/heads.txt at their whole vocabulary; H is small, since shards do not see it.
TEST_P(ShardedBackends, BitsOverTpForEveryRealVocabulary) {
  if (backend().name == "reference" || !is_batch_invariant(backend())) GTEST_SKIP() << "slow, or without the promise";
  for (const Head& head : read_heads()) {
    if (head.vocab % 8 != 0) continue;
    const TestProblem problem({.n = 2,
                               .h = 8,
                               .v = head.vocab,
                               .scale = head.scale,
                               .softcap = head.softcap,
                               .entropy = EntropyMode::kMetric});
    Outcome one;
    for (const int tp : {1, 2, 4, 8}) {
      std::string failure;
      const Outcome outcome = run_threads(backend(), problem, tp, {.forward_only = true}, failure);
      ASSERT_TRUE(outcome.ok()) << head.name << ": " << outcome.message();
      EXPECT_EQ(failure, "");
      if (tp == 1) one = outcome;
      EXPECT_EQ(first_difference(outcome.logprob, one.logprob), "") << head.name << " tp " << tp;
      EXPECT_EQ(first_difference(outcome.entropy, one.entropy), "") << head.name << " tp " << tp;
    }
  }
}

/// SkyRL's own test: B2 S64 V4096 over 2 and 4 ranks, values within 1e-4, gradients within 5e-3.
TEST_P(ShardedBackends, SkyRlShapesAndTolerances) {
  const TestProblem problem({.n = 128, .h = 64, .v = 4096, .hidden = DType::kFloat32, .weight = DType::kFloat32});
  if (!must_run(backend(), problem)) GTEST_SKIP() << "takes no fp32";
  const Scores exact = score(problem, exact_products(problem));
  std::vector<std::int64_t> rows(4096);
  for (std::size_t j = 0; j < rows.size(); ++j) rows[j] = static_cast<std::int64_t>(j);
  const Gradients gradients = exact_gradients(problem, logit_gradients(problem, exact), rows);
  for (const int tp : {2, 4}) {
    std::string failure;
    const Outcome outcome = run_threads(backend(), problem, tp, {}, failure);
    ASSERT_TRUE(outcome.ok()) << outcome.message();
    const auto within = [](const std::vector<double>& a, const std::vector<double>& b, double tolerance) {
      if (a.size() != b.size()) return false;
      for (std::size_t i = 0; i < a.size(); ++i)
        if (!(std::fabs(a[i] - b[i]) <= tolerance)) return false;
      return true;
    };
    EXPECT_TRUE(within(outcome.logprob, exact.logprob, 1e-4));
    EXPECT_TRUE(within(outcome.entropy, exact.entropy, 1e-4));
    EXPECT_TRUE(within(outcome.dx, gradients.dx, 5e-3));
    EXPECT_TRUE(within(outcome.dw, gradients.dw, 5e-3));
  }
}

TEST_P(ShardedBackends, MetricEntropyLeavesLogprobAndGradientsAsWithoutIt) {
  for (const int tp : {2, 4}) {
    std::string failure;
    const Case base{.n = 16, .h = 32, .v = 1032};
    Case off = base, metric = base;
    off.entropy = EntropyMode::kOff;
    metric.entropy = EntropyMode::kMetric;
    const Outcome a = run_threads(backend(), TestProblem(off), tp, {}, failure);
    const Outcome b = run_threads(backend(), TestProblem(metric), tp, {}, failure);
    ASSERT_TRUE(a.ok() && b.ok()) << a.message() << b.message();
    EXPECT_EQ(first_difference(a.logprob, b.logprob), "");
    EXPECT_EQ(first_difference(a.dx, b.dx), "");
    EXPECT_EQ(first_difference(a.dw, b.dw), "");
    EXPECT_EQ(b.entropy.size(), 16u);
  }
}

TEST_P(ShardedBackends, OneAllGatherAForwardAndNoneABackward) {
  const TestProblem problem({.n = 12, .h = 16, .v = 72});
  for (const int tp : {1, 2, 4}) {
    for (const bool checked : {true, false}) {
      for (const ReduceHiddenGrad reduce :
           {ReduceHiddenGrad::kNone, ReduceHiddenGrad::kSum, ReduceHiddenGrad::kReduceScatter}) {
        std::string failure;
        Traffic forward, backward;
        ASSERT_TRUE(
            run_threads(backend(), problem, tp, {.reduce = reduce, .check = checked}, failure, &forward, &backward)
                .ok());
        const std::int64_t others = tp - 1, header = checked ? 512 : 0;
        EXPECT_EQ(forward.all_gathers, 1);
        EXPECT_EQ(forward.exchanges, checked);
        EXPECT_EQ(forward.all_reduces + forward.reduce_scatters, 0);
        EXPECT_EQ(forward.bytes_sent, others * (16 * 12 + header));
        EXPECT_EQ(backward.all_gathers, 0);
        EXPECT_EQ(backward.exchanges, checked && reduce != ReduceHiddenGrad::kNone);
        EXPECT_EQ(backward.all_reduces, reduce == ReduceHiddenGrad::kSum);
        EXPECT_EQ(backward.reduce_scatters, reduce == ReduceHiddenGrad::kReduceScatter);
      }
    }
  }
}

TEST(Sharded, OneBadRankFailsEveryRankAndTheGroupStaysUsable) {
  const TestProblem problem({.n = 5, .h = 8, .v = 24}), longer({.n = 6, .h = 8, .v = 24});
  TestProblem bad = problem, other = problem;
  bad.targets.set_id(3, 24);
  other.targets.set_id(2, (problem.targets.id(2) + 1) % 24);
  struct Fault {
    const char* message;
    std::function<void(Problem&)> edit;
  };
  const Fault faults[] = {
      {"targets: expected ids in [0, 24)", [&](Problem& p) { p.targets = bad.host().targets; }},
      {"ranks disagree on N: expected the same on all ranks, got 5 on rank 0 and 6 on rank 1",
       [&](Problem& p) {
         p = shard_of(longer, {12, 12});
       }},
      {"ranks disagree on temperature: expected the same on all ranks, got 1 on rank 0 and 2 on rank 1",
       [](Problem& p) { p.temperature = 2; }},
      {"ranks disagree on softcap", [](Problem& p) { p.softcap = 30; }},
      {"ranks disagree on the entropy mode", [](Problem& p) { p.entropy = EntropyMode::kMetric; }},
      {"ranks disagree on out_of_vocab", [](Problem& p) { p.out_of_vocab = OutOfVocab::kZero; }},
      {"ranks disagree on targets", [&](Problem& p) { p.targets = other.host().targets; }},
      {"vocab_start: expected 12 on rank 1", [](Problem& p) { p.vocab_start = 11; }},
      {"vocab_size: expected the global vocabulary", [](Problem& p) { p.vocab_size.reset(), p.vocab_start = 0; }},
      {"vocab_size: expected the sum of all shards 23", [](Problem& p) { p.weight.rows = 11; }},
  };
  for (const Fault& fault : faults) {
    const auto statuses = run_ranks(2, [&](Communicator& tp) -> Status {
      const Problem good = shard_of(problem, vocab_shard(24, tp.rank(), 2));
      Problem p = good;
      if (tp.rank() == 1) fault.edit(p);
      const std::size_t n = static_cast<std::size_t>(p.hidden.rows);
      std::vector<float> logprob(n, std::numeric_limits<float>::quiet_NaN());
      const ForwardOutputs outputs{{logprob.data(), p.hidden.rows, 1, DType::kFloat32}, {}, {}};
      const Status status = sharded_forward(p, tp, outputs);
      for (const float value : logprob) EXPECT_TRUE(std::isnan(value)) << "a partial result";
      std::vector<float> again(5);
      EXPECT_TRUE(sharded_forward(good, tp, {{again.data(), 5, 1, DType::kFloat32}, {}, {}}).ok());
      return status;
    });
    for (const Status& s : statuses) EXPECT_NE(s.message().find(fault.message), std::string::npos) << s.to_string();
    EXPECT_EQ(statuses[0].code(), StatusCode::kCommunication) << fault.message;
  }
}

TEST(Sharded, WithoutChecksAFailingRankAbortsAndADeadOneIsNoticed) {
  const TestProblem problem({.n = 5, .h = 8, .v = 24});
  for (const bool dead : {true, false}) {
    const auto statuses = run_ranks(4, [&](Communicator& tp) -> Status {
      if (dead && tp.rank() == 2) return {};
      Problem p = shard_of(problem, vocab_shard(24, tp.rank(), 4));
      if (tp.rank() == 2) p.temperature = -1;
      std::vector<float> logprob(5, std::numeric_limits<float>::quiet_NaN());
      Execution execution;
      execution.check = dead;
      const Status status = sharded_forward(p, tp, {{logprob.data(), 5, 1, DType::kFloat32}, {}, {}}, execution);
      for (const float value : logprob) EXPECT_TRUE(std::isnan(value)) << "a partial result";
      return status;
    });
    for (const std::size_t r : {0, 1, 3}) {
      EXPECT_EQ(statuses[r].code(), StatusCode::kCommunication);
      EXPECT_NE(statuses[r].message().find(dead ? "rank 2 is gone" : "rank 2: temperature"), std::string::npos)
          << statuses[r].message();
    }
  }
}

TEST(Sharded, ArgumentsOfTheReduction) {
  const TestProblem problem({.n = 5, .h = 8, .v = 24});
  auto group = local_communicators(1);
  Communicator& tp = *group->front();
  const Problem p = shard_of(problem, {0, 24});
  std::vector<float> lse(5), dx(40);
  BackwardInputs inputs;
  inputs.lse = {lse.data(), 5, 1, DType::kFloat32};
  EXPECT_EQ(sharded_backward(p, tp, inputs, {}, ReduceHiddenGrad::kSum).message(),
            "reduce_hidden_grad: expected none without a hidden gradient, got one");
  BackwardOutputs outputs;
  outputs.hidden = {dx.data(), 4, 8, 8, DType::kFloat32};
  EXPECT_EQ(sharded_backward(p, tp, inputs, outputs, ReduceHiddenGrad::kReduceScatter).message(),
            "hidden gradient: expected [5, 8] (rows of this rank after the reduce-scatter), got [4, 8]");
}

LMHEAD_TEST_EVERY_BACKEND(ShardedBackends);

}  // namespace
}  // namespace lmhead
