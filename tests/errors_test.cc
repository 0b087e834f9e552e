// Every message of the argument checks: code, argument, what was expected, what was given; and that
// nothing is written when a check fails.
#include "testing.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

namespace lmhead {
namespace {

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF64 = DType::kFloat64;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr auto kInvalid = StatusCode::kInvalidArgument;
constexpr auto kType = StatusCode::kTypeMismatch;

/// A correct call of everything, for a test to spoil in one place. N = 3, H = 4, V = 6.
struct Calls {
  static constexpr std::int64_t kN = 3, kH = 4, kV = 6;
  float hidden[kN * kH] = {}, weight[kV * kH] = {}, bias_data[kV] = {}, temperatures[kN] = {1, 1, 1};
  std::int64_t ids[kN] = {0, 5, 2};
  std::uint8_t mask[kN] = {1, 1, 1};
  float results[3 * kN], upstream[2 * kN] = {1, 1, 1, 1, 1, 1}, gradients[kN * kH + kV * kH + kV], states[2 * kN * 4];
  Problem p;
  Execution e;
  Matrix state{states, kN, 4, 4, kF32};
  ConstMatrix gathered{states, kN, 4, 4, kF32};
  ForwardOutputs out{{results, kN, 1, kF32}, {results + kN, kN, 1, kF32}, {results + 2 * kN, kN, 1, kF32}};
  BackwardInputs in{{results + 2 * kN, kN, 1, kF32},
                    {results + kN, kN, 1, kF32},
                    {upstream, kN, 1, kF32},
                    {upstream + kN, kN, 1, kF32}};
  BackwardOutputs grad;

