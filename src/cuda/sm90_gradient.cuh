// A row's part in dl, shared by the dlogits kernel and the pass over cached exponentials.
#pragma once

#include "cuda/sm90_device.cuh"
#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

/// With u = c x - lse2 and p = 2^u:  dl = p (a_term + g_term u) + [target] hit. lse2 is the rounded
/// lse log2(e); the rest of that product is folded into the two terms.
struct Coefficients {
  float c, lse2, a_term, g_term, hit;
  int target;
};

/// factor: c T; scale: dr / d(product).
template <bool kEntropy>
__device__ __forceinline__ Coefficients row_coefficients(const RowTerms& t, bool present, float factor, float scale) {
  // p = 0 whatever the logit: rows that fill up the tile.
  Coefficients r{1.0f, 1e30f, 0.0f, 0.0f, 0.0f, -1};
  if (!present) return r;
  constexpr float kLog2ELow = 1.925963033500116e-8f;  // log2(e) - float(log2(e))
  r.c = factor * t.inverse_temperature;
  r.lse2 = t.lse * kLog2E<float>;
  const float rest = fmaf(t.lse, kLog2ELow, fmaf(t.lse, kLog2E<float>, -r.lse2));
  const float slope = scale * t.inverse_temperature, correction = exp2f(-rest);
  r.a_term = -(kEntropy ? fmaf(t.g, t.entropy, t.a) : t.a) * slope * correction;
  r.g_term = kEntropy ? -t.g * kLn2<float> * slope * correction : 0.0f;
  r.hit = t.a * slope;
  r.target = static_cast<int>(t.target);
  return r;
}

}  // namespace lmhead::cuda::sm90
