// The 16 bits in which an exponential p = 2^u of [0, 1] is kept, and where.
#pragma once

#include "cuda/sm90_cache.h"
#include "cuda/sm90_device.cuh"

namespace lmhead::cuda::sm90 {

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Column groups (of 8) of half a tile: one reference, and one top, each.
inline constexpr int kHalfGroups = kTileColumns / 16;

/// What is kept of p = 2^u. bf16 gradients: p in fp16, whose rounding adds 1 % to their error.
template <class T>
struct Kept {
  static __device__ __forceinline__ std::uint32_t pack(const float (&p)[2], const float (&)[2]) {
    return pack2<__half>(p[0], p[1]);
  }
  template <bool kExponent>
  static __device__ __forceinline__ void unpack(std::uint32_t pair, float (&p)[2], float (&u)[2]) {
    const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&pair));
    p[0] = both.x, p[1] = both.y;
#pragma unroll
    // p = 0: any finite logarithm will do, the product is 0.
    for (int e = 0; e < 2; ++e) u[e] = kExponent ? log2_approx(fmaxf(p[e], 0x1p-27f)) : 0.0f;
  }
};
/// fp16 gradients are rounded as finely as p in fp16 would be, which would add 22 to 41 % to their error. So -u is
/// kept, in steps of 1 / 2896: a third of that rounding, 5 % of the error. The last number stands for p = 0, 22.6
/// octaves below the top.
template <>
struct Kept<__half> {
  static constexpr float kSteps = 2896.0f, kInteger = 0x1p23f;  // kInteger + n has n in its low bits
  static constexpr std::uint32_t kZero = 65535;
  /// u is above 0 by the rounding of the reference: of a logit of 10^4 this can be steps.
  static __device__ __forceinline__ float steps(float u) {
    return fmaxf(fminf(fmaf(u, -kSteps, kInteger), kInteger + kZero), kInteger);
  }
  static __device__ __forceinline__ std::uint32_t pack(const float (&)[2], const float (&u)[2]) {
    return __byte_perm(__float_as_uint(steps(u[0])), __float_as_uint(steps(u[1])), 0x5410);
  }
  template <bool kExponent>
  static __device__ __forceinline__ void unpack(std::uint32_t pair, float (&p)[2], float (&u)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float n =
          __uint_as_float(__byte_perm(pair, __float_as_uint(kInteger), e == 0 ? 0x7610 : 0x7632)) - kInteger;
      u[e] = n * (-1.0f / kSteps);
      p[e] = n == static_cast<float>(kZero) ? 0.0f : exp2_approx(u[e]);
    }
  }
};

/// Places within a block (sm90_cache.h) of vector `group` and of the top of row half `half` in half `columns` of the
/// tile.
__device__ __forceinline__ int kept_vector(int group, int half, int lane) { return (2 * group + half) * 32 + lane; }
__device__ __forceinline__ int kept_top(int columns, int half, int lane) { return (2 * columns + half) * 32 + lane; }

}  // namespace lmhead::cuda::sm90
