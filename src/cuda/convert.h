// Copies between the caller's tensors and the working tiles: gathering rows, rounding, clearing.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/rows.h"

namespace lmhead::cuda {

/// out[i] = in[row i of the list] rounded to out's dtype for i in [0, out.rows). Rows whose terms are
/// inactive become zero; without terms every row is copied. The list may be absent.
void gather_rows(const ConstMatrix& in, const Matrix& out, const RowTerms* terms, const RowList& list,
                 cudaStream_t stream);

/// out[row i of the list] = in[i], or 0 where terms[i] is inactive, rounded once to out's dtype; with `accumulate`
/// it is added to what out holds. Every row of `in` [n, out.cols] is fp32 and contiguous.
void store_rows(const float* in, std::int64_t n, const Matrix& out, const RowTerms* terms, const RowList& list,
                cudaStream_t stream, bool accumulate = false);

/// Zeros in the rows of out whose terms are inactive.
void clear_inactive_rows(const Matrix& out, const RowTerms* terms, cudaStream_t stream);
/// Zeros everywhere.
void clear_matrix(const Matrix& out, cudaStream_t stream);

/// out[j] = in[j] (+ out[j] with accumulate) for j < n, and 0 (out[j]) for the rest of out.
void store_vector(const float* in, std::int64_t n, const Vector& out, bool accumulate, cudaStream_t stream);

}  // namespace lmhead::cuda
