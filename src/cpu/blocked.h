// What the blocked backend's forward and backward share: operands, row maps and tiles.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"
#include "cpu/team.h"
#include "cpu/workspace.h"

namespace lmhead {

/// Columns of a logits tile: two segments. One N tile width keeps oneDNN at full speed.
inline constexpr std::int64_t kStripColumns = 2 * kSegmentColumns;

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Type in which a hidden or weight tensor enters the products. fp32 products take 16-bit operands as
/// they are (exact); a 16-bit compute type rounds other tensors to it, tile by tile.
inline DType operand_type(DType tensor, DType compute) { return compute == DType::kFloat32 ? tensor : compute; }

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
