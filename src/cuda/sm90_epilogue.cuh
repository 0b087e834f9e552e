// From product to logit in the accumulator registers, shared by the forward and the dlogits kernel.
#pragma once

#include "cuda/sm90_device.cuh"
#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

/// Stands for -inf, so that no difference of two of them is NaN. 2^(kMasked c - anything) is 0 for every
/// temperature above 1e-8, and kMasked c stays finite.
/// A power of two: c kMasked is exact, so that lanes with nothing but masked columns have u = 0, not a residue
/// of 1e22.
inline constexpr float kMasked = -0x1p100f;

/// softcap tanh(r / softcap) to 3e-7 relative: a polynomial below 0.55, where 1 - 2 / (1 + e^2y) would cancel.
__device__ __forceinline__ float soft_cap(float r, float softcap, float inverse_softcap) {
  const float y = r * inverse_softcap, square = y * y;
  float q = fmaf(-0.006548402f, square, 0.021276452f);
  q = fmaf(q, square, -0.053904083f);
  q = fmaf(q, square, 0.13333087f);
  q = fmaf(q, square, -0.3333333f);
  const float small = fmaf(y * square, q, y);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + exp2_approx(y * (2.0f * kLog2E<float>))));
  return softcap * (fabsf(y) < 0.55f ? small : fmaf(-2.0f, inverse, 1.0f));
}

/// d = softcap tanh(scale (d + bias) / softcap) for the column groups (of 8) from kBegin to kEnd of the tile whose
/// first column is v.
template <int kBegin, int kEnd>
__device__ __forceinline__ void apply_head(float (&d)[128], const Head& head, int v) {
  const int column = v + 2 * (threadIdx.x % 4);
  const float inverse_softcap = head.softcap > 0.0f ? 1.0f / head.softcap : 0.0f;
#pragma unroll
  for (int j = kBegin; j < kEnd; ++j) {
    float bias[2] = {0.0f, 0.0f};
    if (head.bias != nullptr) {
      bias[0] = __ldg(head.bias + column + 8 * j);
      bias[1] = __ldg(head.bias + column + 8 * j + 1);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float r = head.scale * (d[4 * j + e] + bias[e % 2]);
      if (head.softcap > 0.0f) r = soft_cap(r, head.softcap, inverse_softcap);
      d[4 * j + e] = max_nan(r, kMasked);
    }
  }
}

}  // namespace lmhead::cuda::sm90
