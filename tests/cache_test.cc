// What the forward keeps for the backward: log-prob and entropy bits that a cache does not change, gradients within
// the promise at every share of rows kept, masks and shards that move the kept rows, and refusals.
#include "testing.h"

#include <cmath>

namespace lmhead {
namespace {

using testing::Case;
using testing::Data;
using testing::Outcome;
using testing::RunOptions;
using testing::TestProblem;

constexpr DType kF32 = DType::kFloat32, kF16 = DType::kFloat16, kBF16 = DType::kBFloat16;
constexpr std::size_t kAll = std::size_t{1} << 40;

bool keeps_cache(const BackendInfo& backend) { return backend.name == "sm90"; }

/// Bytes that hold `rows` rows of a head of v columns, and less than a tile of rows more.
std::size_t budget_for(std::int64_t rows, std::int64_t n, std::int64_t v) {
  const std::int64_t octants = v % 8 == 0 ? 8 : 1, tiles = octants * ((v / octants + 255) / 256);
  return static_cast<std::size_t>(rows * tiles * (256 * 2 + 32) + 8 * n + 4 * 256);
}

class Cache : public testing::BackendTest {
 protected:
  /// Runs with a cache of `budget` and without one: equal results, gradients within the promise, and at most a tenth
  /// above the uncached error; and a second backward from the same cache gives the same bits.
  void compare(const TestProblem& problem, std::size_t budget, const RunOptions& options = {}) const {
    RunOptions with_cache = options;
    with_cache.cache_budget = budget;
    const Outcome plain = run(problem, options), cached = testing::run(backend(), problem, with_cache);
    ASSERT_TRUE(cached.ok()) << cached.message() << " [" << problem.spec.name() << "]";
    EXPECT_EQ(testing::first_difference(plain.logprob, cached.logprob), "") << problem.spec.name();
    EXPECT_EQ(testing::first_difference(plain.entropy, cached.entropy), "") << problem.spec.name();
    EXPECT_EQ(testing::first_difference(plain.lse, cached.lse), "") << problem.spec.name();
    if (options.accumulate) {  // the promise is one for gradients without what they were added to
      for (std::size_t i = 0; i < plain.dx.size(); ++i)
        ASSERT_TRUE(std::abs(plain.dx[i] - cached.dx[i]) <= 2e-3 * (1 + std::abs(plain.dx[i]))) << "dX element " << i;
      for (std::size_t i = 0; i < plain.dw.size(); ++i)
        ASSERT_TRUE(std::abs(plain.dw[i] - cached.dw[i]) <= 2e-3 * (1 + std::abs(plain.dw[i]))) << "dW element " << i;
      return;
    }
    const testing::Report with = check(problem, with_cache, cached, memory());
    const testing::Report without = check(problem, options, plain, memory());
    EXPECT_TRUE(with.ok()) << with.failure << " with a cache of " << cached.cache_bytes << " bytes";
    const auto expect_close = [&](const char* name, double error, double reference, double bound) {
      EXPECT_TRUE(!(error > 1.1 * reference) || error <= 0.1 * bound)
          << name << ": error " << error << " with a cache, " << reference << " without [" << problem.spec.name()
          << "]";
    };
    expect_close("dX", with.dx_err, without.dx_err, with.dx_bound);
    expect_close("dW", with.dw_err, without.dw_err, with.dw_bound);
    with_cache.backwards = 2;
    const Outcome again = testing::run(backend(), problem, with_cache);
    ASSERT_TRUE(again.ok()) << again.message();
    EXPECT_EQ(testing::first_difference(cached.dx, again.dx), "") << "dX of a second backward";
    EXPECT_EQ(testing::first_difference(cached.dw, again.dw), "") << "dW of a second backward";
    EXPECT_EQ(testing::first_difference(cached.db, again.db), "") << "db of a second backward";
  }
  void compare(const Case& spec, std::size_t budget, const RunOptions& options = {}) const {
    compare(TestProblem(spec), budget, options);
  }
};

TEST_P(Cache, EveryKindOfData) {
  for (const DType dtype : {kBF16, kF16})
    for (const Data data : testing::kAllData)
      for (const EntropyMode mode : {EntropyMode::kOff, EntropyMode::kGrad})
        compare({.n = 150, .h = 64, .v = 2056, .data = data, .hidden = dtype, .weight = dtype, .entropy = mode}, kAll);
}

// fp16 gradients are rounded as finely as fp16 exponentials: without the rounding of an output what is kept counts
// most. Of one row alone a few columns carry the gradient, and chance decides which rounding is the larger.
TEST_P(Cache, HalvesOfEveryShape) {
  for (const bool fp32_gradients : {false, true})
    for (const std::int64_t n : {129, 300})
      for (const std::int64_t v : {64, 257, 1025, 8 * 1031})
        for (const Data data : {Data::kFlat, Data::kPeaked})
          compare({.n = n, .h = 40, .v = v, .data = data, .hidden = kF16, .weight = kF16}, kAll,
                  {.fp32_gradients = fp32_gradients});
  compare({.n = 600, .h = 64, .v = 2056, .hidden = kF16, .weight = kF16}, budget_for(256, 600, 2056));
}

// Octants of odd size, ragged tiles, a vocabulary of one octant, a single column; few rows and many.
TEST_P(Cache, Shapes) {
  for (const std::int64_t n : {1, 37, 128, 129, 300})
    for (const std::int64_t v : {1, 7, 64, 257, 1025, 4104, 8 * 1031, 8 * 1313})
      compare({.n = n, .h = 40, .v = v, .data = Data::kPeaked}, kAll);
}

TEST_P(Cache, EveryOption) {
  for (const Data data : {Data::kFlat, Data::kPeaked}) {
    Case c{.n = 300,
           .h = 72,
           .v = 4104,
           .data = data,
           .bias = kF32,
           .row_temperature = true,
           .softcap = 30.0,
           .valid_vocab = 4099};
    compare(c, kAll);
    c.softcap = 5.0;  // most logits near the cap
    compare(c, kAll);
    c.softcap.reset();
    c.scale = -0.7;
    compare(c, kAll);
    c.bias.reset();
    c.scale = 0.6;
    c.out_of_vocab = OutOfVocab::kZero;
    c.outside_every = 3;
    compare(c, kAll);
  }
}

// The cached rows end inside the batch: the others take the projection again, in row chunks and in one.
TEST_P(Cache, RowsBeyondTheBudget) {
  for (const std::int64_t rows : {128, 256, 384, 512}) {
    for (const std::int64_t v : {2056, 300}) {  // chunks along the vocabulary and along the rows
      const Case c{.n = 600, .h = 64, .v = v, .data = Data::kPeaked, .bias = kF32};
      for (const std::size_t workspace : {std::size_t{0}, std::size_t{2} << 20})
        compare(c, budget_for(rows, c.n, v), {.workspace_budget = workspace});
    }
  }
}

// The forward's list of rows and the backward's differ: rows without a gradient are in the first alone.
TEST_P(Cache, ActiveRows) {
  for (const std::size_t rows : {128, 256, 10000}) {
    for (const int every : {2, 3, 7}) {
      Case c{.n = 700,
             .h = 64,
             .v = 1500,
             .data = Data::kPeaked,
             .bias = kF32,
             .row_temperature = true,
             .ignore_every = every,
             .active = DType::kBool,
             .inactive_every = 5,
             .zero_every = 4};
      compare(c, budget_for(static_cast<std::int64_t>(rows), c.n, c.v));
      c.ignore_every = 0;
      c.active.reset();
      compare(c, budget_for(static_cast<std::int64_t>(rows), c.n, c.v));
    }
  }
}

TEST_P(Cache, Shards) {
  for (const std::vector<std::int64_t>& shards :
       {std::vector<std::int64_t>{1026, 1026, 1026, 1026}, {2052, 2052}, {1000, 0, 3000, 104}, {1, 4103}})
    for (const std::optional<double> softcap : {std::optional<double>(), std::optional<double>(20.0)})
      compare({.n = 200, .h = 64, .v = 4104, .data = Data::kPeaked, .softcap = softcap, .valid_vocab = 4100}, kAll,
              {.shards = shards});
}

TEST_P(Cache, GradientsInFp32AndAccumulated) {
  const Case c{.n = 200, .h = 64, .v = 2056, .data = Data::kPeaked};
  compare(c, kAll, {.fp32_gradients = true});
  compare(c, kAll, {.accumulate = true});
  compare(c, kAll, {.want_dw = false});
  compare(c, kAll, {.want_dx = false});
}

// metric and off keep the same exponentials.
TEST_P(Cache, MetricModeChangesNoBit) {
  Case c{.n = 200, .h = 40, .v = 2056, .data = Data::kPeaked, .entropy = EntropyMode::kOff};
  const Outcome off = run(TestProblem(c), {.cache_budget = kAll});
  c.entropy = EntropyMode::kMetric;
  const Outcome metric = run(TestProblem(c), {.cache_budget = kAll});
  EXPECT_EQ(testing::first_difference(off.dx, metric.dx), "");
  EXPECT_EQ(testing::first_difference(off.dw, metric.dw), "");
}

// NaN in a row's own inputs stays in it; a row of -inf logits is NaN as without a cache.
TEST_P(Cache, NonFiniteRows) {
  TestProblem problem({.n = 200, .h = 64, .v = 2056, .data = Data::kPeaked, .bias = kF32});
  problem.hidden.set(3, 5, std::nan(""));
  problem.hidden.set(150, 5, INFINITY);
  for (std::int64_t j = 0; j < problem.spec.v; j += 3) problem.bias.set(j, 0, -INFINITY);
  for (std::int64_t j = 256; j < 700; ++j) problem.bias.set(j, 0, -INFINITY);  // whole tiles
  problem.targets.set_id(7, 300);                                              // log-prob -inf
  const RunOptions options{.want_dw = false, .want_db = false};
  RunOptions with = options;
  with.cache_budget = kAll;
  const Outcome plain = run(problem, options), cached = run(problem, with);
  ASSERT_EQ(plain.dx.size(), cached.dx.size());
  EXPECT_EQ(testing::first_difference(plain.logprob, cached.logprob), "");
  for (std::size_t i = 0; i < plain.dx.size(); ++i) {
    if (std::isnan(plain.dx[i])) {
      EXPECT_TRUE(std::isnan(cached.dx[i])) << "element " << i;
    } else {
      EXPECT_TRUE(std::abs(plain.dx[i] - cached.dx[i]) <= 0.01 * (1 + std::abs(plain.dx[i]))) << "element " << i;
    }
  }
}

class CacheSize : public testing::BackendTest {};

TEST_P(CacheSize, SizesAndErrors) {
  const TestProblem problem({.n = 300, .h = 64, .v = 2056});
  testing::PlacedProblem placed(problem, memory());
  Execution e;
  e.backend = backend().name.c_str();
  e.device = backend().device;
  EXPECT_EQ(*cache_size(placed.problem(), 0, e), 0u);
  const Result<std::size_t> all = cache_size(placed.problem(), kAll, e);
  if (!keeps_cache(backend())) {
    EXPECT_EQ(all.status().code(), StatusCode::kUnsupported);
    EXPECT_EQ(all.status().message(), "cache_bytes: expected 0 on backend " + backend().name +
                                          ", which keeps nothing for the backward, got " + std::to_string(kAll));
    const Outcome refused = testing::run(backend(), problem, {.cache_budget = kAll});
    EXPECT_EQ(refused.status.code(), StatusCode::kUnsupported) << refused.message();
    e.cache_bytes = 4096;
    EXPECT_EQ(forward(placed.problem(), {}, e).message(), "cache_bytes: expected 0 on backend " + backend().name +
                                                              ", which keeps nothing for the backward, got 4096");
    return;
  }
  ASSERT_TRUE(all.ok());
  EXPECT_GE(*all, std::size_t{300} * 2056 * 2);
  EXPECT_LE(*all, budget_for(304, 300, 2056));  // rows are kept in blocks of 16
  EXPECT_EQ(*cache_size(placed.problem(), *all, e), *all);
  EXPECT_LT(*cache_size(placed.problem(), *all - 1, e), *all);
  const TestProblem halves({.n = 300, .h = 64, .v = 2056, .hidden = kF16, .weight = kF16});
  testing::PlacedProblem placed_halves(halves, memory());
  EXPECT_EQ(*cache_size(placed_halves.problem(), kAll, e), *all);
  EXPECT_EQ(*cache_size(placed.problem(), 4096, e), 0u);  // not even 128 rows

  ForwardOutputs none;
  e.cache_bytes = *all;
  Status status = forward(placed.problem(), none, e);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "cache: expected " + std::to_string(*all) + " bytes, got a null pointer");
  const testing::Buffer cache(memory(), *all + 16);
  e.cache = cache.data();
  Problem inference = placed.problem();
  inference.entropy = EntropyMode::kOff;
  inference.inference_only = true;
  status = forward(inference, none, e);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "cache_bytes: expected 0 with inference_only, got " + std::to_string(*all));
  const Result<WorkspaceSize> size = workspace_size(placed.problem(), Operation::kForward, {}, e);
  ASSERT_TRUE(size.ok());
  const testing::Buffer workspace(memory(), size->bytes);
  e.workspace = workspace.data();
  e.workspace_bytes = workspace.size();
  e.cache = cache.data() + 16;
  status = forward(placed.problem(), none, e);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "cache: expected a 256-byte aligned address, got remainder 16");
}

/// Backends that keep a cache: none on a machine without a GPU.
std::vector<BackendInfo> keeping_backends() {
  std::vector<BackendInfo> found;
  for (const BackendInfo& backend : testing::available_backends())
    if (keeps_cache(backend)) found.push_back(backend);
  return found;
}
INSTANTIATE_TEST_SUITE_P(Backends, Cache, ::testing::ValuesIn(keeping_backends()), testing::backend_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Cache);
LMHEAD_TEST_EVERY_BACKEND(CacheSize);

}  // namespace
}  // namespace lmhead
