// Forward: one block per multiprocessor walks (128 rows, one segment) items. The logits of a tile stay in
// the accumulator registers; each thread folds its columns of two rows into running statistics, and a
// segment ends with one 16-byte state a row. Nothing [N, V] is ever written.
#include "cuda/launch.h"
#include "cuda/sm90_epilogue.cuh"
#include "cuda/sm90_forward.h"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

/// Running statistics of one row over this thread's columns. x: the logit before the factor c = log2(e) / T
/// (times scale for a plain head), so u = c (x - max) is in log2 units.
struct Running {
  float max = kMasked, sum = 0.0f, weighted = 0.0f;
  float target = INFINITY;  ///< c x at the target
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

/// Folds kColumns logits of row half R of the thread into `row`. `limit`: valid columns of the tile.
template <int kColumns, bool kEntropy, int R>
__device__ __forceinline__ void fold_tile(float (&d)[128], int limit, int target, float c, Running& row) {
  const int lane_column = 2 * (threadIdx.x % 4);
  if (static_cast<unsigned>(target) < static_cast<unsigned>(limit) && (target & 6) == lane_column) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float even = d[4 * j + 2 * R], odd = d[4 * j + 2 * R + 1];  // values: selecting an element would spill d
      if (target / 8 == j) row.target = c * (target % 2 != 0 ? odd : even);
    }
  }
  if (limit < kColumns) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (8 * j + lane_column >= limit) d[4 * j + 2 * R] = kMasked;
      if (8 * j + lane_column + 1 >= limit) d[4 * j + 2 * R + 1] = kMasked;
    }
  }
  float m[4] = {row.max, kMasked, kMasked, kMasked};
#pragma unroll
  for (int j = 0; j < kColumns / 8; j += 2) {
    m[0] = fmaxf(m[0], d[4 * j + 2 * R]);
    m[1] = fmaxf(m[1], d[4 * j + 2 * R + 1]);
    m[2] = fmaxf(m[2], d[4 * j + 4 + 2 * R]);
    m[3] = fmaxf(m[3], d[4 * j + 5 + 2 * R]);
  }
  const float max = fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
  const float reference = max * c, moved = fmaf(row.max, c, -reference);
  const float factor = exp2_approx(moved);
  float sum0 = row.sum * factor, sum1 = 0.0f;
  float weighted0 = factor == 0.0f ? 0.0f : fmaf(row.sum, moved, row.weighted) * factor, weighted1 = 0.0f;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float u0 = fmaf(d[4 * j + 2 * R], c, -reference), u1 = fmaf(d[4 * j + 2 * R + 1], c, -reference);
    const float p0 = exp2_approx(u0), p1 = exp2_approx(u1);
    sum0 += p0;
    sum1 += p1;
    if constexpr (kEntropy) {
      weighted0 = fmaf(p0, u0, weighted0);
      weighted1 = fmaf(p1, u1, weighted1);
    }
  }
  row.max = max;
  row.sum = sum0 + sum1;
  if constexpr (kEntropy) row.weighted = weighted0 + weighted1;
}

/// The four lanes of a quad hold different columns of the same row.
template <bool kEntropy>
__device__ __forceinline__ void merge_quad(float c, Running& row) {
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
    const float max = __shfl_xor_sync(~0u, row.max, lanes), sum = __shfl_xor_sync(~0u, row.sum, lanes);
    const float weighted = kEntropy ? __shfl_xor_sync(~0u, row.weighted, lanes) : 0.0f;
    row.target = fminf(row.target, __shfl_xor_sync(~0u, row.target, lanes));
    const float top = fmaxf(row.max, max);
    const float d0 = (row.max - top) * c, d1 = (max - top) * c;
    const float e0 = exp2_approx(d0), e1 = exp2_approx(d1);
    if constexpr (kEntropy) {
      row.weighted = (e0 == 0.0f ? 0.0f : fmaf(row.sum, d0, row.weighted) * e0) +
                     (e1 == 0.0f ? 0.0f : fmaf(sum, d1, weighted) * e1);
    }
    row.sum = row.sum * e0 + sum * e1;
    row.max = top;
  }
}

/// The state in nats. Its max is the rounded product c max ln2, and the sums are moved to that point, so
/// that rounding it costs nothing.
__device__ __forceinline__ SoftmaxState to_state(const Running& row, float c) {
  if (row.max <= kMasked) return {-INFINITY, 0.0f, 0.0f, row.target};  // every logit is -inf
  constexpr float kLog2ELow = 1.925963033500116e-8f;                   // log2(e) - float(log2(e))
  const float reference = row.max * c, max = reference * kLn2<float>;
  const float shift = fmaf(-max, kLog2ELow, fmaf(-max, kLog2E<float>, reference));
  const float factor = exp2f(shift);
  return {max, row.sum * factor, factor * fmaf(shift, row.sum, row.weighted),
          row.target == INFINITY ? INFINITY : row.target * kLn2<float>};
}

