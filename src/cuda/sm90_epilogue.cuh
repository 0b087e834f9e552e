// From product to logit in the accumulator registers, shared by the forward and the dlogits kernel.
#pragma once

#include "cuda/sm90_device.cuh"
#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

/// Stands for -inf, so that no difference of two of them is NaN. 2^(kMasked c - anything) is 0 for every
/// temperature above 1e-8, and kMasked c stays finite.
inline constexpr float kMasked = -1e30f;

/// softcap tanh(r / softcap) with an absolute error below 3e-7 softcap.
__device__ __forceinline__ float soft_cap(float r, float softcap, float two_log2e_over_softcap) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_approx(r * two_log2e_over_softcap)));
  return fmaf(-2.0f * softcap, inverse, softcap);
}

/// d = softcap tanh(scale (d + bias) / softcap) for the tile of kColumns columns from column v.
template <int kColumns>
__device__ __forceinline__ void apply_head(float (&d)[128], const Head& head, int v) {
  const int column = v + 2 * (threadIdx.x % 4);
  const float cap_factor = head.softcap > 0.0f ? 2.0f * kLog2E<float> / head.softcap : 0.0f;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    float bias[2] = {0.0f, 0.0f};
    if (head.bias != nullptr) {
      bias[0] = __ldg(head.bias + column + 8 * j);
      bias[1] = __ldg(head.bias + column + 8 * j + 1);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float r = head.scale * (d[4 * j + e] + bias[e % 2]);
      if (head.softcap > 0.0f) r = soft_cap(r, head.softcap, cap_factor);
      d[4 * j + e] = max_nan(r, kMasked);
    }
  }
}

}  // namespace lmhead::cuda::sm90
