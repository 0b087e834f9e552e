// From logits in accumulator registers to a softmax state: what the forward kernels do with a tile.
#pragma once

#include "cuda/sm90_epilogue.cuh"
#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

/// Running statistics of one row over this thread's columns. x: the logit before the factor c = log2(e) / T
/// (times scale for a plain head), so u = c (x - max) is in log2 units.
struct Running {
  float max = kMasked, sum = 0.0f, weighted = 0.0f;
  float target = INFINITY;  ///< x at the target
};

struct Span {
  int begin, end;
};
__device__ __forceinline__ Span segment_span(const Segments& s, int i) {
  const int id = s.first + i, octant = id / s.per_octant;
  const int origin = octant * s.octant_size + (id - octant * s.per_octant) * static_cast<int>(kSegmentColumns);
  const int limit = min(origin + static_cast<int>(kSegmentColumns), (octant + 1) * s.octant_size);
  return {max(origin, s.begin) - s.vocab_start, min(limit, s.end) - s.vocab_start};
}

/// Keeps the target's logit and masks the columns from `limit` on, among the column groups (of 8) from kBegin to kEnd,
/// for row half R of the thread.
template <int kBegin, int kEnd, int R>
__device__ __forceinline__ void pick_target(float (&d)[128], int limit, int target, Running& row) {
  const int lane_column = 2 * (threadIdx.x % 4);
  if (target >= 8 * kBegin && target < min(limit, 8 * kEnd) && (target & 6) == lane_column) {
#pragma unroll
    for (int j = kBegin; j < kEnd; ++j) {
      const float even = d[4 * j + 2 * R], odd = d[4 * j + 2 * R + 1];  // values: selecting an element would spill d
      if (target / 8 == j) row.target = target % 2 != 0 ? odd : even;
    }
  }
  if (limit < 8 * kEnd) {
#pragma unroll
    for (int j = kBegin; j < kEnd; ++j) {
      if (8 * j + lane_column >= limit) d[4 * j + 2 * R] = kMasked;
      if (8 * j + lane_column + 1 >= limit) d[4 * j + 2 * R + 1] = kMasked;
    }
  }
}

/// Extremes of three floats' bits as integers: two instructions fused into one, where fmaxf has no such form. The
/// largest integer is the largest float unless all are negative; then the smallest one is.
__device__ __forceinline__ float max_bits(float a, float b, float c) {
  return __int_as_float(max(max(__float_as_int(a), __float_as_int(b)), __float_as_int(c)));
}
__device__ __forceinline__ float min_bits(float a, float b, float c) {
  return __int_as_float(min(min(__float_as_int(a), __float_as_int(b)), __float_as_int(c)));
}

/// Maximum of `start` and the thread's columns of row half R in the groups from kBegin to kEnd, an even number. A NaN
/// among them may be lost: it is not lost to the sums.
template <int kBegin, int kEnd, int R>
__device__ __forceinline__ float max_columns(const float (&d)[128], float start) {
  float a = start, b = start;
#pragma unroll
  for (int j = kBegin; j < kEnd; j += 2) {
    a = max_bits(a, d[4 * j + 2 * R], d[4 * j + 2 * R + 1]);
    b = max_bits(b, d[4 * j + 4 + 2 * R], d[4 * j + 4 + 2 * R + 1]);
  }
  const float top = max_bits(a, b, a);
  if (!__any_sync(~0u, top < 0.0f)) return top;
  float e = start, f = start;
#pragma unroll
  for (int j = kBegin; j < kEnd; j += 2) {
    e = min_bits(e, d[4 * j + 2 * R], d[4 * j + 2 * R + 1]);
    f = min_bits(f, d[4 * j + 4 + 2 * R], d[4 * j + 4 + 2 * R + 1]);
  }
  return top < 0.0f ? min_bits(e, f, e) : top;
}

struct KeepNothing {
  __device__ __forceinline__ std::uint32_t pack(const float (&)[2], const float (&)[2]) const { return 0; }
  __device__ __forceinline__ void operator()(int, int, const std::uint32_t (&)[4]) const {}
};

/// Folds the columns of the groups from kBegin to kEnd into the statistics of the thread's two rows, side by side for
/// the sake of independent instructions: one row after the other costs 2 % at H = 640. Sums and products are
/// intrinsics: left to itself the compiler contracts the two rows differently, and a row's bits would depend on its
/// place in the tile. d: what mask_and_pick left. halfway() is called once half of the exponentials are done.
/// keep(group, r, pairs): where these exponentials p = 2^u of row r, of eight columns each from column 32 group on, go;
/// their reference is the row's maximum afterwards.
template <int kBegin, int kEnd, bool kEntropy, class Halfway, class Keep>
__device__ __forceinline__ void fold_columns(float (&d)[128], const float (&c)[2], Running (&row)[2], Halfway&& halfway,
                                             const Keep& keep) {
  // Index e: row e / 2, even or odd columns.
  float sum[4], weighted[4], reference[2];
  const float max[2] = {max_columns<kBegin, kEnd, 0>(d, row[0].max), max_columns<kBegin, kEnd, 1>(d, row[1].max)};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    reference[r] = __fmul_rn(max[r], c[r]);
    const float moved = __fmul_rn(row[r].max, c[r]) - reference[r], factor = exp2_approx(moved);
    sum[2 * r] = __fmul_rn(row[r].sum, factor);
    weighted[2 * r] = factor == 0.0f ? 0.0f : __fmul_rn(fmaf(row[r].sum, moved, row[r].weighted), factor);
    sum[2 * r + 1] = weighted[2 * r + 1] = 0.0f;
    row[r].max = max[r];
  }
