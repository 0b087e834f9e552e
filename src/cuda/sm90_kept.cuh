// The 16 bits in which an exponential of [0, 1] is kept, and where.
#pragma once

#include "cuda/sm90_cache.h"
#include "cuda/sm90_device.cuh"

namespace lmhead::cuda::sm90 {

/// fp16: its rounding adds 1 % to the error of bf16 gradients.
struct Kept {
  static __device__ __forceinline__ std::uint32_t pack(float low, float high) { return pack2<__half>(low, high); }
  static __device__ __forceinline__ float2 unpack(std::uint32_t pair) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
};

/// Places within a block (sm90_cache.h) of vector `group` and of the top of row half `half`.
__device__ __forceinline__ int kept_vector(int group, int half, int lane) { return (2 * group + half) * 32 + lane; }
__device__ __forceinline__ int kept_top(int half, int lane) { return half * 32 + lane; }

}  // namespace lmhead::cuda::sm90
