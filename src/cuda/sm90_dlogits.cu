// dlogits: the forward's main loop again, with an epilogue that turns logits into their gradient in fp32,
// subtracts the target before the one rounding, and streams the tile out through shared memory and TMA.
#include "cuda/element.cuh"
#include "cuda/sm90_cache.h"
#include "cuda/sm90_dlogits.h"
#include "cuda/sm90_epilogue.cuh"
#include "cuda/sm90_gradient.cuh"
#include "cuda/sm90_launch.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

/// Column groups (of 8) and boxes of half a tile.
constexpr int kHalfGroups = kTileColumns / 16, kHalfBoxes = kTileColumns / 2 / kBoxColumns;

template <class T>
struct Shared : Stages<T> {
  alignas(1024) T out[2][4][kHalfBoxes * kDlogitsBoxRows * kBoxColumns];  // of each consumer warp
};

/// The gradient of a logit x, without the target's part: p (A + B u).
template <bool kEntropy>
__device__ __forceinline__ float differentiate(float x, const Coefficients& r) {
  const float u = fmaf(x, r.c, -r.lse2), p = exp2_approx(u);
  return p * (kEntropy ? fmaf(r.g_term, u, r.a_term) : r.a_term);
}
/// The slope of the softcap at a capped logit x; 1 without one.
template <bool kGeneral>
__device__ __forceinline__ float cap_slope(float x, float inverse_softcap) {
  const float y = x * inverse_softcap;  // 0 without a softcap
  return kGeneral ? fmaf(-y, y, 1.0f) : 1.0f;
}

/// A consumer's tile whose second half is not stored yet.
template <class T, bool kEntropy, bool kGeneral>
struct Consumer {
  const DlogitsWork& w;
  Shared<T>& s;
  const int first, rows, warpgroup;
  const float factor = kGeneral ? kLog2E<float> : w.head.scale * kLog2E<float>;
  const float inverse_softcap = w.head.softcap > 0.0f ? 1.0f / w.head.softcap : 0.0f;
  int row0, column = w.columns;  ///< the warp's first row, the tile's first column in the chunk; w.columns: no tile
  RowTerms terms[2];
  Coefficients coefficients[2] = {};

  /// The next tile; its rows' terms are loaded here and first used after its first products.
  __device__ __forceinline__ void next(int block, int tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    row0 = first + block * kTileRows + warpgroup * 64 + warp * 16;
    column = tile * kTileColumns;
#pragma unroll
    for (int r = 0; r < 2; ++r)
      if (const int row = row0 + lane / 4 + 8 * r; row < rows) terms[r] = w.terms[row];
  }
  __device__ __forceinline__ void set_coefficients() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      asm volatile("" : "+f"(terms[r].inverse_temperature), "+f"(terms[r].lse));  // the wait for the loads stays here
      coefficients[r] = row_coefficients<kEntropy>(
          terms[r], row0 + static_cast<int>(threadIdx.x % 32) / 4 + 8 * r < rows, factor, w.head.scale);
    }
  }
  /// dl of a half of the columns, and on its way to memory; d keeps the logits. Every warp stores its own 16 rows: no
  /// barrier between warps. halfway() is called between the two boxes.
  template <int kHalf, class Halfway>
  __device__ __forceinline__ void finish(float (&d)[128], Halfway&& halfway) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    if constexpr (kGeneral) apply_head<kHalf * kHalfGroups, (kHalf + 1) * kHalfGroups>(d, w.head, w.column + column);
    T* const out = s.out[warpgroup][warp];
    if (lane == 0) tma_store_wait_read<0>();  // of the half before, long done
    __syncwarp();
