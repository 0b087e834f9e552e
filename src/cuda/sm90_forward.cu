// Forward: one block per multiprocessor walks (128 rows, one segment) items. The logits of a tile stay in
// the accumulator registers; each thread folds its columns of two rows into running statistics, and a
// segment ends with one 16-byte state a row. Nothing [N, V] is ever written.
#include "cuda/sm90_fold.cuh"
#include "cuda/sm90_forward.h"
#include "cuda/sm90_launch.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

/// Rows and statistics of the item whose last tile is not folded yet.
struct Item {
  int row = -1;  ///< the thread's first row, the other is row + 8; -1: no item yet
  int segment;
  float inverse_temperature[2], c[2];
  int target[2];
  Running running[2];
};

template <class T, bool kEntropy, bool kGeneral>
struct Consumer {
  const ForwardWork& w;
  const int rows, warpgroup;
  const float nats = kGeneral ? 1.0f : w.head.scale;
  Item item;

  __device__ __forceinline__ void next(int block, int segment) {
    finish();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    item.row = block * kTileRows + warpgroup * 64 + warp * 16 + lane / 4;
    item.segment = segment;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool present = item.row + 8 * r < rows;
      // Loaded here, first used after the first products.
      item.inverse_temperature[r] = present ? w.terms[item.row + 8 * r].inverse_temperature : 1.0f;
      item.target[r] = present ? static_cast<int>(w.terms[item.row + 8 * r].target) : -1;
      item.running[r] = Running();
    }
  }
  __device__ __forceinline__ void set_factors() { factors(nats * kLog2E<float>, item.inverse_temperature, item.c); }
  template <int kBegin, int kEnd, class Halfway>
  __device__ __forceinline__ void fold(float (&d)[128], int limit, int v, Halfway&& halfway) {
    if constexpr (kGeneral) apply_head<kBegin, kEnd>(d, w.head, v);
    mask_and_pick<kBegin, kEnd>(d, limit, v, item.target, item.running);
    fold_columns<kBegin, kEnd, kEntropy>(d, item.c, item.running, halfway, KeepNothing());
  }
  __device__ __forceinline__ void finish() {
    if (item.row < 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      merge_quad<kEntropy>(item.c[r], item.running[r]);
      if (threadIdx.x % 4 == 0 && item.row + 8 * r < rows)
        w.partial[item.segment * w.partial_stride + item.row + 8 * r] =
            to_state(item.running[r], item.c[r], nats * item.inverse_temperature[r]);
    }
  }
};

template <class T, bool kEntropy, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(const __grid_constant__ ForwardWork w) {
  extern __shared__ std::uint8_t raw[];
  Stages<T>& s = aligned_shared<Stages<T>>(raw);
  const int rows = __shfl_sync(~0u, w.count != nullptr ? static_cast<int>(*w.count) : w.max_rows, 0);
  if (rows <= 0) return;
  init_stages(s);
  const TileOrder order{(rows + kTileRows - 1) / kTileRows, w.segments.count, w.group};
  const int k_steps = max((w.h + kTileDepth - 1) / kTileDepth, kLeastOverlapped), items = order.count();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;

  if (warpgroup < 0) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      prefetch_map(&w.hidden);
      prefetch_map(&w.weight);
      Cursor cursor(kProducerParity);
      const auto load = [&](int i) {
        int block, segment;
        order.decode(i, block, segment);
        const Span span = segment_span(w.segments, segment);
        for (int v = span.begin; v < span.end; v += kTileColumns) {
          const bool narrow = span.end - v <= kNarrowColumns;
          load_tile<T, 0, 0>(s, cursor, &w.hidden, narrow ? &w.weight_narrow : &w.weight, block * kTileRows, v,
                             narrow ? kNarrowColumns : kTileColumns, 0, 0, k_steps);
        }
      };
      deal_items(s, w.ticket, items, load);
    }
  } else {
    registers_increase<kConsumerRegisters>();
    Consumer<T, kEntropy, kGeneral> consumer{w, rows, warpgroup};
    constexpr int kHalf = kTileColumns / 16;
    const auto nothing = [] {};
    Cursor cursor(kConsumerParity);
    RingCursor<kTicketSlots> tickets(kConsumerParity);
    float d[128];
#pragma unroll
    for (int j = 0; j < 128; ++j) d[j] = 0.0f;
    // The tile whose second half is not folded yet; its valid columns, 0 if there is none: masked columns change
    // nothing.
    int last_v = 0, last_limit = 0;
    for (int i; (i = take_item(s, tickets)) < items;) {
      int block, segment;
      order.decode(i, block, segment);
      const Span span = segment_span(w.segments, segment);
      for (int v = span.begin; v < span.end; v += kTileColumns) {
        const int limit = span.end - v;
        if (limit <= kNarrowColumns) {
          consumer.template fold<kHalf, 2 * kHalf>(d, last_limit, last_v, nothing);
          if (v == span.begin) consumer.next(block, segment);
          narrow_tile<T>(s, cursor, warpgroup, k_steps, d);
          consumer.set_factors();
          consumer.template fold<0, kNarrowColumns / 8>(d, limit, v, nothing);
          last_limit = 0;
        } else {
          const TileHead head = begin_tile<T>(s, cursor, warpgroup, d);
          consumer.template fold<kHalf, 2 * kHalf>(d, last_limit, last_v, nothing);
          if (v == span.begin) consumer.next(block, segment);
          const TileTail tail = continue_tile<T>(s, cursor, warpgroup, k_steps, head, d);
          consumer.set_factors();
          consumer.template fold<0, kHalf>(d, limit, v, [&] { release_first(s, tail); });
          end_tile(s, tail, d);
          last_limit = limit;
        }
        last_v = v;
      }
    }
    consumer.template fold<kHalf, 2 * kHalf>(d, last_limit, last_v, nothing);
    consumer.finish();
  }
}

template <class T>
Status launch_typed(const ForwardWork& w, bool entropy, int multiprocessors, cudaStream_t stream) {
  return with_flags(entropy, w.head.general, [&](auto with_entropy, auto general) {
    const auto kernel = forward_kernel<T, decltype(with_entropy)::value, decltype(general)::value>;
    return launch_persistent<Stages<T>>(kernel, w, ceil_div(w.max_rows, kTileRows) * w.segments.count, multiprocessors,
                                        stream, "sm90 forward");
  });
}

}  // namespace

Status launch_forward(const ForwardWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream) {
  if (work.kept.rows > 0) return launch_keeping_forward(work, dtype, entropy, multiprocessors, stream);
  return dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16>(work, entropy, multiprocessors, stream)
                                   : launch_typed<__half>(work, entropy, multiprocessors, stream);
}

}  // namespace lmhead::cuda::sm90
