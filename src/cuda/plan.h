// How the portable backend cuts a problem into tiles that fit a workspace budget.
//
// Forward: row chunks outside, vocabulary chunks inside, both whole canonical segments. Backward: either
// loop outside. With the vocabulary outside a 16-bit dX needs an fp32 accumulator [N, H]; with the rows
// outside a 16-bit dW needs one of [V, H]. Those come on top of the budget; everything else is inside. Rows
// farther apart than cuBLASLt's strides reach are copied to packed tiles, and gradients of such rows are fp32
// sums first, whatever their type.
#pragma once

#include "cuda/launch.h"
#include "cuda/rows.h"

namespace lmhead::cuda {

struct Plan {
  std::int64_t rows = 0;     ///< rows of a tile
  std::int64_t columns = 0;  ///< columns of a tile
  bool vocabulary_outside = false;
  bool copy_hidden = false;  ///< rows are gathered: converted, or inactive ones zeroed for dW, or packed
  bool copy_weight = false;  ///< weight tiles are rounded to the compute type, or packed
  bool hidden_accumulator = false, weight_accumulator = false;
  std::int64_t products_stride = 0;  ///< floats between rows of the product tile
  std::int64_t segments = 0;         ///< forward: most segments of a chunk
  std::size_t blas_bytes = 0;        ///< cuBLASLt's share of the workspace
};

/// The pieces of the workspace. Null where a plan does not need one.
struct Tiles {
  void* blas = nullptr;
  float* products = nullptr;      ///< [rows, products_stride]
  RowTerms* terms = nullptr;      ///< [rows]
  void* hidden = nullptr;         ///< [rows, padded H] compute type
  void* weight = nullptr;         ///< [columns, padded H] compute type
  void* partial = nullptr;        ///< [segments, rows] states, of double where the compute type is fp32
  void* carry = nullptr;          ///< [8, rows] states of the same type
  float* hidden_sums = nullptr;   ///< [N or rows, H]
  float* weight_sums = nullptr;   ///< [V or columns, H]
  float* bias_sums = nullptr;     ///< [V]
  float* bias_partial = nullptr;  ///< [column_slices(rows), columns]
};

/// Leading dimension of gathered and converted tiles: rows start on 16 bytes for any H.
constexpr std::int64_t padded_width(std::int64_t h) { return round_up(h, 8); }

/// Best plan within execution's budget; kInvalidArgument when even the smallest tile exceeds it.
/// `gradients` is null for the forward.
Result<Plan> make_plan(const ResolvedProblem& r, const BackwardOutputs* gradients, const Execution& e);
/// Carves the plan's pieces from `workspace`, the accumulator first.
Tiles lay_out(const ResolvedProblem& r, const BackwardOutputs* gradients, const Plan& plan, Workspace& workspace);
/// Bytes of the fp32 accumulator that comes on top of the budget.
std::size_t accumulator_bytes(const ResolvedProblem& r, const Plan& plan);

}  // namespace lmhead::cuda