#pragma unroll
    for (int box = 0; box < kHalfBoxes; ++box) {
      if (box == kHalfBoxes / 2) halfway();
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        // Four 8 x 8 matrices: rows +0 and +8 of column groups j and j + 1.
        std::uint32_t pairs[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* x = d + 4 * ((kHalf * kHalfBoxes + box) * 8 + j) + 2 * i;
          const Coefficients& r = coefficients[i % 2];
          pairs[i] = pack2<T>(differentiate<kEntropy>(x[0], r) * cap_slope<kGeneral>(x[0], inverse_softcap),
                              differentiate<kEntropy>(x[1], r) * cap_slope<kGeneral>(x[1], inverse_softcap));
        }
        const int r = lane % 16, chunk = j + lane / 16;
        stmatrix_x4(shared_address(out + box * kDlogitsBoxRows * kBoxColumns) +
                        static_cast<std::uint32_t>(r * 128 + ((chunk ^ (r % 8)) << 4)),
                    pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
    put_target<kHalf, 0>(d, out);
    put_target<kHalf, 1>(d, out);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
      for (int box = 0; box < kHalfBoxes; ++box) {
        const int at = column + (kHalf * kHalfBoxes + box) * kBoxColumns;
        if (at < w.columns) tma_store(&w.dl, out + box * kDlogitsBoxRows * kBoxColumns, at, row0);
      }
      tma_store_commit();
    }
  }
  /// The one column of a row whose gradient has another term, rounded once with it, over what the half has put there.
  template <int kHalf, int R>
  __device__ __forceinline__ void put_target(const float (&d)[128], T* out) {
    const int lane = threadIdx.x % 32, target = coefficients[R].target - (w.column + column) - kHalf * kTileColumns / 2;
    const bool here = target >= 0 && target < kTileColumns / 2;
    if (!__any_sync(~0u, here)) return;
    __syncwarp();  // other lanes have written there
    if (!here || (target & 6) != 2 * (lane % 4)) return;
    float x = 0.0f;
#pragma unroll
    for (int j = 0; j < kHalfGroups; ++j) {
      const float even = d[4 * (kHalf * kHalfGroups + j) + 2 * R], odd = d[4 * (kHalf * kHalfGroups + j) + 2 * R + 1];
      if (target / 8 == j) x = target % 2 != 0 ? odd : even;
    }
    const float dl =
        (differentiate<kEntropy>(x, coefficients[R]) + coefficients[R].hit) * cap_slope<kGeneral>(x, inverse_softcap);
    const int r = lane / 4 + 8 * R, in_box = target % kBoxColumns;
    T* const box = out + target / kBoxColumns * kDlogitsBoxRows * kBoxColumns;
    box[r * kBoxColumns + ((in_box / 8 ^ (r % 8)) * 8) + in_box % 8] = from_float<T>(dl);
  }
};

template <class T, bool kEntropy, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) dlogits_kernel(const __grid_constant__ DlogitsWork w) {
  extern __shared__ std::uint8_t raw[];
  Shared<T>& s = aligned_shared<Shared<T>>(raw);
  const int rows = __shfl_sync(~0u, static_cast<int>(*w.count), 0);
  // Another pass writes dl of the first ones.
  const int first = w.cached != nullptr ? cached_rows(w.cached, w.begin, rows) : 0;
  if (first >= rows) return;
  init_stages<T>(s);
  const TileOrder order{(rows - first + kTileRows - 1) / kTileRows, (w.columns + kTileColumns - 1) / kTileColumns,
                        w.group};
  const int k_steps = max((w.h + kTileDepth - 1) / kTileDepth, kLeastOverlapped), items = order.count();
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;

  if (warpgroup < 0) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      const CUtensorMap* hidden = *w.compacted != 0 ? &w.gathered : &w.hidden;
      prefetch_map(hidden);
      prefetch_map(&w.weight);
      Cursor cursor(kProducerParity);
      deal_items<T>(s, w.ticket, items, [&](int i) {
        int block, tile;
        order.decode(i, block, tile);
        load_tile<T, 0, 0>(s, cursor, hidden, &w.weight, first + block * kTileRows, w.column + tile * kTileColumns,
                           kTileColumns, 0, 0, k_steps);
      });
    }
  } else {
    registers_increase<kConsumerRegisters>();
    Consumer<T, kEntropy, kGeneral> consumer{w, s, first, rows, warpgroup};
    Cursor cursor(kConsumerParity);
    RingCursor<kTicketSlots> tickets(kConsumerParity);
    float d[128];
#pragma unroll
    for (int j = 0; j < 128; ++j) d[j] = 0.0f;
    for (int i; (i = take_item<T>(s, tickets)) < items;) {
      int block, tile;
      order.decode(i, block, tile);
      const TileHead head = begin_tile<T>(s, cursor, warpgroup, d);
      consumer.template finish<1>(d, [] {});
      consumer.next(block, tile);
      const TileTail tail = continue_tile<T>(s, cursor, warpgroup, k_steps, head, d);
      consumer.set_coefficients();
      consumer.template finish<0>(d, [&] { release_first(s, tail); });
      end_tile(s, tail, d);
    }
    consumer.template finish<1>(d, [] {});
    if (threadIdx.x % 32 == 0) tma_store_wait();
  }
}

template <class T>
Status launch_typed(const DlogitsWork& w, bool entropy, int multiprocessors, cudaStream_t stream) {
  return with_flags(entropy, w.head.general, [&](auto with_entropy, auto general) {
    const auto kernel = dlogits_kernel<T, decltype(with_entropy)::value, decltype(general)::value>;
    const std::int64_t items = ceil_div(w.max_rows, kTileRows) * ceil_div(w.columns, kTileColumns);
    return launch_persistent<Shared<T>>(kernel, w, items, multiprocessors, stream, "sm90 dlogits");
  });
}

}  // namespace

Status launch_dlogits(const DlogitsWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16>(work, entropy, multiprocessors, stream)
                                   : launch_typed<__half>(work, entropy, multiprocessors, stream);
}

}  // namespace lmhead::cuda::sm90
