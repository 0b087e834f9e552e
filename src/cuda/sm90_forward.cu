// Forward: one block per multiprocessor walks (128 rows, one segment) items. The logits of a tile stay in
// the accumulator registers; each thread folds its columns of two rows into running statistics, and a
// segment ends with one 16-byte state a row. Nothing [N, V] is ever written.
#include "cuda/launch.h"
#include "cuda/sm90_epilogue.cuh"
#include "cuda/sm90_forward.h"
#include "cuda/sm90_kept.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

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

/// Keeps the target's logit and masks the columns from `limit` on, for row half R of the thread.
template <int kColumns, int R>
__device__ __forceinline__ void pick_target(float (&d)[128], int limit, int target, Running& row) {
  const int lane_column = 2 * (threadIdx.x % 4);
  if (static_cast<unsigned>(target) < static_cast<unsigned>(limit) && (target & 6) == lane_column) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float even = d[4 * j + 2 * R], odd = d[4 * j + 2 * R + 1];  // values: selecting an element would spill d
      if (target / 8 == j) row.target = target % 2 != 0 ? odd : even;
    }
  }
  if (limit < kColumns) {
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (8 * j + lane_column >= limit) d[4 * j + 2 * R] = kMasked;
      if (8 * j + lane_column + 1 >= limit) d[4 * j + 2 * R + 1] = kMasked;
    }
  }
}

/// Folds the tile into the statistics of the thread's two rows, side by side for the sake of independent
/// instructions: one row after the other costs 2 % at H = 640. Sums and products are intrinsics: left to itself
/// the compiler contracts the two rows differently, and a row's bits would depend on its place in the tile. `limit`:
/// valid columns of the tile, whose first one is column v.
/// keep(group, r, pairs): where these exponentials of row r, of eight columns each from column 32 group on, go; their
/// reference is the row's maximum afterwards.
template <int kColumns, bool kEntropy, class Keep>
__device__ __forceinline__ void fold_tile(float (&d)[128], int limit, int v, const int (&target)[2],
                                          const float (&c)[2], Running (&row)[2], const Keep& keep) {
  pick_target<kColumns, 0>(d, limit, target[0] - v, row[0]);
  pick_target<kColumns, 1>(d, limit, target[1] - v, row[1]);
  // Index e: row e / 2, even or odd columns.
  float max[4] = {row[0].max, kMasked, row[1].max, kMasked}, sum[4], weighted[4], reference[2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) max[i % 4] = fmaxf(max[i % 4], d[i]);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float top = fmaxf(max[2 * r], max[2 * r + 1]);
    reference[r] = __fmul_rn(top, c[r]);
    const float moved = __fmul_rn(row[r].max, c[r]) - reference[r], factor = exp2_approx(moved);
    sum[2 * r] = __fmul_rn(row[r].sum, factor);
    weighted[2 * r] = factor == 0.0f ? 0.0f : __fmul_rn(fmaf(row[r].sum, moved, row[r].weighted), factor);
    sum[2 * r + 1] = weighted[2 * r + 1] = 0.0f;
    row[r].max = top;
  }
