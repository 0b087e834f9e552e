// Loading and storing single elements of device views of any dtype, and conversions by type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "lmhead/types.h"

namespace lmhead::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

__device__ __forceinline__ float load_float(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kBFloat16: return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kFloat16: return to_float(static_cast<const __half*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}
__device__ __forceinline__ void store_float(void* data, DType dtype, std::int64_t i, float value) {
  switch (dtype) {
    case DType::kBFloat16: static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(value); break;
    case DType::kFloat16: static_cast<__half*>(data)[i] = from_float<__half>(value); break;
    default: static_cast<float*>(data)[i] = value;
  }
}
__device__ __forceinline__ std::int64_t load_int(const void* data, DType dtype, std::int64_t i) {
  switch (dtype) {
    case DType::kInt64: return static_cast<const std::int64_t*>(data)[i];
    case DType::kInt32: return static_cast<const std::int32_t*>(data)[i];
    case DType::kInt16: return static_cast<const std::int16_t*>(data)[i];
    case DType::kInt8: return static_cast<const std::int8_t*>(data)[i];
    default: return static_cast<const std::uint8_t*>(data)[i];  // kUInt8, kBool
  }
}

__device__ __forceinline__ float load_float(const ConstVector& v, std::int64_t i) {
  return load_float(v.data, v.dtype, i * v.stride);
}
__device__ __forceinline__ std::int64_t load_int(const ConstVector& v, std::int64_t i) {
  return load_int(v.data, v.dtype, i * v.stride);
}
__device__ __forceinline__ void store_float(const Vector& v, std::int64_t i, float value) {
  store_float(v.data, v.dtype, i * v.stride, value);
}

/// Calls fn with a null pointer of the element type of a floating dtype (host side).
template <class Fn>
void with_type(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16: fn(static_cast<__nv_bfloat16*>(nullptr)); break;
    case DType::kFloat16: fn(static_cast<__half*>(nullptr)); break;
    default: fn(static_cast<float*>(nullptr));
  }
}

}  // namespace lmhead::cuda