template <class T, bool kEntropy, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardWork w) {
  extern __shared__ std::uint8_t raw[];
  Stages<T>& s = aligned_shared<Stages<T>>(raw);
  const int rows = static_cast<int>(*w.count);
  if (rows <= 0) return;
  init_stages(s);
  const TileOrder order{(rows + kTileRows - 1) / kTileRows, w.segments.count, w.group};
  const int k_steps = (w.h + kTileDepth - 1) / kTileDepth, items = order.count();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;

  if (warpgroup < 0) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&w.hidden);
      prefetch_map(&w.weight);
      Cursor cursor(kProducerParity);
      for (int i = blockIdx.x; i < items; i += gridDim.x) {
        int block, segment;
        order.decode(i, block, segment);
        const Span span = segment_span(w.segments, segment);
        for (int v = span.begin; v < span.end; v += kTileColumns) {
          const bool narrow = span.end - v <= kNarrowColumns;
          load_tile<T, 0, 0>(s, cursor, &w.hidden, narrow ? &w.weight_narrow : &w.weight, block * kTileRows, v,
                             narrow ? kNarrowColumns : kTileColumns, 0, 0, k_steps);
        }
      }
    }
  } else {
    registers_increase<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float factor = kGeneral ? kLog2E<float> : w.head.scale * kLog2E<float>;
    Cursor cursor(kConsumerParity);
    float d[128];
    for (int i = blockIdx.x; i < items; i += gridDim.x) {
      int block, segment;
      order.decode(i, block, segment);
      const Span span = segment_span(w.segments, segment);
      const int row = block * kTileRows + warpgroup * 64 + warp * 16 + lane / 4;  // and row + 8
      float c[2] = {1.0f, 1.0f};
      int target[2] = {-1, -1};
      Running running[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < rows) {
          c[r] = factor * w.terms[row + 8 * r].inverse_temperature;
          target[r] = static_cast<int>(w.terms[row + 8 * r].target);
        }
      }
      for (int v = span.begin; v < span.end; v += kTileColumns) {
        const int limit = span.end - v;
        if (limit <= kNarrowColumns) {
          multiply_tile<T, kNarrowColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          if constexpr (kGeneral) apply_head<kNarrowColumns>(d, w.head, v);
          fold_tile<kNarrowColumns, kEntropy, 0>(d, limit, target[0] - v, c[0], running[0]);
          fold_tile<kNarrowColumns, kEntropy, 1>(d, limit, target[1] - v, c[1], running[1]);
        } else {
          multiply_tile<T, kTileColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          if constexpr (kGeneral) apply_head<kTileColumns>(d, w.head, v);
          const int valid = min(limit, kTileColumns);
          fold_tile<kTileColumns, kEntropy, 0>(d, valid, target[0] - v, c[0], running[0]);
          fold_tile<kTileColumns, kEntropy, 1>(d, valid, target[1] - v, c[1], running[1]);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (running[r].target <= kMasked * c[r]) running[r].target = -INFINITY;  // a logit of -inf was clamped
        merge_quad<kEntropy>(c[r], running[r]);
        if (lane % 4 == 0 && row + 8 * r < rows)
          w.partial[segment * w.partial_stride + row + 8 * r] = to_state(running[r], c[r]);
      }
    }
  }
}

template <class T, bool kEntropy, bool kGeneral>
Status launch(const ForwardWork& w, int multiprocessors, cudaStream_t stream) {
  const auto kernel = forward_kernel<T, kEntropy, kGeneral>;
  constexpr int kBytes = static_cast<int>(shared_bytes<Stages<T>>());
  LMHEAD_RETURN_IF_ERROR(to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                                   "cudaFuncSetAttribute"));
  const std::int64_t items = ceil_div(w.max_rows, kTileRows) * w.segments.count;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors));
  kernel<<<blocks, kThreads, kBytes, stream>>>(w);
  return last_launch("sm90 forward");
}

template <class T>
Status launch_typed(const ForwardWork& w, bool entropy, int multiprocessors, cudaStream_t stream) {
  if (w.head.general)
    return entropy ? launch<T, true, true>(w, multiprocessors, stream)
                   : launch<T, false, true>(w, multiprocessors, stream);
  return entropy ? launch<T, true, false>(w, multiprocessors, stream)
                 : launch<T, false, false>(w, multiprocessors, stream);
}

}  // namespace

Status launch_forward(const ForwardWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16>(work, entropy, multiprocessors, stream)
                                   : launch_typed<__half>(work, entropy, multiprocessors, stream);
}

}  // namespace lmhead::cuda::sm90