#pragma unroll
  for (int group = 0; group < kColumns / 32; ++group) {
    std::uint32_t pairs[2][4];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const int r = k % 2, i = 16 * group + 2 * k;
      float p[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float u = fmaf(d[i + e], c[r], -reference[r]);
        p[e] = exp2_approx(u);
        sum[2 * r + e] = __fadd_rn(sum[2 * r + e], p[e]);
        if constexpr (kEntropy) weighted[2 * r + e] = fmaf(p[e], u, weighted[2 * r + e]);
      }
      pairs[r][k / 2] = keep.pack(p[0], p[1]);
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

struct KeepNothing {
  __device__ __forceinline__ std::uint32_t pack(float, float) const { return 0; }
  __device__ __forceinline__ void operator()(int, int, const std::uint32_t (&)[4]) const {}
};
/// Streams the warp's block of exponentials out.
struct KeepBlock {
  uint4* block;  ///< nullptr: rows that are not kept
  __device__ __forceinline__ std::uint32_t pack(float low, float high) const { return Kept::pack(low, high); }
  __device__ __forceinline__ void operator()(int group, int r, const std::uint32_t (&pairs)[4]) const {
    if (block != nullptr)
      __stcs(block + kept_vector(group, r, threadIdx.x % 32), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
};

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

/// Number of the block that keeps the rows from `row` on of the segment's tile whose first column is its `column`; 32
/// bits are enough for 16 TiB.
__device__ __forceinline__ int kept_block(const ForwardWork& w, int segment, int column, int row) {
  constexpr int kTilesPerSegment = static_cast<int>(kSegmentColumns) / kTileColumns;
  const int id = w.segments.first + segment, octant = id / w.segments.per_octant;
  const int tile = octant * w.kept.tiles_per_octant + (id - octant * w.segments.per_octant) * kTilesPerSegment +
                   column / kTileColumns - w.kept.first_tile;
  return tile * w.kept.stride + row / kBlockRows;
}

template <class T, bool kEntropy, bool kGeneral, bool kKeep>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardWork w) {
  extern __shared__ std::uint8_t raw[];
  Stages<T>& s = aligned_shared<Stages<T>>(raw);
  const int rows = w.count != nullptr ? static_cast<int>(*w.count) : w.max_rows;
  if (rows <= 0) return;
  init_stages<T>(s);
  const TileOrder order{(rows + kTileRows - 1) / kTileRows, w.segments.count, w.group};
  const int k_steps = (w.h + kTileDepth - 1) / kTileDepth, items = order.count();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;

  if (warpgroup < 0) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&w.hidden);
      prefetch_map(&w.weight);
      Cursor cursor(kProducerParity);
      deal_items<T>(s, w.ticket, items, [&](int i) {
        int block, segment;
        order.decode(i, block, segment);
        const Span span = segment_span(w.segments, segment);
        for (int v = span.begin; v < span.end; v += kTileColumns) {
          const bool narrow = span.end - v <= kNarrowColumns;
          load_tile<T, 0, 0>(s, cursor, &w.hidden, narrow ? &w.weight_narrow : &w.weight, block * kTileRows, v,
                             narrow ? kNarrowColumns : kTileColumns, 0, 0, k_steps);
        }
      });
    }
  } else {
    registers_increase<kConsumerRegisters>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float nats = kGeneral ? 1.0f : w.head.scale, factor = nats * kLog2E<float>;
    Cursor cursor(kConsumerParity);
    RingCursor<kTicketSlots> tickets(kConsumerParity);
    float d[128];
    for (int i; (i = take_item<T>(s, tickets)) < items;) {
      int block, segment;
      order.decode(i, block, segment);
      const Span span = segment_span(w.segments, segment);
      const int row = block * kTileRows + warpgroup * 64 + warp * 16 + lane / 4;  // and row + 8
      float inverse_temperature[2] = {1.0f, 1.0f}, c[2];  // loaded here, first used after the first tile
      int target[2] = {-1, -1};
      Running running[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row + 8 * r < rows) {
          inverse_temperature[r] = w.terms[row + 8 * r].inverse_temperature;
          target[r] = static_cast<int>(w.terms[row + 8 * r].target);
        }
      }
      for (int v = span.begin; v < span.end; v += kTileColumns) {
        const int limit = span.end - v;
        const int kept_rows = block * kTileRows + warpgroup * 64 + warp * 16;
        const int kept = kKeep && kept_rows < w.kept.rows ? kept_block(w, segment, v - span.begin, kept_rows) : -1;
        const auto keep = [&] {
          if constexpr (kKeep)
            return KeepBlock{kept < 0 ? nullptr : w.kept.exponentials + std::int64_t{kept} * kBlockVectors};
          else
            return KeepNothing{};
        }();
        if (limit <= kNarrowColumns) {
          multiply_tile<T, kNarrowColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          factors(factor, inverse_temperature, c);
          if constexpr (kGeneral) apply_head<kNarrowColumns>(d, w.head, v);
          fold_tile<kNarrowColumns, kEntropy>(d, limit, v, target, c, running, keep);
        } else {
          multiply_tile<T, kTileColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          factors(factor, inverse_temperature, c);
          if constexpr (kGeneral) apply_head<kTileColumns>(d, w.head, v);
          fold_tile<kTileColumns, kEntropy>(d, min(limit, kTileColumns), v, target, c, running, keep);
        }
        if (kept >= 0) {
#pragma unroll
          for (int r = 0; r < 2; ++r)
            __stcs(w.kept.top + std::int64_t{kept} * kBlockTops + kept_top(r, lane), running[r].max);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        merge_quad<kEntropy>(c[r], running[r]);
        if (lane % 4 == 0 && row + 8 * r < rows)
          w.partial[segment * w.partial_stride + row + 8 * r] =
              to_state(running[r], c[r], nats * inverse_temperature[r]);
      }
    }
  }
}

template <class T, bool kEntropy, bool kGeneral, bool kKeep>
Status launch(const ForwardWork& w, int multiprocessors, cudaStream_t stream) {
  const auto kernel = forward_kernel<T, kEntropy, kGeneral, kKeep>;
  constexpr int kBytes = static_cast<int>(shared_bytes<Stages<T>>());
  LMHEAD_RETURN_IF_ERROR(to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                                   "cudaFuncSetAttribute"));
  const std::int64_t items = ceil_div(w.max_rows, kTileRows) * w.segments.count;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors));
  kernel<<<blocks, kThreads, kBytes, stream>>>(w);
  return last_launch("sm90 forward");
}

template <class T, bool kKeep>
Status launch_typed(const ForwardWork& w, bool entropy, int multiprocessors, cudaStream_t stream) {
  if (w.head.general)
    return entropy ? launch<T, true, true, kKeep>(w, multiprocessors, stream)
                   : launch<T, false, true, kKeep>(w, multiprocessors, stream);
  return entropy ? launch<T, true, false, kKeep>(w, multiprocessors, stream)
                 : launch<T, false, false, kKeep>(w, multiprocessors, stream);
}

}  // namespace

Status launch_forward(const ForwardWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream) {
  if (work.kept.rows > 0) return launch_typed<__nv_bfloat16, true>(work, entropy, multiprocessors, stream);
  return dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16, false>(work, entropy, multiprocessors, stream)
                                   : launch_typed<__half, false>(work, entropy, multiprocessors, stream);
}

}  // namespace lmhead::cuda::sm90