  Calls() {
    for (float& v : results) v = -7;
    for (float& v : gradients) v = -7;
    for (float& v : states) v = -7;
    p.hidden = {hidden, kN, kH, kH, kF32};
    p.weight = {weight, kV, kH, kH, kF32};
    p.bias = {bias_data, kV, 1, kF32};
    p.targets = {ids, kN, 1, DType::kInt64};
    p.active = {mask, kN, 1, DType::kBool};
    p.row_temperature = {temperatures, kN, 1, kF32};
    p.entropy = EntropyMode::kGrad;
    grad.hidden = {gradients, kN, kH, kH, kF32};
    grad.weight = {gradients + kN * kH, kV, kH, kH, kF32};
    grad.bias = {gradients + kN * kH + kV * kH, kV, 1, kF32};
  }
  bool nothing_written() const {
    const auto untouched = [](float v) { return v == -7; };
    return std::all_of(std::begin(results), std::end(results), untouched) &&
           std::all_of(std::begin(gradients), std::end(gradients), untouched) &&
           std::all_of(std::begin(states), std::end(states), untouched);
  }
};

enum class Of { kForward, kPartial, kCombine, kBackward };

void expect(Of call, StatusCode code, const std::string& message, const std::function<void(Calls&)>& spoil) {
  Calls c;
  spoil(c);
  const Status status = call == Of::kForward   ? forward(c.p, c.out, c.e)
                        : call == Of::kPartial ? forward_partial(c.p, c.state, c.e)
                        : call == Of::kCombine ? combine(c.p, c.gathered, c.out, c.e)
                                               : backward(c.p, c.in, c.grad, c.e);
  EXPECT_EQ(status.message(), message);
  EXPECT_EQ(to_string(status.code()), std::string(to_string(code))) << message;
  EXPECT_TRUE(c.nothing_written()) << message;
}

TEST(Errors, TheUnspoiledCallsAreFine) {
  Calls c;
  EXPECT_EQ(forward(c.p, c.out, c.e).to_string(), "ok");
  EXPECT_EQ(forward_partial(c.p, c.state, c.e).to_string(), "ok");
  EXPECT_EQ(combine(c.p, c.gathered, c.out, c.e).to_string(), "ok");
  EXPECT_EQ(backward(c.p, c.in, c.grad, c.e).to_string(), "ok");
  EXPECT_FALSE(c.nothing_written());
}

TEST(Errors, Matrices) {
  const Of f = Of::kForward;
  expect(f, kInvalid, "hidden: expected sizes >= 0, got [-1, 4]", [](Calls& c) { c.p.hidden.rows = -1; });
  expect(f, kInvalid, "weight: expected sizes >= 0, got [6, -4]", [](Calls& c) { c.p.weight.cols = -4; });
  expect(f, kInvalid, "hidden: expected row stride >= 4 (contiguous columns), got 3",
         [](Calls& c) { c.p.hidden.row_stride = 3; });
  expect(f, kInvalid, "weight: expected row stride >= 4 (contiguous columns), got -4",
         [](Calls& c) { c.p.weight.row_stride = -4; });
  expect(f, kInvalid, "hidden: expected a size that fits in memory, got [3, 4]",
         [](Calls& c) { c.p.hidden.row_stride = std::numeric_limits<std::int64_t>::max() / 4; });
  expect(f, kInvalid, "hidden: expected data for [3, 4], got a null pointer",
         [](Calls& c) { c.p.hidden.data = nullptr; });
  expect(f, kInvalid, "weight: expected data aligned to 4 bytes (float32), got an address 1 bytes past",
         [](Calls& c) { c.p.weight.data = reinterpret_cast<const std::byte*>(c.weight) + 1; });
  expect(f, kType, "hidden: expected float32, bfloat16, float16 or float64, got int32",
         [](Calls& c) { c.p.hidden.dtype = DType::kInt32; });
  expect(f, kType, "weight: expected float32, bfloat16, float16 or float64, got bool",
         [](Calls& c) { c.p.weight.dtype = DType::kBool; });
  expect(f, kInvalid, "hidden: expected [N, H] with H >= 1, got [3, 0]",
         [](Calls& c) { c.p.hidden.cols = c.p.weight.cols = 0; });
  expect(f, kInvalid, "weight: expected [V, 3] to match hidden [3, 3], got [6, 4]",
         [](Calls& c) { c.p.hidden.cols = 3; });
  expect(f, kInvalid,
         "weight: expected [V, 6] to match hidden [2, 6], got [6, 4] (hidden looks like logits [N, V]: pass the hidden "
         "states before the LM head)",
         [](Calls& c) { c.p.hidden.rows = 2, c.p.hidden.cols = c.p.hidden.row_stride = 6; });
  expect(f, kInvalid, "weight: expected [V, H] with V >= 1 (an empty shard needs vocab_size), got [0, 4]",
         [](Calls& c) { c.p.weight.rows = 0; });
}

TEST(Errors, Float64MixesWithNothing) {
  double x[12] = {};
  Calls c;
  c.p.hidden = {x, 3, 4, 4, kF64};
  EXPECT_EQ(forward(c.p, c.out, c.e).message(),
            "weight: expected the precision of hidden (float64): float64 mixes with nothing else, got float32");
  expect(Of::kForward, kType, "compute_dtype: expected float32, bfloat16 or float16, got float64",
         [](Calls& d) { d.p.compute_dtype = kF64; });
  expect(Of::kForward, kType, "compute_dtype: expected float32, bfloat16 or float16, got int8",
         [](Calls& d) { d.p.compute_dtype = DType::kInt8; });
  alignas(8) static double bias[6] = {};
  expect(Of::kForward, kType, "bias: expected float32, bfloat16 or float16, got float64", [](Calls& d) {
    d.p.bias.dtype = kF64;
    d.p.bias.data = bias;
  });
}

TEST(Errors, Vectors) {
  const Of f = Of::kForward;
  expect(f, kInvalid, "bias: expected [6], got [5]", [](Calls& c) { c.p.bias.size = 5; });
  expect(f, kType, "bias: expected float32, bfloat16 or float16, got int32",
         [](Calls& c) { c.p.bias.dtype = DType::kInt32; });
  expect(f, kInvalid, "targets: expected [3], got [4]", [](Calls& c) { c.p.targets.size = 4; });
  expect(f, kInvalid, "targets: expected data for [3], got a null pointer",
         [](Calls& c) { c.p.targets.data = nullptr; });
  expect(f, kInvalid, "targets: expected a stride that fits in memory, got 4611686018427387904",
         [](Calls& c) { c.p.targets.stride = std::int64_t{1} << 62; });
  expect(f, kType, "targets: expected int32 or int64, got int16", [](Calls& c) { c.p.targets.dtype = DType::kInt16; });
  expect(f, kType, "active: expected bool or an integer type, got float32", [](Calls& c) { c.p.active.dtype = kF32; });
  expect(f, kInvalid, "active: expected [3], got [2]", [](Calls& c) { c.p.active.size = 2; });
  expect(f, kInvalid, "temperature: expected [3], got [1]", [](Calls& c) { c.p.row_temperature.size = 1; });
  expect(f, kType, "temperature: expected float32, got bfloat16", [](Calls& c) { c.p.row_temperature.dtype = kBf16; });
}

TEST(Errors, VocabularyRanges) {
  expect(Of::kPartial, kInvalid,
         "vocab_size: expected the global vocabulary, required with vocab_start, got none with vocab_start 2",
         [](Calls& c) { c.p.vocab_start = 2; });
  expect(Of::kPartial, kInvalid, "vocab_size: expected >= 1, got 0", [](Calls& c) { c.p.vocab_size = 0; });
  expect(Of::kPartial, kInvalid, "vocab_start: expected a shard [vocab_start, vocab_start + 6) inside [0, 8), got 3",
         [](Calls& c) { c.p.vocab_size = 8, c.p.vocab_start = 3; });
  expect(Of::kPartial, kInvalid, "vocab_start: expected a shard [vocab_start, vocab_start + 6) inside [0, 8), got -1",
         [](Calls& c) { c.p.vocab_size = 8, c.p.vocab_start = -1; });
  for (const int valid : {0, 7})
    expect(Of::kForward, kInvalid, "valid_vocab: expected in [1, 6], got " + std::to_string(valid),
           [&](Calls& c) { c.p.valid_vocab = valid; });
  expect(Of::kForward, kInvalid,
         "weight: expected the whole vocabulary [12, H] (use forward_partial and combine for a shard), got [6, H]",
         [](Calls& c) { c.p.vocab_size = 12; });
}

TEST(Errors, Options) {
  const Of f = Of::kForward;
  for (const auto& [value, text] :
       std::vector<std::pair<double, std::string>>{{0, "0"}, {-1, "-1"}, {kInfinity, "inf"}, {std::nan(""), "nan"}}) {
    expect(f, kInvalid, "temperature: expected a finite number > 0, got " + text,
           [&](Calls& c) { c.p.temperature = value; });
    expect(f, kInvalid, "softcap: expected a finite number > 0, got " + text, [&](Calls& c) { c.p.softcap = value; });
  }
  expect(f, kInvalid, "temperature: expected a number in the range of float32 [1.17549e-38, 8.50706e+37], got 1e-40",
         [](Calls& c) { c.p.temperature = 1e-40; });
  expect(f, kInvalid, "softcap: expected a number in the range of float32 [1.17549e-38, 8.50706e+37], got 1e+300",
         [](Calls& c) { c.p.softcap = 1e300; });
  expect(f, kInvalid, "logit_scale: expected a finite number, got inf", [](Calls& c) { c.p.logit_scale = kInfinity; });
  expect(f, kInvalid, "logit_scale: expected a number in the range of float32, got -1e+300",
         [](Calls& c) { c.p.logit_scale = -1e300; });
  expect(f, kInvalid, "entropy_requires_grad: expected false together with inference_only, got true",
         [](Calls& c) { c.p.inference_only = true; });
  expect(f, kInvalid, "threads: expected >= 0, got -1", [](Calls& c) { c.e.threads = -1; });
}

TEST(Errors, Values) {
  for (const Of call : {Of::kForward, Of::kPartial, Of::kBackward}) {
    expect(call, kInvalid, "targets: expected ids in [0, 6) or ignore_index -100, got 6 at row 1",
           [](Calls& c) { c.ids[1] = 6; });
    expect(call, kInvalid, "targets: expected ids in [0, 5) or ignore_index -7, got -1 at row 0",
           [](Calls& c) { c.ids[0] = -1, c.p.valid_vocab = 5, c.p.ignore_index = -7; });
    expect(call, kInvalid, "temperature: expected finite numbers > 0, got -2 at row 2",
           [](Calls& c) { c.temperatures[2] = -2; });
    expect(call, kInvalid, "temperature: expected finite numbers > 0, got inf at row 0",
           [](Calls& c) { c.temperatures[0] = INFINITY; });
    expect(call, kInvalid,
           "temperature: expected numbers in the range of float32 [1.17549e-38, 8.50706e+37], got 1e-38 at row 1",
           [](Calls& c) { c.temperatures[1] = 1e-38F; });
  }
}

TEST(Errors, Outputs) {
  const Of f = Of::kForward;
  expect(f, kInvalid, "logprob: expected [3], got [2]", [](Calls& c) { c.out.logprob.size = 2; });
  expect(f, kInvalid, "lse: expected data for [3], got a null pointer", [](Calls& c) { c.out.lse.data = nullptr; });
  expect(f, kType, "entropy: expected float32, got bfloat16", [](Calls& c) { c.out.entropy.dtype = kBf16; });
  expect(f, kInvalid, "logprob: expected a stride other than 0, got 0", [](Calls& c) { c.out.logprob.stride = 0; });
  expect(f, kInvalid, "entropy: expected no output under EntropyMode::kOff, got one",
         [](Calls& c) { c.p.entropy = EntropyMode::kOff; });
  expect(Of::kPartial, kInvalid, "state: expected [3, 4], got [2, 4]", [](Calls& c) { c.state.rows = 2; });
  expect(Of::kPartial, kType, "state: expected float32, got float16",
         [](Calls& c) { c.state.dtype = DType::kFloat16; });
  expect(Of::kPartial, kInvalid, "state: expected contiguous rows (row stride 4), got 8",
         [](Calls& c) { c.state.row_stride = 8; });
  expect(Of::kCombine, kInvalid, "states: expected [S * 3, 4] with S >= 1, got [4, 4]",
         [](Calls& c) { c.gathered.rows = 4; });
  expect(Of::kCombine, kInvalid, "states: expected [S * 3, 4] with S >= 1, got [0, 4]",
         [](Calls& c) { c.gathered.rows = 0; });
  expect(Of::kCombine, kType, "states: expected float32, got int32",
         [](Calls& c) { c.gathered.dtype = DType::kInt32; });
  expect(Of::kCombine, kInvalid, "states: expected contiguous rows (row stride 4), got 5",
         [](Calls& c) { c.gathered.row_stride = 5; });
}

TEST(Errors, Backward) {
  const Of b = Of::kBackward;
  expect(b, kInvalid, "inference_only: expected false for a backward, got true",
         [](Calls& c) { c.p.inference_only = true, c.p.entropy = EntropyMode::kMetric, c.in.dentropy = {}; });
  expect(b, kInvalid, "lse: expected [3], got [0]", [](Calls& c) { c.in.lse = {}; });
  expect(b, kType, "lse: expected float32, got float16", [](Calls& c) { c.in.lse.dtype = DType::kFloat16; });
  expect(b, kInvalid, "dlogprob: expected [3], got [9]", [](Calls& c) { c.in.dlogprob.size = 9; });
  expect(b, kType, "dlogprob: expected float32, got bfloat16", [](Calls& c) { c.in.dlogprob.dtype = kBf16; });
  expect(b, kType, "dentropy: expected float32, got int32", [](Calls& c) { c.in.dentropy.dtype = DType::kInt32; });
  for (const EntropyMode mode : {EntropyMode::kOff, EntropyMode::kMetric})
    expect(b, kInvalid, "dentropy: expected none unless entropy_requires_grad, got a gradient",
           [&](Calls& c) { c.p.entropy = mode; });
  expect(b, kInvalid, "entropy: expected the forward's entropy together with dentropy, got none",
         [](Calls& c) { c.in.entropy = {}; });
  expect(b, kInvalid, "hidden gradient: expected [3, 4], got [3, 3]", [](Calls& c) { c.grad.hidden.cols = 3; });
  expect(b, kType, "hidden gradient: expected float32, got bfloat16", [](Calls& c) { c.grad.hidden.dtype = kBf16; });
  expect(b, kInvalid, "weight gradient: expected [6, 4], got [5, 4]", [](Calls& c) { c.grad.weight.rows = 5; });
  expect(b, kInvalid, "weight gradient: expected a buffer to accumulate into, got none",
         [](Calls& c) { c.grad.weight = {}, c.grad.accumulate_weight = true; });
  expect(b, kType, "weight gradient: expected float32 to accumulate in, got bfloat16",
         [](Calls& c) { c.grad.weight.dtype = kBf16, c.grad.accumulate_weight = true; });
  expect(b, kInvalid, "bias gradient: expected none without a bias, got one", [](Calls& c) { c.p.bias = {}; });
  expect(b, kInvalid, "bias gradient: expected [6], got [3]", [](Calls& c) { c.grad.bias.size = 3; });
  expect(b, kType, "bias gradient: expected float32, got bfloat16", [](Calls& c) { c.grad.bias.dtype = kBf16; });
  expect(b, kInvalid, "bias gradient: expected a stride other than 0, got 0", [](Calls& c) { c.grad.bias.stride = 0; });
  expect(b, kInvalid, "bias gradient: expected a buffer to accumulate into, got none",
         [](Calls& c) { c.grad.bias = {}, c.grad.accumulate_bias = true; });
}

TEST(Errors, BackendNames) {
  Calls c;
  c.e.backend = "fastest";
  const std::string message = forward(c.p, c.out, c.e).message();
  EXPECT_EQ(message.rfind("backend: expected auto, ", 0), 0u) << message;
  EXPECT_NE(message.find("reference, got fastest"), std::string::npos) << message;
  EXPECT_TRUE(c.nothing_written());
  c.e.backend = "reference";
  c.e.device = Device::kCuda;
  EXPECT_EQ(forward(c.p, c.out, c.e).message(),
            "backend: reference expected tensors on the CPU, got tensors on a CUDA device");
}

TEST(Errors, AWorkspaceOnTheCpuIsAlignedToEightBytes) {
  alignas(8) static std::byte memory[1 << 16];
  const auto odd = [](Calls& c) { c.e.workspace = memory + 4, c.e.workspace_bytes = sizeof memory - 8; };
  for (const Of call : {Of::kForward, Of::kPartial, Of::kBackward})
    expect(call, kInvalid, "workspace: expected an 8-byte aligned address, got remainder 4", odd);
}

template <class R>
concept HasArrow = requires(R&& r) {
  std::forward<R>(r).operator->();
};
template <class R>
concept HasValue = requires(R&& r) {
  std::forward<R>(r).value(), *std::forward<R>(r);
};
template <class R, class Value>
constexpr bool kGives =
    std::is_same_v<decltype(std::declval<R>().value()), Value>&& std::is_same_v<decltype(*std::declval<R>()), Value>;

// A Result lends its value only while somebody can hold it; what a temporary lends would dangle.
TEST(Errors, ATemporaryResultGivesItsValueAway) {
  using Owner = std::unique_ptr<int>;  // moves, does not copy
  using R = Result<Owner>;
  static_assert(kGives<R&, Owner&> && kGives<const R&, const Owner&> && kGives<R, Owner>);
  static_assert(!HasValue<const R> && HasValue<R> && HasValue<const R&>);
  static_assert(HasArrow<R&> && HasArrow<const R&> && !HasArrow<R> && !HasArrow<const R>);
  const auto make = [] { return R(std::make_unique<int>(7)); };
  auto&& starred = *make();
  auto&& named = make().value();
  EXPECT_EQ(*starred + *named, 14);
  R kept = make();
  EXPECT_EQ(*std::move(kept).value(), 7);
  EXPECT_EQ(*kept, nullptr) << "moved out, not copied";
}

class Workspace : public testing::BackendTest {};

TEST_P(Workspace, TooSmallIsAnErrorAndWritesNothing) {
  const testing::TestProblem problem({.n = 20, .h = 32, .v = 700});
  const testing::PlacedProblem placed(problem, memory());
  Execution e;
  e.backend = backend().name.c_str();
  e.device = backend().device;
  const Result<WorkspaceSize> size = workspace_size(placed.problem(), Operation::kForward, {}, e);
  ASSERT_TRUE(size.ok()) << size.status().to_string();
  if (size->bytes == 0) GTEST_SKIP() << backend().name << " needs no workspace";
  const testing::Buffer workspace(memory(), size->bytes), logprob(memory(), 20 * sizeof(float));
  e.workspace = workspace.data();
  e.workspace_bytes = size->bytes - 1;
  const Status status = forward(placed.problem(), {{logprob.data(), 20, 1, kF32}, {}, {}}, e);
  EXPECT_EQ(status.message(), "workspace: expected at least " + std::to_string(size->bytes) +
                                  " bytes (ask workspace_size), got " + std::to_string(size->bytes - 1) + " bytes");
  EXPECT_EQ(logprob.download(), std::vector<std::byte>(80, std::byte{0xff}));
  if (backend().device == Device::kCuda) {
    e.workspace = nullptr;
    EXPECT_EQ(forward(placed.problem(), {{logprob.data(), 20, 1, kF32}, {}, {}}, e).message(),
              "workspace: expected " + std::to_string(size->bytes) + " bytes (ask workspace_size), got none");
  }
}

LMHEAD_TEST_EVERY_BACKEND(Workspace);

}  // namespace
}  // namespace lmhead
