// Infinities and NaN: which of them are data, and how far the others may reach.
#include "testing.h"

#include <cmath>

namespace lmhead {
namespace {

using testing::Case;
using testing::Outcome;
using testing::TestProblem;

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16;

class NonFinite : public testing::BackendTest {
 protected:
  static void expect_nan(double value, const char* name, std::int64_t row) {
    EXPECT_TRUE(std::isnan(value)) << name << " of row " << row << " is " << value;
  }
};

TEST_P(NonFinite, MinusInfinityLogitsHoldNoMass) {
  for (const DType dtype : {kBf16, kF32}) {
    for (const std::int64_t v : {300, 2056}) {
      // Every third column, a whole segment, an octant, all but one column.
      for (int pattern = 0; pattern < 4; ++pattern) {
        TestProblem problem({.n = 9, .h = 32, .v = v, .hidden = dtype, .weight = dtype, .bias = kF32});
        for (std::int64_t j = 0; j < v; ++j) {
          const bool masked = pattern == 0   ? j % 3 == 1
                              : pattern == 1 ? j < 1024
                              : pattern == 2 ? j >= 257 && j < 2 * 257
                                             : j != v - 2;
          if (masked && j != v - 2) problem.bias.set(j, 0, -INFINITY);
        }
        for (std::int64_t i = 0; i < 9; ++i) problem.targets.set_id(i, v - 2);
        const Outcome out = run(problem);
        if (!out.ok()) continue;
        const testing::Report report = testing::check(problem, {}, out, memory());
        // All but one column: p = 1 and the gradients are 0 up to rounding; only the forward is checked.
        const bool all_but_one = pattern == 3 || (pattern == 1 && v <= 1024);
        EXPECT_TRUE(report.ok() || (all_but_one && report.failure.rfind("d", 0) == 0)) << report.failure;
        for (const auto* values : {&out.dx, &out.dw, &out.db})
          for (const double value : *values) ASSERT_TRUE(std::isfinite(value));
      }
    }
  }
}

TEST_P(NonFinite, TargetAtMinusInfinity) {
  for (const DType dtype : {kBf16, kF32}) {
    TestProblem problem({.n = 9, .h = 32, .v = 300, .hidden = dtype, .weight = dtype, .bias = kF32});
    problem.bias.set(7, 0, -INFINITY);
    problem.targets.set_id(3, 7);
    const Outcome out = run(problem);
    if (!out.ok()) continue;
    EXPECT_EQ(out.logprob[3], -INFINITY);
    for (std::int64_t i = 0; i < 9; ++i) {
      EXPECT_TRUE(i == 3 || std::isfinite(out.logprob[i]));
      EXPECT_TRUE(std::isfinite(out.entropy[i]) && std::isfinite(out.lse[i]));
    }
    for (const double value : out.dx) ASSERT_TRUE(std::isfinite(value));
  }
}

TEST_P(NonFinite, AllLogitsMinusInfinity) {
  TestProblem problem({.n = 5, .h = 16, .v = 300, .hidden = kF32, .weight = kF32, .bias = kF32});
  for (std::int64_t j = 0; j < 300; ++j) problem.bias.set(j, 0, -INFINITY);
  const Outcome out = run(problem, {.backward = false});
  for (std::size_t i = 0; i < out.logprob.size(); ++i)
    expect_nan(out.logprob[i], "logprob", static_cast<std::int64_t>(i));
}

TEST_P(NonFinite, BadHiddenStateStaysInItsRow) {
  for (const DType dtype : {kBf16, kF32}) {
    for (const std::int64_t v : {1, 300, 2056}) {
      TestProblem problem({.n = 9, .h = 32, .v = v, .hidden = dtype, .weight = dtype});
      const Outcome clean = run(problem);
      problem.hidden.set(2, 5, std::nan(""));
      problem.hidden.set(4, 31, INFINITY);
      problem.hidden.set(8, 0, -INFINITY);
      const Outcome out = run(problem);
      if (!out.ok()) continue;
      for (std::int64_t i = 0; i < 9; ++i) {
        if (i == 2 || i == 4 || i == 8) {
          expect_nan(out.logprob[i], "logprob", i);
          expect_nan(out.entropy[i], "entropy", i);
        } else {
          EXPECT_EQ(out.logprob[i], clean.logprob[i]) << "row " << i;
          EXPECT_EQ(out.entropy[i], clean.entropy[i]) << "row " << i;
          for (std::int64_t k = 0; k < 32; ++k) ASSERT_TRUE(std::isfinite(out.dx[i * 32 + k])) << "dX of row " << i;
        }
      }
      EXPECT_TRUE(std::isnan(out.dx[2 * 32])) << "dX of a NaN row is " << out.dx[2 * 32];
    }
  }
}

TEST_P(NonFinite, BadWeightRowReachesEveryRow) {
  for (const double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    for (const std::int64_t column : {0, 150, 299}) {
      TestProblem problem({.n = 9, .h = 32, .v = 300});
      // A positive coordinate, so that an infinite weight gives a logit of +inf, not -inf.
      for (std::int64_t i = 0; i < 9; ++i) problem.hidden.set(i, 3, 1);
      problem.weight.set(column, 3, bad);
      const Outcome out = run(problem, {.backward = false});
      for (std::size_t i = 0; i < out.logprob.size(); ++i) {
        expect_nan(out.logprob[i], "logprob", static_cast<std::int64_t>(i));
        expect_nan(out.entropy[i], "entropy", static_cast<std::int64_t>(i));
      }
    }
  }
}

// NaN in the softmax hides nothing: a row whose target is outside the vocabulary is NaN, not 0.
TEST_P(NonFinite, OutOfVocabularyRowShowsNaN) {
  TestProblem problem({.n = 5, .h = 32, .v = 300, .out_of_vocab = OutOfVocab::kZero});
  problem.targets.set_id(2, 300);
  problem.targets.set_id(3, 300);
  problem.hidden.set(2, 0, std::nan(""));
  const Outcome out = run(problem, {.backward = false});
  if (!out.ok()) return;
  expect_nan(out.logprob[2], "logprob", 2);
  EXPECT_EQ(out.logprob[3], 0.0);
}

LMHEAD_TEST_EVERY_BACKEND(NonFinite);

}  // namespace
}  // namespace lmhead
