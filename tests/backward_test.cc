// Gradients of every backend: upstream layouts, rows without gradient, accumulation, skipping, the true
// class at p -> 1, modes and runs bit for bit, and the reference against finite differences.
#include "testing.h"

#include <cmath>

#include "core/element.h"

namespace lmhead {
namespace {

using testing::Case;
using testing::Data;
using testing::Outcome;
using testing::RunOptions;
using testing::TestProblem;
using testing::Upstream;

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF16 = DType::kFloat16, kF64 = DType::kFloat64;

class Backward : public testing::BackendTest {
 protected:
  void expect_same_gradients(const Outcome& a, const Outcome& b, const std::string& what) const {
    EXPECT_EQ(testing::first_difference(a.dx, b.dx), "") << "dX " << what;
    EXPECT_EQ(testing::first_difference(a.dw, b.dw), "") << "dW " << what;
    EXPECT_EQ(testing::first_difference(a.db, b.db), "") << "db " << what;
  }
};

TEST_P(Backward, UpstreamStrides) {
  for (const Upstream upstream : {Upstream::kDense, Upstream::kStrided, Upstream::kBroadcast, Upstream::kReversed})
    for (const DType dtype : {kBf16, kF32})
      for (const EntropyMode mode : {EntropyMode::kOff, EntropyMode::kGrad})
        expect_exact({.n = 37,
                      .h = 32,
                      .v = 515,
                      .hidden = dtype,
                      .weight = dtype,
                      .bias = kF32,
                      .entropy = mode,
                      .upstream = upstream});
}

TEST_P(Backward, MissingUpstreamCountsAsZero) {
  for (const DType dtype : {kBf16, kF32}) {
    const TestProblem problem(
        {.n = 37, .h = 32, .v = 515, .data = Data::kPeaked, .hidden = dtype, .weight = dtype, .bias = kF32});
    expect_exact(problem, {.use_dentropy = false});
    expect_exact(problem, {.use_dlogprob = false});
    const Outcome none = run(problem, {.use_dlogprob = false, .use_dentropy = false});
    if (!none.ok()) continue;
    for (const auto* values : {&none.dx, &none.dw, &none.db})
      EXPECT_EQ(*values, std::vector<double>(values->size(), 0.0));
  }
}

// Rows with a = g = 0 add exactly nothing, whatever they hold.
TEST_P(Backward, RowsWithoutUpstreamAddNothing) {
  for (const int every : {1, 2, 5}) {
    for (const DType dtype : {kBf16, kF32}) {
      TestProblem problem(
          {.n = 37, .h = 32, .v = 515, .hidden = dtype, .weight = dtype, .bias = kF32, .zero_every = every});
      const Outcome clean = run(problem);
      expect_exact(problem);
      for (std::int64_t i = every - 1; i < problem.spec.n; i += every) {
        problem.hidden.set(i, i % problem.spec.h, std::nan(""));
        problem.dlogprob.set(i, 0, -0.0);
      }
      expect_same_gradients(clean, run(problem), "with NaN in rows without upstream gradient");
    }
  }
}

// One row at a time: no row may take another row's upstream gradient.
TEST_P(Backward, EachRowHasItsOwnUpstream) {
  const Case c{.n = 6, .h = 16, .v = 130, .hidden = kF32, .weight = kF32};
  for (std::int64_t only = 0; only < c.n; ++only) {
    TestProblem problem(c);
    for (std::int64_t i = 0; i < c.n; ++i) {
      problem.dlogprob.set(i, 0, i == only ? 1.5 : 0.0);
      problem.dentropy.set(i, 0, i == (only + 1) % c.n ? -0.5 : 0.0);
    }
    expect_exact(problem);
  }
}

TEST_P(Backward, AccumulatesIntoGivenBuffers) {
  for (const DType dtype : {kBf16, kF16, kF32}) {
    for (const std::vector<std::int64_t>& shards : {std::vector<std::int64_t>{}, {400, 0, 115}}) {
      const TestProblem problem(
          {.n = 37, .h = 32, .v = 515, .hidden = dtype, .weight = dtype, .bias = kF32, .valid_vocab = 500});
      const Outcome plain = run(problem, {.shards = shards, .fp32_gradients = true});
      const Outcome sum = run(problem, {.shards = shards, .accumulate = true, .out_pad = 3});
      if (!plain.ok() || !sum.ok()) continue;
      const auto compare = [&](const std::vector<double>& got, const std::vector<double>& added, const char* name) {
        ASSERT_EQ(got.size(), added.size());
        double largest = 0;
        for (const double a : added) largest = std::max(largest, std::abs(a));
        for (std::size_t i = 0; i < got.size(); ++i) {
          const double start = testing::prefill(static_cast<std::int64_t>(i));
          // A GEMM may add its products to the buffer one by one: the roundings of a sum of up to v terms, whose
          // partial sums grow to about the largest element. What is added, and once, is what this test is about.
          const double bound = 0x1p-22 * std::sqrt(515.0) * (std::abs(start) + std::abs(added[i]) + largest);
          ASSERT_TRUE(std::abs(got[i] - (start + added[i])) <= bound)
              << name << " element " << i << ": " << got[i] << " against " << start << " + " << added[i] << " ["
              << problem.spec.name() << "]";
        }
      };
      compare(sum.dx, plain.dx, "dX");
      compare(sum.dw, plain.dw, "dW");
      compare(sum.db, plain.db, "db");
    }
  }
}

TEST_P(Backward, ResultsInFp32OnRequest) {
  for (const DType dtype : {kBf16, kF16})
    expect_exact({.n = 37, .h = 32, .v = 515, .hidden = dtype, .weight = dtype, .bias = dtype},
                 {.fp32_gradients = true});
}

TEST_P(Backward, AbsentGradientsAreSkipped) {
  for (const DType dtype : {kBf16, kF32}) {
    const TestProblem problem({.n = 37, .h = 32, .v = 515, .hidden = dtype, .weight = dtype, .bias = kF32});
    for (int wanted = 0; wanted < 8; ++wanted)
      expect_exact(problem, {.want_dx = (wanted & 1) != 0, .want_dw = (wanted & 2) != 0, .want_db = (wanted & 4) != 0});
  }
}

// 1 is subtracted before the only rounding: at p = 0.9999 the gradient of the true class is 1e-4, of
// which a p rounded to bf16 keeps no digit. One row, so that no other row hides it; W^T = identity makes
// dX equal to dl. The bound: rounding of dl and of dX, and the promised error of log p over 1 - p.
TEST_P(Backward, TrueClassNearProbabilityOne) {
  for (const DType dtype : {kBf16, kF16, kF32}) {
    for (const double p : {0.9, 0.99, 0.999, 0.9999}) {
      constexpr std::int64_t kV = 64;
      TestProblem problem(
          {.n = 1, .h = kV, .v = kV, .hidden = dtype, .weight = dtype, .bias = kF32, .entropy = EntropyMode::kOff});
      for (std::int64_t j = 0; j < kV; ++j) {
        problem.hidden.set(0, j, 0);
        problem.bias.set(j, 0, j == 5 ? std::log(p / (1 - p) * (kV - 1)) : 0);
        for (std::int64_t k = 0; k < kV; ++k) problem.weight.set(j, k, j == k ? 1 : 0);
      }
      problem.targets.set_id(0, 5);
      problem.dlogprob.set(0, 0, 1);
      const Outcome out = run(problem, {.want_dw = false});
      if (!out.ok()) continue;
      const testing::Scores exact = testing::score(problem, testing::exact_products(problem));
      const double expected = -std::expm1(exact.logprob[0]);
      const double unit = dtype == kBf16 ? 0x1p-9 : dtype == kF16 ? 0x1p-12 : 0x1p-24;
      const double bound = 2 * unit * expected + 1e-6 + 0x1p-22 * exact.max[0];
      EXPECT_TRUE(std::abs(out.dx[5] - expected) <= bound)
          << to_string(dtype) << " p = " << p << ": " << out.dx[5] << " against " << expected << ", bound " << bound;
      EXPECT_TRUE(std::abs(out.db[5] - expected) <= bound) << out.db[5] << " against " << expected;
    }
  }
}

// metric: log-prob and all gradients have the bits of off.
TEST_P(Backward, MetricModeChangesNoBit) {
  for (const DType dtype : {kBf16, kF16, kF32}) {
    for (const Data data : {Data::kFlat, Data::kVeryPeaked, Data::kLow}) {
      Case c{.n = 37,
             .h = 40,
             .v = 2056,
             .data = data,
             .hidden = dtype,
             .weight = dtype,
             .bias = kF32,
             .row_temperature = true,
             .ignore_every = 5,
             .entropy = EntropyMode::kOff};
      const Outcome off = run(TestProblem(c));
      c.entropy = EntropyMode::kMetric;
      const Outcome metric = run(TestProblem(c));
      EXPECT_EQ(testing::first_difference(off.logprob, metric.logprob), "") << c.name();
      EXPECT_EQ(testing::first_difference(off.lse, metric.lse), "") << c.name();
      expect_same_gradients(off, metric, c.name());
      EXPECT_TRUE(off.entropy.empty());
      EXPECT_FALSE(metric.entropy.empty());
    }
  }
}

TEST_P(Backward, RepeatsBitForBit) {
  for (const DType dtype : {kBf16, kF16, kF32}) {
    // Several tiles in every direction where that is cheap.
    const bool fast = backend().name != "reference";
    const TestProblem problem({.n = fast ? 600 : 100,
                               .h = 72,
                               .v = fast ? 4500 : 1100,
                               .data = Data::kPeaked,
                               .hidden = dtype,
                               .weight = dtype,
                               .bias = kF32,
                               .ignore_every = 3});
    for (const bool accumulate : {false, true}) {
      const Outcome first = run(problem, {.accumulate = accumulate});
      for (int repeat = 0; repeat < 3; ++repeat)
        expect_same_gradients(first, run(problem, {.accumulate = accumulate}), "of run " + std::to_string(repeat));
    }
  }
}

// Many rows and columns into one sum: fp32 (or better) across chunks, never 16 bits.
TEST_P(Backward, SumsOverChunksKeepTheirDigits) {
  // Every row has the same target and hidden state: dW[target] is a sum of 2000 equal terms.
  TestProblem many({.n = 2000, .h = 8, .v = 24, .entropy = EntropyMode::kOff});
  for (std::int64_t i = 0; i < many.spec.n; ++i) {
    many.targets.set_id(i, 7);
    many.dlogprob.set(i, 0, 1);
    for (std::int64_t k = 0; k < many.spec.h; ++k) many.hidden.set(i, k, 1 + 0.0078125 * static_cast<double>(k));
  }
  expect_exact(many);
  expect_exact(many, {.fp32_gradients = true});
  // All logits equal and weights of one sign: dX is a sum of thousands of small terms of one sign.
  TestProblem wide({.n = 3, .h = 8, .v = 9000, .out_of_vocab = OutOfVocab::kZero, .entropy = EntropyMode::kOff});
  for (std::int64_t j = 0; j < wide.spec.v; ++j)
    for (std::int64_t k = 0; k < wide.spec.h; ++k) wide.weight.set(j, k, 0.5 + 0.25 * static_cast<double>(j % 3));
  for (std::int64_t i = 0; i < wide.spec.n; ++i) wide.targets.set_id(i, -1);
  expect_exact(wide);
}

TEST_P(Backward, SmallWorkspaceGivesTheSameGradients) {
  for (const DType dtype : {kBf16, kF32}) {
    // The reference has no workspace to make small.
    const bool fast = backend().name != "reference";
    const TestProblem problem({.n = fast ? 150 : 9,
                               .h = 64,
                               .v = fast ? 5000 : 1100,
                               .data = Data::kPeaked,
                               .hidden = dtype,
                               .weight = dtype,
                               .bias = kF32});
    for (const std::size_t budget : {std::size_t{1} << 20, std::size_t{4} << 20, std::size_t{64} << 20})
      expect_exact(problem, {.workspace_budget = budget});
    if (backend().device == Device::kCpu) expect_exact(problem, {.own_workspace = false});
  }
}

LMHEAD_TEST_EVERY_BACKEND(Backward);

// d/dx of sum_i a_i logprob_i + g_i entropy_i by central differences, everything fp64: checks the formula
// itself, with every option at once.
TEST(Reference, GradientsAreFiniteDifferences) {
  const BackendInfo* reference = nullptr;
  for (const BackendInfo& backend : backends())
    if (backend.name == "reference") reference = &backend;
  ASSERT_NE(reference, nullptr);
  for (const OutOfVocab outside : {OutOfVocab::kError, OutOfVocab::kZero}) {
    TestProblem problem({.n = 5,
                         .h = 6,
                         .v = 24,
                         .hidden = kF64,
                         .weight = kF64,
                         .bias = kF64,
                         .row_temperature = true,
                         .scale = 0.7,
                         .softcap = 3.0,
                         .valid_vocab = 21,
                         .ignore_every = 4,
                         .out_of_vocab = outside,
                         .outside_every = outside == OutOfVocab::kZero ? 3 : 0});
    const auto loss = [&] {
      const Outcome out = testing::run(*reference, problem, {.backward = false});
      EXPECT_TRUE(out.ok()) << out.message();
      double sum = 0;
      for (std::int64_t i = 0; i < problem.spec.n; ++i) {
        // A target outside the vocabulary reports 0 but keeps the gradient of -lse, as a shard without
        // the target's column does.
        const bool inside = problem.targets.id(i) >= 0 && problem.targets.id(i) < problem.valid();
        sum += problem.a(i) * (inside ? out.logprob[i] : -out.lse[i]) + problem.g(i) * out.entropy[i];
      }
      return sum;
    };
    const Outcome out = testing::run(*reference, problem);
    ASSERT_TRUE(out.ok()) << out.message();
    const auto check = [&](testing::HostTensor& tensor, std::int64_t i, std::int64_t j, double gradient,
                           const char* name) {
      const double at = tensor.at(i, j), step = 1e-5;
      tensor.set(i, j, at + step);
      const double up = loss();
      tensor.set(i, j, at - step);
      const double down = loss();
      tensor.set(i, j, at);
      EXPECT_NEAR(gradient, (up - down) / (2 * step), 1e-8) << name << " " << i << ", " << j;
    };
    for (std::int64_t i = 0; i < problem.spec.n; ++i)
      for (std::int64_t k = 0; k < problem.spec.h; ++k)
        check(problem.hidden, i, k, out.dx[i * problem.spec.h + k], "dX");
    for (std::int64_t j = 0; j < problem.valid(); ++j) {
      check(problem.bias, j, 0, out.db[j], "db");
      for (std::int64_t k = 0; k < problem.spec.h; ++k)
        check(problem.weight, j, k, out.dw[j * problem.spec.h + k], "dW");
    }
  }
}

}  // namespace
}  // namespace lmhead
