// Matrix products by cuBLASLt.
//
// No call synchronises. The first product on a device creates a cuBLASLt handle, which allocates device memory;
// every later call reuses it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead::cuda {

/// One matrix operand, row-major, columns contiguous.
struct Operand {
  const void* data;
  std::int64_t row_stride;
};

/// out[m, n] = op(a) op(b) + (accumulate ? out : 0), row-major, fp32 accumulation.
/// op(a) is [m, k]: stored [m, k], or [k, m] with transpose_a; op(b) [k, n] likewise. Sizes >= 1.
struct Product {
  std::int64_t m, n, k;
  Operand a, b;
  bool transpose_a = false, transpose_b = false;
  DType in;  ///< type of a and b
  void* out;
  std::int64_t out_stride;
  DType out_type = DType::kFloat32;  ///< kFloat32, or the type of a and b
  bool accumulate = false;           ///< fp32 output only
  bool allow_tf32 = false;           ///< fp32 inputs only
  bool sum_in_parts = false;         ///< fp32 inputs only: sums of about sqrt(k) parts, as far as the workspace goes
  void* workspace = nullptr;         ///< 256-byte aligned scratch for cuBLASLt
  std::size_t workspace_bytes = 0;
};
/// Scratch with which a product loses nothing; with less it is slower or, in fp32, less exact.
std::size_t product_workspace(std::int64_t m, std::int64_t n, DType in);
/// Runs the product with cuBLASLt. The algorithm is cuBLASLt's first choice for the shape, asked for once
/// and cached, restricted to reductions whose order is fixed: equal calls give equal bits.
Status multiply(const Product& product, cudaStream_t stream);

}  // namespace lmhead::cuda
