// Offsets beyond 2^31 elements, kept cheap: rows far apart in memory of which only the rows are touched.
#include "testing.h"

#include <cmath>
#include <cstring>

#include "core/element.h"

namespace lmhead {
namespace {

using testing::TestProblem;

constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;

/// Rows of a tensor at a stride of their own, in memory that is never filled as a whole.
class FarRows {
 public:
  FarRows(testing::Arena& arena, const testing::HostTensor& rows, std::int64_t stride)
      : arena_(arena),
        rows_(rows),
        stride_(stride),
        row_bytes_(static_cast<std::size_t>(rows.cols) * size_of(rows.dtype)),
        bytes_(static_cast<std::size_t>((rows.rows - 1) * stride + rows.cols) * size_of(rows.dtype)),
        base_(static_cast<std::byte*>(arena.allocate(bytes_))) {
    for (std::int64_t i = 0; i < rows.rows; ++i)
      arena.upload(at(i), rows.bytes.data() + static_cast<std::size_t>(i) * row_bytes_, row_bytes_);
  }
  ~FarRows() { arena_.release(base_, bytes_); }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;

  ConstMatrix matrix() const { return {base_, rows_.rows, rows_.cols, stride_, rows_.dtype}; }
  Matrix writable() const { return {base_, rows_.rows, rows_.cols, stride_, rows_.dtype}; }
  std::vector<double> values() const {
    std::vector<std::byte> row(row_bytes_);
    std::vector<double> all;
    for (std::int64_t i = 0; i < rows_.rows; ++i) {
      arena_.download(row.data(), at(i), row_bytes_);
      for (std::int64_t k = 0; k < rows_.cols; ++k) all.push_back(load_float(row.data(), rows_.dtype, k));
    }
    return all;
  }

 private:
  std::byte* at(std::int64_t i) const { return base_ + static_cast<std::size_t>(i * stride_) * size_of(rows_.dtype); }

  testing::Arena& arena_;
  testing::HostTensor rows_;
  std::int64_t stride_;
  std::size_t row_bytes_, bytes_;
  std::byte* base_;
};

class Large : public testing::BackendTest {};

// hidden, weight, dX and dW whose second row lies beyond 2^31 elements (beyond 2^32 bytes).
TEST_P(Large, RowStridesBeyond32Bits) {
  constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;
  for (const DType dtype : {kBf16, kF32}) {
    const TestProblem problem({.n = 2, .h = 16, .v = 2, .hidden = dtype, .weight = dtype});
    const testing::Outcome near = run(problem);
    if (!near.ok()) continue;
    testing::Arena& arena = memory();
    const testing::PlacedProblem placed(problem, arena);
    const FarRows hidden(arena, problem.hidden, kFar), weight(arena, problem.weight, kFar);
    const FarRows dx(arena, testing::HostTensor(dtype, 2, 16, 16), kFar),
        dw(arena, testing::HostTensor(dtype, 2, 16, 16), kFar);
    Problem far = placed.problem();
    far.hidden = hidden.matrix();
    far.weight = weight.matrix();
    const testing::Buffer results(arena, 6 * sizeof(float));
    float* const out = reinterpret_cast<float*>(results.data());
    Execution e;
    e.backend = backend().name.c_str();
    e.device = backend().device;
    BackwardOutputs grads;
    grads.hidden = dx.writable();
    grads.weight = dw.writable();
    const Result<WorkspaceSize> forward_size = workspace_size(far, Operation::kForward, {}, e);
    const Result<WorkspaceSize> backward_size = workspace_size(far, Operation::kBackward, grads, e);
    ASSERT_TRUE(forward_size.ok() && backward_size.ok());
    const testing::Buffer workspace(arena, std::max(forward_size->bytes, backward_size->bytes));
    e.workspace = workspace.data();
    e.workspace_bytes = workspace.size();
    ASSERT_EQ(forward(far, {{out, 2, 1, kF32}, {out + 2, 2, 1, kF32}, {out + 4, 2, 1, kF32}}, e).to_string(), "ok");
    ASSERT_EQ(
        backward(far, {{out + 4, 2, 1, kF32}, {out + 2, 2, 1, kF32}, placed.dlogprob(), placed.dentropy()}, grads, e)
            .to_string(),
        "ok");
    const std::vector<std::byte> bytes = results.download();
    for (std::size_t i = 0; i < 2; ++i) {
      float value[2];
      std::memcpy(&value[0], &bytes[4 * i], 4);
      std::memcpy(&value[1], &bytes[4 * (i + 2)], 4);
      // Not bit for bit: a vendor GEMM may have another kernel for such strides.
      EXPECT_TRUE(std::abs(value[0] - near.logprob[i]) <= 1e-5) << to_string(dtype) << " " << value[0];
      EXPECT_TRUE(std::abs(value[1] - near.entropy[i]) <= 1e-5) << to_string(dtype) << " " << value[1];
    }
    const auto compare = [&](const std::vector<double>& got, const std::vector<double>& expected, const char* name) {
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(std::abs(got[i] - expected[i]) <= 0x1p-7 * (std::abs(expected[i]) + 0x1p-10))
            << name << " " << to_string(dtype) << " element " << i << ": " << got[i] << " against " << expected[i];
    };
    compare(dx.values(), near.dx, "dX");
    compare(dw.values(), near.dw, "dW");
  }
}

// N * V beyond 2^31 logits. Only a GPU is fast enough; rows repeat, so that few have to be known.
TEST_P(Large, MoreThan2To31Logits) {
  if (backend().device != Device::kCuda) GTEST_SKIP() << "2^31 logits take minutes on this device";
  const TestProblem few({.n = 64, .h = 64, .v = 131088});
  const testing::Outcome known = run(few, {.backward = false});
  TestProblem many = few;
  many.spec.n = 16448;
  const auto repeat = [&](testing::HostTensor& tensor) {
    const std::vector<std::byte> once = tensor.bytes;
    tensor.rows = many.spec.n;
    tensor.bytes.clear();
    for (std::int64_t k = 0; k < many.spec.n / few.spec.n; ++k)
      tensor.bytes.insert(tensor.bytes.end(), once.begin(), once.end());
  };
  for (testing::HostTensor* tensor : {&many.hidden, &many.targets, &many.dlogprob, &many.dentropy}) repeat(*tensor);
  ASSERT_GT(many.spec.n * many.spec.v, std::int64_t{1} << 31);
  const testing::Outcome out = run(many);
  if (!out.ok()) return;
  for (std::int64_t i = 0; i < many.spec.n; ++i) {
    // cuda_portable promises no batch invariance: bits there, the promised size here.
    const double bound = testing::is_batch_invariant(backend()) ? 0 : 1e-4;
    ASSERT_TRUE(std::abs(out.logprob[i] - known.logprob[i % 64]) <= bound) << "row " << i;
    ASSERT_TRUE(std::abs(out.entropy[i] - known.entropy[i % 64]) <= bound) << "row " << i;
    for (std::int64_t k = 0; k < 64; ++k)
      ASSERT_TRUE(std::abs(out.dx[i * 64 + k] - out.dx[i % 64 * 64 + k]) <=
                  0.01 * (0.01 + std::abs(out.dx[i % 64 * 64 + k])))
          << "dX of row " << i;
  }
}

LMHEAD_TEST_EVERY_BACKEND(Large);

}  // namespace
}  // namespace lmhead
