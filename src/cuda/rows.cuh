// What a row's inputs mean, shared by the kernels that read them.
#pragma once

#include "cuda/element.cuh"
#include "cuda/rows.h"

namespace lmhead::cuda {

__device__ __forceinline__ bool is_active(const RowInputs& rows, std::int64_t i) {
  return (rows.active.data == nullptr || load_int(rows.active, i) > 0) &&
         load_int(rows.targets, i) != rows.ignore_index;
}

/// NaN counts as a gradient: only exact zeros drop a row.
__device__ __forceinline__ bool has_gradient(const RowInputs& rows, std::int64_t i) {
  if ((rows.dlogprob.data != nullptr && !(load_float(rows.dlogprob, i) == 0.0f)) ||
      (rows.dentropy.data != nullptr && !(load_float(rows.dentropy, i) == 0.0f)))
    return true;
  // Upstream gradients at selected ids may cancel in their total and still move the row.
  const ConstMatrix& upstream = rows.selected.upstream;
  for (std::int64_t k = 0; k < rows.selected.ids.cols; ++k)
    if (!(load_float(upstream.data, upstream.dtype, i * upstream.row_stride + k) == 0.0f)) return true;
  return false;
}

/// A temperature that checked mode would refuse becomes NaN, and so does its row.
__device__ __forceinline__ float inverse_temperature(const RowInputs& rows, std::int64_t i) {
  const float t = rows.temperature.data != nullptr ? load_float(rows.temperature, i) : rows.scalar_temperature;
  return t > 0.0f && t < INFINITY ? 1.0f / t : NAN;
}

/// The row is computed: active, and in the backward with an upstream gradient.
__device__ __forceinline__ bool takes_part(const RowInputs& rows, std::int64_t i, bool backward) {
  return is_active(rows, i) && (!backward || has_gradient(rows, i));
}

/// Of a row that takes no part.
inline constexpr RowTerms kNoTerms{0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0, -1};

/// Of a row that takes part.
__device__ __forceinline__ RowTerms row_terms(const RowInputs& rows, std::int64_t row, bool backward) {
  RowTerms t = kNoTerms;
  t.active = 1;
  t.inverse_temperature = inverse_temperature(rows, row);
  const std::int64_t column = load_int(rows.targets, row) - rows.vocab_start;
  // With selected ids every one-hot part of the gradient is theirs.
  const bool selected = backward && rows.selected.ids.data != nullptr;
  t.target = !selected && column >= 0 && column < rows.v_valid ? column : -1;
  if (backward) {
    t.lse = load_float(rows.lse, row);
    t.a = rows.dlogprob.data != nullptr ? load_float(rows.dlogprob, row) : 0.0f;
    t.g = rows.dentropy.data != nullptr ? load_float(rows.dentropy, row) : 0.0f;
    t.entropy = rows.dentropy.data != nullptr ? load_float(rows.entropy, row) : 0.0f;
  }
  return t;
}

__device__ __forceinline__ bool target_in_vocab(const RowInputs& rows, std::int64_t i) {
  if (!rows.zero_out_of_vocab) return true;
  const std::int64_t id = load_int(rows.targets, i);
  return id >= 0 && id < rows.valid_vocab;
}

__device__ __forceinline__ void write_row(const RowOutputs& out, std::int64_t i, const RowResult<float>& result) {
  if (out.logprob.data != nullptr) store_float(out.logprob, i, result.logprob);
  if (out.entropy.data != nullptr) store_float(out.entropy, i, result.entropy);
  if (out.lse.data != nullptr) store_float(out.lse, i, result.lse);
}

}  // namespace lmhead::cuda
