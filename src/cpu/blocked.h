// What the blocked backend's forward and backward share: operands, row maps and workspace layout.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/team.h"

namespace lmhead {

/// Columns of a logits tile: two segments. One N tile width keeps oneDNN at full speed.
inline constexpr std::int64_t kStripColumns = 2 * kSegmentColumns;
inline constexpr std::size_t kDefaultBudget = std::size_t{64} << 20;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Type in which a hidden or weight tensor enters the products. fp32 products take 16-bit operands as
/// they are (exact); a 16-bit compute type rounds other tensors to it, tile by tile.
inline DType operand_type(DType tensor, DType compute) { return compute == DType::kFloat32 ? tensor : compute; }

/// Cuts workspace into 64-byte aligned parts; with base null it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<std::byte*>(base)) {}
  template <class T>
  T* take(std::int64_t count) {
    used_ = (used_ + 63) / 64 * 64;
    std::byte* at = base_ == nullptr ? nullptr : base_ + used_;
    used_ += static_cast<std::size_t>(count) * sizeof(T);
    return reinterpret_cast<T*>(at);
  }
  std::byte* take_bytes(std::size_t bytes) { return take<std::byte>(static_cast<std::int64_t>(bytes)); }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// The caller's workspace, or one of our own for the length of a call. `bytes` counts kSlack for alignment.
class Workspace {
 public:
  static constexpr std::size_t kSlack = 64;
  Workspace(const Execution& execution, std::size_t bytes) {
    void* base = execution.workspace;
    if (base == nullptr) {
      own_.reset(static_cast<std::byte*>(::operator new(bytes)));
      base = own_.get();
    }
    std::size_t space = bytes;
    aligned_ = std::align(kSlack, bytes - kSlack, base, space);
  }
  void* base() const { return aligned_; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete(p); }
  };
  std::unique_ptr<std::byte, Free> own_;
  void* aligned_ = nullptr;
};

inline std::size_t budget_of(const Execution& e) {
  return e.workspace_budget > 0 ? e.workspace_budget : kDefaultBudget;
}
inline Status budget_too_small(std::size_t needed, const Execution& e) {
  return {StatusCode::kInvalidArgument, "workspace_budget: expected at least " + std::to_string(needed) +
                                            " bytes for these shapes, got " + std::to_string(budget_of(e))};
}

/// Threads worth starting: one for each 4 M multiply-adds (about 50 us in fp32), at most those allowed.
inline int useful_threads(const ResolvedProblem& r, const Execution& e) {
  const double work = static_cast<double>(r.n) * static_cast<double>(r.h) * static_cast<double>(r.v_local);
  return static_cast<int>(std::clamp(work / 4e6, 1.0, static_cast<double>(thread_count(e.threads))));
}

/// A matrix operand of the products.
struct Operand {
  const std::byte* data;
  std::int64_t stride;  ///< elements between rows
  DType type;

  const std::byte* row(std::int64_t i) const { return data + static_cast<std::size_t>(i * stride) * size_of(type); }
};

/// The stride of a lone row means nothing, so it may be anything.
inline std::int64_t row_stride(const ConstMatrix& m) { return std::max(m.row_stride, m.cols); }

/// Row i of m and those after it, in place.
inline Operand in_place(const ConstMatrix& m, std::int64_t i) { return {row_data(m, i), row_stride(m), m.dtype}; }

/// True when rows[0, count) are consecutive indices.
inline bool consecutive(const std::int64_t* rows, std::int64_t count) { return rows[count - 1] - rows[0] == count - 1; }

/// The logit map of row i. factor and slope in fp64, then rounded once.
inline LogitMap logit_map(const ResolvedProblem& r, std::int64_t i) {
  const double t = temperature(r, i), scale = r.given.logit_scale;
  if (!r.given.softcap) return {static_cast<float>(scale / t), 0, false};
  return {static_cast<float>(scale / *r.given.softcap), static_cast<float>(*r.given.softcap / t), true};
}

/// bias[begin, begin + cols) of the shard as fp32 in `out`, or null without a bias.
inline const float* bias_strip(const ResolvedProblem& r, std::int64_t begin, std::int64_t cols, float* out) {
  if (r.given.bias.absent()) return nullptr;
  for (std::int64_t j = 0; j < cols; ++j) out[j] = static_cast<float>(load_float(r.given.bias, begin + j));
  return out;
}

/// Tiles of at most `tile` of `count` rows. None but a lone row has one row: products of one row run
/// other kernels, with other bits.
struct RowTiles {
  std::int64_t count, tile;
  std::int64_t tiles() const { return ceil_div(count, tile); }
  std::int64_t begin(std::int64_t t) const { return t > 0 && t == tiles() - 1 && lone() ? t * tile - 1 : t * tile; }
  std::int64_t end(std::int64_t t) const { return t + 1 < tiles() ? begin(t + 1) : count; }

 private:
  bool lone() const { return count % tile == 1; }
};

std::span<const Configuration> blocked_configurations(Operation operation);
Result<WorkspaceSize> blocked_forward_workspace(const ResolvedProblem& r, const Execution& e);
Status blocked_forward_partial(const ResolvedProblem& r, const Matrix& state, const Execution& e);
Status blocked_forward(const ResolvedProblem& r, const ForwardOutputs& out, const Execution& e);
Result<WorkspaceSize> blocked_backward_workspace(const ResolvedProblem& r, const BackwardOutputs& out,
                                                 const Execution& e);
Status blocked_backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out,
                        const Execution& e);

}  // namespace lmhead
