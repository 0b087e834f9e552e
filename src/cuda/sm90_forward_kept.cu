// The forward that keeps exponentials for the backward: the same states bit for bit, nothing overlapped, because its
// stores to memory cost more than an epilogue.
#include "cuda/sm90_fold.cuh"
#include "cuda/sm90_forward.h"
#include "cuda/sm90_kept.cuh"
#include "cuda/sm90_launch.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

/// Streams the warp's block of exponentials out.
struct KeepBlock {
  uint4* block;     ///< nullptr: rows that are not kept
  float shrink[2];  ///< of each row: from the reference of these columns to the tile's
  __device__ __forceinline__ std::uint32_t pack(float low, float high, int r) const {
    return Kept::pack(low * shrink[r], high * shrink[r]);
  }
  __device__ __forceinline__ void operator()(int group, int r, const std::uint32_t (&pairs)[4]) const {
    if (block != nullptr)
      __stcs(block + kept_vector(group, r, threadIdx.x % 32), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
  }
};

/// The tile's halves in turn, as the overlapped forward folds them. What is kept has one reference a row, the maximum
/// after the whole tile.
template <bool kEntropy>
__device__ __forceinline__ void fold_halves(float (&d)[128], const float (&c)[2], Running (&row)[2], uint4* to) {
  constexpr int kHalf = kTileColumns / 16;
  const float first[2] = {max_columns<0, kHalf, 0>(d, row[0].max), max_columns<0, kHalf, 1>(d, row[1].max)};
  const float whole[2] = {max_columns<kHalf, 2 * kHalf, 0>(d, first[0]), max_columns<kHalf, 2 * kHalf, 1>(d, first[1])};
  KeepBlock keep{to, {1.0f, 1.0f}};
#pragma unroll
  for (int r = 0; r < 2; ++r) keep.shrink[r] = exp2_approx(__fmul_rn(first[r], c[r]) - __fmul_rn(whole[r], c[r]));
  fold_columns<0, kHalf, kEntropy>(
      d, c, row, [] {}, keep);
  fold_columns<kHalf, 2 * kHalf, kEntropy>(
      d, c, row, [] {}, KeepBlock{to, {1.0f, 1.0f}});
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

template <class T, bool kEntropy, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) keeping_kernel(const __grid_constant__ ForwardWork w) {
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
        const int kept = kept_rows < w.kept.rows ? kept_block(w, segment, v - span.begin, kept_rows) : -1;
        uint4* const to = kept < 0 ? nullptr : w.kept.exponentials + std::int64_t{kept} * kBlockVectors;
        if (limit <= kNarrowColumns) {
          multiply_tile<T, kNarrowColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          factors(factor, inverse_temperature, c);
          if constexpr (kGeneral) apply_head<0, kNarrowColumns / 8>(d, w.head, v);
          mask_and_pick<0, kNarrowColumns / 8>(d, limit, v, target, running);
          fold_columns<0, kNarrowColumns / 8, kEntropy>(
              d, c, running, [] {}, KeepBlock{to, {1.0f, 1.0f}});
        } else {
          multiply_tile<T, kTileColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
          factors(factor, inverse_temperature, c);
          if constexpr (kGeneral) apply_head<0, kTileColumns / 8>(d, w.head, v);
          mask_and_pick<0, kTileColumns / 8>(d, limit, v, target, running);
          fold_halves<kEntropy>(d, c, running, to);
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

}  // namespace

Status launch_keeping_forward(const ForwardWork& w, bool entropy, int multiprocessors, cudaStream_t stream) {
  using T = __nv_bfloat16;
  return with_flags(entropy, w.head.general, [&](auto with_entropy, auto general) {
    const auto kernel = keeping_kernel<T, decltype(with_entropy)::value, decltype(general)::value>;
    return launch_persistent<Stages<T>>(kernel, w, ceil_div(w.max_rows, kTileRows) * w.segments.count, multiprocessors,
                                        stream, "sm90 forward that keeps exponentials");
  });
}

}  // namespace lmhead::cuda::sm90
