// Row and column helpers around the sm90 kernels: gathering active rows, finishing the gradients. Memory-bound, a few
// per mille of a call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "lmhead/types.h"

namespace lmhead::cuda::sm90 {

/// to[i] = from[index[i]] for i < *count, zeros up to the next multiple of kTileRows; H values of 16 bits a
/// row. Nothing unless *compacted.
void gather_rows(const ConstMatrix& from, const std::int32_t* index, const std::int64_t* count, const int* compacted,
                 std::int64_t max_rows, void* to, std::int64_t to_stride, cudaStream_t stream);

/// to[i] = from[begin + i] for i < rows, zeros up to kTileRows; `to` is contiguous.
void pad_rows(const ConstMatrix& from, std::int64_t begin, std::int64_t rows, void* to, cudaStream_t stream);

/// Rows of the hidden gradient whose place in the list of active rows lies in [begin, begin + rows): the
/// sum rounded to the output's type (sums == nullptr: left alone). `clear`: the rows outside the list become 0.
/// `written`: nothing to do when all rows are active, the gradient products have rounded the sums.
void finish_hidden(const float* sums, const std::int32_t* index, const std::int64_t* active, std::int64_t begin,
                   std::int64_t rows, bool clear, bool written, const Matrix& out, cudaStream_t stream);

/// out = sums rounded to the output's type; sums [rows, H] contiguous.
void finish_weight(const float* sums, std::int64_t rows, const Matrix& out, cudaStream_t stream);

/// Row slices of a column sum over chunks of up to `rows` rows; fixed by the plan, so that the order of
/// additions is.
int sum_slices(std::int64_t rows);
/// sums[j] (+)= sum over the chunk's rows of dl[:, j], in a fixed order. partial [slices, columns].
void sum_columns(const void* dl, DType dtype, std::int64_t stride, const std::int64_t* count, std::int64_t columns,
                 int slices, float* partial, float* sums, bool add, cudaStream_t stream);
/// The bias gradient from its sums [valid]; columns beyond `valid` get 0.
void finish_bias(const float* sums, std::int64_t valid, const Vector& out, bool accumulate, cudaStream_t stream);

/// bias[0..valid) as fp32, zeros up to `padded`.
void load_bias(const ConstVector& bias, std::int64_t valid, std::int64_t padded, float* out, cudaStream_t stream);

}  // namespace lmhead::cuda::sm90