#pragma unroll
  for (int group = kBegin / 4; group < kEnd / 4; ++group) {
    if (2 * group == (kBegin + kEnd) / 4) halfway();
    std::uint32_t pairs[2][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int r = k % 2, i = 16 * group + 2 * k;
      float p[2], u[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        u[e] = fmaf(d[i + e], c[r], -reference[r]);
        p[e] = exp2_approx(u[e]);
        sum[2 * r + e] = __fadd_rn(sum[2 * r + e], p[e]);
        if constexpr (kEntropy) weighted[2 * r + e] = fmaf(p[e], u[e], weighted[2 * r + e]);
      }
      pairs[r][k / 2] = keep.pack(p, u);
    }
    keep(group, 0, pairs[0]);
    keep(group, 1, pairs[1]);
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r].sum = __fadd_rn(sum[2 * r], sum[2 * r + 1]);
    if constexpr (kEntropy) row[r].weighted = __fadd_rn(weighted[2 * r], weighted[2 * r + 1]);
  }
}

/// Picks the targets' logits and masks the columns from `limit` on; v: the tile's first column.
template <int kBegin, int kEnd>
__device__ __forceinline__ void mask_and_pick(float (&d)[128], int limit, int v, const int (&target)[2],
                                              Running (&row)[2]) {
  pick_target<kBegin, kEnd, 0>(d, limit, target[0] - v, row[0]);
  pick_target<kBegin, kEnd, 1>(d, limit, target[1] - v, row[1]);
}

/// c = factor / T. The barrier keeps the products, and with them the wait for the loads of 1 / T, below the
/// tile's main loop.
__device__ __forceinline__ void factors(float factor, float (&inverse_temperature)[2], float (&c)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    asm volatile("" : "+f"(inverse_temperature[r]));
    c[r] = factor * inverse_temperature[r];
  }
}

/// The four lanes of a quad hold different columns of the same row.
template <bool kEntropy>
__device__ __forceinline__ void merge_quad(float c, Running& row) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const float max = __shfl_xor_sync(~0u, row.max, lanes), sum = __shfl_xor_sync(~0u, row.sum, lanes);
    const float weighted = kEntropy ? __shfl_xor_sync(~0u, row.weighted, lanes) : 0.0f;
    row.target = fminf(row.target, __shfl_xor_sync(~0u, row.target, lanes));
    const float top = fmaxf(row.max, max), reference = __fmul_rn(top, c);
    const float d0 = __fmul_rn(row.max, c) - reference, d1 = __fmul_rn(max, c) - reference;
    const float e0 = exp2_approx(d0), e1 = exp2_approx(d1);
    if constexpr (kEntropy) {
      row.weighted = __fadd_rn(e0 == 0.0f ? 0.0f : __fmul_rn(fmaf(row.sum, d0, row.weighted), e0),
                               e1 == 0.0f ? 0.0f : __fmul_rn(fmaf(sum, d1, weighted), e1));
    }
    row.sum = __fadd_rn(__fmul_rn(row.sum, e0), __fmul_rn(sum, e1));
    row.max = top;
  }
}

/// The state in nats; z = nats x. Its sums are counted from the rounded c max: they are moved to the exact one, so
/// that the maximum's own term is 1. The target takes the same rounding as the maximum: where it is the maximum,
/// their difference is 0.
__device__ __forceinline__ SoftmaxState to_state(const Running& row, float c, float nats) {
  const float target = row.target == INFINITY  ? INFINITY
                       : row.target <= kMasked ? -INFINITY  // a logit of -inf was clamped
                                               : __fmul_rn(row.target, nats);
  if (row.max <= kMasked && row.sum == row.sum) return {-INFINITY, 0.0f, 0.0f, target};  // every logit is -inf
  const float shift = -fmaf(row.max, c, -__fmul_rn(row.max, c)), factor = exp2f(shift);
  return {__fmul_rn(row.max, nats), __fmul_rn(row.sum, factor), __fmul_rn(factor, fmaf(shift, row.sum, row.weighted)),
          target};
}

}  // namespace lmhead::cuda::sm90
