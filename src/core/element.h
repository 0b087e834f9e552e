// Reading and writing single elements of host views of any dtype. For row loops and the reference,
// not for inner loops.
#pragma once

#include <cstdint>

#include "core/half.h"
#include "lmhead/types.h"

namespace lmhead {

inline double load_float(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(data)[i];
    case DType::kBFloat16: return bf16_to_float(static_cast<const std::uint16_t*>(data)[i]);
    case DType::kFloat16: return fp16_to_float(static_cast<const std::uint16_t*>(data)[i]);
    default: return static_cast<const double*>(data)[i];
  }
}

inline std::int64_t load_int(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kInt64: return static_cast<const std::int64_t*>(data)[i];
    case DType::kInt32: return static_cast<const std::int32_t*>(data)[i];
    case DType::kInt16: return static_cast<const std::int16_t*>(data)[i];
    case DType::kInt8: return static_cast<const std::int8_t*>(data)[i];
    default: return static_cast<const std::uint8_t*>(data)[i];  // kUInt8, kBool
  }
}

inline void store_float(void* data, DType dtype, std::int64_t i, double value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(data)[i] = static_cast<float>(value); break;
    case DType::kBFloat16: static_cast<std::uint16_t*>(data)[i] = float_to_bf16(static_cast<float>(value)); break;
    case DType::kFloat16: static_cast<std::uint16_t*>(data)[i] = float_to_fp16(static_cast<float>(value)); break;
    default: static_cast<double*>(data)[i] = value;
  }
}

/// value rounded to dtype and back.
inline double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<float>(value);
    case DType::kBFloat16: return bf16_to_float(float_to_bf16(static_cast<float>(value)));
    case DType::kFloat16: return fp16_to_float(float_to_fp16(static_cast<float>(value)));
    default: return value;
  }
}

inline double load_float(const ConstVector& v, std::int64_t i) { return load_float(v.data, v.dtype, i * v.stride); }
inline double load_float(const Vector& v, std::int64_t i) { return load_float(v.data, v.dtype, i * v.stride); }
inline std::int64_t load_int(const ConstVector& v, std::int64_t i) { return load_int(v.data, v.dtype, i * v.stride); }
inline void store_float(const Vector& v, std::int64_t i, double value) {
  store_float(v.data, v.dtype, i * v.stride, value);
}
inline double load_float(const ConstMatrix& m, std::int64_t i, std::int64_t j) {
  return load_float(m.data, m.dtype, i * m.row_stride + j);
}
inline double load_float(const Matrix& m, std::int64_t i, std::int64_t j) {
  return load_float(m.data, m.dtype, i * m.row_stride + j);
}
inline void store_float(const Matrix& m, std::int64_t i, std::int64_t j, double value) {
  store_float(m.data, m.dtype, i * m.row_stride + j, value);
}

/// Row i of m, each element rounded to `compute`, as fp64.
inline void load_row(const ConstMatrix& m, std::int64_t i, DType compute, double* out) {
  const bool exact = m.dtype == compute || compute == DType::kFloat64 || compute == DType::kFloat32;
  for (std::int64_t k = 0; k < m.cols; ++k) {
    const double value = load_float(m, i, k);
    out[k] = exact ? value : round_to(compute, value);
  }
}

/// First byte of row i.
inline const std::byte* row_data(const ConstMatrix& m, std::int64_t i) {
  return static_cast<const std::byte*>(m.data) + static_cast<std::size_t>(i * m.row_stride) * size_of(m.dtype);
}
inline std::byte* row_data(const Matrix& m, std::int64_t i) {
  return static_cast<std::byte*>(m.data) + static_cast<std::size_t>(i * m.row_stride) * size_of(m.dtype);
}

}  // namespace lmhead
