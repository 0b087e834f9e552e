// Every backend against fp64: data with teeth, shapes, dtypes and every option of a problem.
#include "testing.h"

#include <cmath>
#include <limits>

namespace lmhead {
namespace {

using testing::Case;
using testing::Data;
using testing::RunOptions;
using testing::TestProblem;

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF16 = DType::kFloat16, kF64 = DType::kFloat64;

class Backends : public testing::BackendTest {};

TEST_P(Backends, DataWithTeeth) {
  for (const Data data : testing::kAllData) {
    expect_exact({.n = 37, .h = 64, .v = 1025, .data = data});
    expect_exact({.n = 19, .h = 96, .v = 2048, .data = data, .hidden = kF32, .weight = kF32});
    expect_exact({.n = 16, .h = 40, .v = 777, .data = data, .hidden = kF16, .weight = kF16});
  }
}

// Around every tile border: 8 octants or one, segments of 1024, vector widths, and next to nothing.
TEST_P(Backends, VocabularySizes) {
  for (const std::int64_t v : {2,    3,    7,    8,    9,    63,   64,   65,   127,  128,  129,  255,  257,
                               1023, 1024, 1025, 2047, 2056, 4095, 4104, 8184, 8192, 8200, 9216, 12289}) {
    expect_exact({.n = 5, .h = 24, .v = v});
    expect_exact({.n = 5, .h = 24, .v = v, .data = Data::kLow, .hidden = kF32, .weight = kF32});
  }
  for (const DType dtype : {kBf16, kF32, kF16})
    expect_exact({.n = 5, .h = 24, .v = 1, .hidden = dtype, .weight = dtype});
}

TEST_P(Backends, HiddenSizes) {
  for (const std::int64_t h : {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200, 577, 1030}) {
    expect_exact({.n = 9, .h = h, .v = 300, .data = Data::kPeaked});
    expect_exact({.n = 9, .h = h, .v = 300, .data = Data::kPeaked, .hidden = kF32, .weight = kF32});
  }
}

TEST_P(Backends, RowCounts) {
  for (const std::int64_t n : {1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 257, 300})
    expect_exact({.n = n, .h = 16, .v = 260, .data = Data::kPeaked});
}

TEST_P(Backends, NoRows) {
  for (const DType dtype : {kBf16, kF32}) {
    const TestProblem problem({.n = 0, .h = 16, .v = 130, .hidden = dtype, .weight = dtype, .bias = kF32});
    const testing::Outcome out = run(problem, {});
    if (!out.ok()) continue;
    EXPECT_TRUE(out.logprob.empty() && out.dx.empty());
    EXPECT_EQ(out.dw, std::vector<double>(130 * 16, 0.0));
    EXPECT_EQ(out.db, std::vector<double>(130, 0.0));
  }
}

TEST_P(Backends, DTypesAndMixes) {
  for (const DType hidden : {kBf16, kF16, kF32}) {
    for (const DType weight : {kBf16, kF16, kF32}) {
      expect_exact({.n = 21, .h = 40, .v = 515, .data = Data::kPeaked, .hidden = hidden, .weight = weight});
      for (const DType compute : {kBf16, kF16, kF32})
        expect_exact({.n = 10, .h = 40, .v = 259, .hidden = hidden, .weight = weight, .compute = compute});
    }
  }
}

TEST_P(Backends, Float64WhereSupported) {
  for (const Data data : testing::kAllData)
    expect_exact({.n = 9, .h = 20, .v = 300, .data = data, .hidden = kF64, .weight = kF64});
  expect_exact({.n = 9,
                .h = 20,
                .v = 1032,
                .hidden = kF64,
                .weight = kF64,
                .bias = kF64,
                .row_temperature = true,
                .scale = 0.3,
                .softcap = 20.0,
                .valid_vocab = 1000});
}

TEST_P(Backends, Bias) {
  for (const DType bias : {kBf16, kF16, kF32}) {
    expect_exact({.n = 21, .h = 32, .v = 515, .bias = bias});
    expect_exact({.n = 21, .h = 32, .v = 515, .hidden = kF32, .weight = kF32, .bias = bias, .pad = 8});
  }
}

TEST_P(Backends, ScaleSoftcapTemperature) {
  for (const DType dtype : {kBf16, kF32}) {
    // The error of saturated fp32 gradients sits in the targets' columns: enough rows for a statistic.
    const Case base{.n = 150, .h = 64, .v = 515, .data = Data::kPeaked, .hidden = dtype, .weight = dtype};
    for (const double scale : {0.0625, 0.25, 3.0, -1.0, 0.0}) {
      Case c = base;
      c.scale = scale;
      expect_exact(c);
    }
    for (const double softcap : {30.0, 5.0, 1000.0}) {
      Case c = base;
      c.softcap = softcap;
      expect_exact(c);
      c.scale = 0.25;
      c.bias = kF32;
      c.row_temperature = true;
      expect_exact(c);
    }
    // A small temperature brings any logit far below -88 (or above 88).
    for (const double temperature : {0.05, 0.7, 5.0}) {
      Case c = base;
      c.temperature = temperature;
      expect_exact(c);
    }
    Case c = base;
    c.row_temperature = true;
    expect_exact(c);
  }
}

TEST_P(Backends, IgnoredRowsAreZeroAndWithoutEffect) {
  for (const std::int64_t ignore : {-100, 3, 100000}) {
    for (const DType ids : {DType::kInt32, DType::kInt64}) {
      TestProblem problem(
          {.n = 37, .h = 32, .v = 515, .bias = kF32, .ids = ids, .ignore_index = ignore, .ignore_every = 3});
      expect_exact(problem);
      // Whatever such a row holds: its hidden state, its temperature, its upstream gradients.
      for (std::int64_t i = 0; i < problem.spec.n; ++i) {
        if (problem.is_active(i)) continue;
        for (std::int64_t k = 0; k < problem.spec.h; ++k) problem.hidden.set(i, k, std::nan(""));
        problem.dlogprob.set(i, 0, std::nan(""));
        problem.dentropy.set(i, 0, INFINITY);
      }
      expect_exact(problem);
    }
  }
}

TEST_P(Backends, AllRowsIgnored) {
  TestProblem problem({.n = 9, .h = 16, .v = 130, .bias = kF32, .ignore_every = 1});
  const testing::Outcome out = run(problem, {});
  for (const auto* values : {&out.logprob, &out.entropy, &out.lse, &out.dx, &out.dw, &out.db})
    EXPECT_EQ(*values, std::vector<double>(values->size(), 0.0));
}

TEST_P(Backends, ActiveMask) {
  for (const DType mask : {DType::kBool, DType::kUInt8, DType::kInt8, DType::kInt16, DType::kInt32, DType::kInt64})
    for (const int every : {1, 2, 5})
      for (const std::int64_t pad : {0, 3})
        expect_exact(
            {.n = 37, .h = 32, .v = 300, .ignore_every = 7, .active = mask, .inactive_every = every, .pad = pad});
  // Targets, temperatures and hidden states of inactive rows may be anything, checked mode or not.
  TestProblem problem(
      {.n = 37, .h = 32, .v = 300, .row_temperature = true, .active = DType::kBool, .inactive_every = 2});
  for (std::int64_t i = 0; i < 37; i += 2) {
    problem.targets.set_id(i, i % 4 == 0 ? -12345 : std::numeric_limits<std::int64_t>::max());
    problem.row_temperature.set(i, 0, -1);
    problem.hidden.set(i, 3, std::nan(""));
  }
  for (const bool check : {true, false}) expect_exact(problem, {.check = check});
}

TEST_P(Backends, OutOfVocabularyZero) {
  for (const DType ids : {DType::kInt32, DType::kInt64}) {
    const Case c{.n = 37, .h = 32, .v = 520, .ids = ids, .out_of_vocab = OutOfVocab::kZero, .outside_every = 3};
    for (const bool check : {true, false}) expect_exact(c, {.check = check});
    Case padded = c;
    padded.valid_vocab = 500;
    expect_exact(padded);
    expect_exact(padded, {.shards = {130, 130, 130, 130}});
  }
}

// Unchecked: NaN in its own row, every other row as without it.
TEST_P(Backends, OutOfVocabularyUncheckedIsNaNInItsOwnRow) {
  const Case c{.n = 37, .h = 32, .v = 520, .row_temperature = true};
  TestProblem good(c), bad(c);
  bad.targets.set_id(4, 520);
  bad.targets.set_id(11, -1);
  bad.targets.set_id(12, std::numeric_limits<std::int64_t>::min());
  bad.targets.set_id(13, std::numeric_limits<std::int64_t>::max());
  const double temperatures[] = {-1.0, 0.0, std::nan(""), INFINITY};
  for (int i = 0; i < 4; ++i) bad.row_temperature.set(20 + i, 0, temperatures[i]);
  const testing::Outcome expected = run(good, {.backward = false}), got = run(bad, {.check = false, .backward = false});
  if (refused(got, bad)) return;
  for (std::int64_t i = 0; i < c.n; ++i) {
    const bool id = i == 4 || (i >= 11 && i <= 13), temperature = i >= 20 && i < 24;
    if (id || temperature) {
      EXPECT_TRUE(std::isnan(got.logprob[i])) << "row " << i << ": " << got.logprob[i];
      EXPECT_TRUE(!temperature || std::isnan(got.entropy[i])) << "row " << i << ": " << got.entropy[i];
    } else {
      EXPECT_EQ(got.logprob[i], expected.logprob[i]) << "row " << i;
      EXPECT_EQ(got.entropy[i], expected.entropy[i]) << "row " << i;
    }
  }
}

TEST_P(Backends, ValidVocabPaddingMayHoldNaN) {
  for (const std::int64_t valid : {1, 2, 127, 1000, 1024, 1025, 2000, 2047})
    for (const DType dtype : {kBf16, kF32})
      // In fp32 the gradients of two columns (dl_0 = -dl_1) are a handful of roundings, no statistic.
      expect_exact({.n = 21, .h = 32, .v = 2048, .hidden = dtype, .weight = dtype, .bias = kF32, .valid_vocab = valid},
                   {.backward = dtype == kBf16 || valid > 2});
  expect_exact({.n = 21, .h = 32, .v = 1025, .data = Data::kLow, .valid_vocab = 1024}, {.shards = {1024, 1}});
}

TEST_P(Backends, StridesWithNaNBetween) {
  for (const std::int64_t pad : {1, 8, 13}) {
    for (const DType dtype : {kBf16, kF32, kF16}) {
      const Case c{.n = 21,
                   .h = 40,
                   .v = 300,
                   .hidden = dtype,
                   .weight = dtype,
                   .bias = kF32,
                   .row_temperature = true,
                   .active = DType::kUInt8,
                   .inactive_every = 4,
                   .pad = pad};
      expect_exact(c, {.out_pad = pad});
      expect_exact(c, {.accumulate = false, .out_pad = 2});
    }
  }
}

// In order, ragged, empty, one column: the parts of any cut give the whole.
TEST_P(Backends, VocabularyShards) {
  const std::vector<std::vector<std::int64_t>> cuts = {{2056},
                                                       {1028, 1028},
                                                       {514, 514, 514, 514},
                                                       {257, 257, 257, 257, 257, 257, 257, 257},
                                                       {1, 2055},
                                                       {2055, 1},
                                                       {0, 2056},
                                                       {2056, 0},
                                                       {700, 0, 1356},
                                                       {1000, 1000, 56},
                                                       {0, 1, 0, 2055, 0},
                                                       {300, 200, 100, 400, 56, 500, 250, 250}};
  for (const auto& shards : cuts) {
    for (const Data data : {Data::kFlat, Data::kLow, Data::kVeryPeaked})
      expect_exact({.n = 11, .h = 24, .v = 2056, .data = data, .bias = kF32}, {.shards = shards});
    expect_exact({.n = 11, .h = 24, .v = 2056, .hidden = kF32, .weight = kF32, .valid_vocab = 1500, .ignore_every = 4},
                 {.shards = shards});
    expect_exact({.n = 11, .h = 24, .v = 2056, .hidden = kBf16, .weight = kBf16, .bias = kBf16},
                 {.shards = shards, .accumulate = false});
  }
}

TEST_P(Backends, EntropyModes) {
  for (const EntropyMode mode : {EntropyMode::kOff, EntropyMode::kMetric, EntropyMode::kGrad})
    for (const DType dtype : {kBf16, kF32})
      expect_exact(
          {.n = 37, .h = 48, .v = 1300, .data = Data::kPeaked, .hidden = dtype, .weight = dtype, .entropy = mode});
}

// The remainders of every real head (mod 8, 128, 1024) with its softcap and scale, in small.
TEST_P(Backends, ShapesOfRealHeadsInSmall) {
  const std::vector<testing::Head> heads = testing::read_heads();
  ASSERT_GE(heads.size(), 20u) << "shapes/heads.txt not found; set LMHEAD_SHAPES_DIR";
  for (const testing::Head& head : heads) {
    SCOPED_TRACE(head.name);
    expect_exact({.n = 13,
                  .h = 64 + head.hidden % 128,
                  .v = 2048 + head.vocab % 1024,
                  .data = Data::kPeaked,
                  .scale = head.scale,
                  .softcap = head.softcap});
  }
}

// Full size, as far as the fp64 answer takes seconds: heads of up to 150 million weights on a GPU, of up to 40
// million on one CPU, one head for the plain reference.
TEST_P(Backends, RealHeads) {
  const bool gpu = backend().device == Device::kCuda;
  const std::int64_t most = gpu ? 150'000'000 : backend().name == "reference" ? 30'000'000 : 40'000'000;
  for (const testing::Head& head : testing::read_heads()) {
    if (head.hidden * head.vocab > most) continue;
    SCOPED_TRACE(head.name);
    expect_exact({.n = gpu ? 16 : 2, .h = head.hidden, .v = head.vocab, .scale = head.scale, .softcap = head.softcap});
  }
}

LMHEAD_TEST_EVERY_BACKEND(Backends);

}  // namespace
}  // namespace lmhead
