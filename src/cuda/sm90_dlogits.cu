// dlogits: the forward's main loop again, with an epilogue that turns logits into their gradient in fp32,
// subtracts the target before the one rounding, and streams the tile out through shared memory and TMA.
#include "cuda/sm90_cache.h"
#include "cuda/sm90_dlogits.h"
#include "cuda/sm90_epilogue.cuh"
#include "cuda/sm90_gradient.cuh"
#include "cuda/sm90_launch.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

constexpr int kStoreRows = 64, kStoreColumns = 64, kStoreBuffers = 2;

template <class T>
struct Shared : Stages<T> {
  alignas(1024) T out[2][kStoreBuffers][kStoreRows * kStoreColumns];  // per consumer warpgroup
};

/// Row half R of the thread's logits becomes their gradient in place.
template <bool kEntropy, bool kGeneral, int R>
__device__ __forceinline__ void differentiate(float (&d)[128], const Coefficients& r, int column,
                                              float inverse_softcap) {
  const int target = r.target - column, lane_column = 2 * static_cast<int>(threadIdx.x % 4);
  const bool hit = static_cast<unsigned>(target) < static_cast<unsigned>(kTileColumns) && (target & 6) == lane_column;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = d[4 * j + 2 * R + e];
      const float u = fmaf(x, r.c, -r.lse2), p = exp2_approx(u);
      float dl = p * (kEntropy ? fmaf(r.g_term, u, r.a_term) : r.a_term);
      if constexpr (kGeneral) {
        if (hit && target == 8 * j + lane_column + e) dl += r.hit;
        const float y = x * inverse_softcap;  // 0 without a softcap
        dl *= fmaf(-y, y, 1.0f);
      }
      x = dl;
    }
  }
  if (!kGeneral && hit) {
#pragma unroll
    for (int j = 0; j < kTileColumns / 8; ++j) {
      // Added to every column group: a branch around d would move it to local memory.
      d[4 * j + 2 * R] += target == 8 * j + lane_column ? r.hit : 0.0f;
      d[4 * j + 2 * R + 1] += target == 8 * j + lane_column + 1 ? r.hit : 0.0f;
    }
  }
}

/// Stores the warpgroup's 64 x 256 tile in four boxes; the next box is written while TMA reads the last.
template <class T>
__device__ __forceinline__ void store_tile(Shared<T>& s, const CUtensorMap* map, const float (&d)[128], int warpgroup,
                                           int row, int column, int columns, int& buffer) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
#pragma unroll
  for (int box = 0; box < kTileColumns / kStoreColumns; ++box) {
    T* out = s.out[warpgroup][buffer];
    if (thread == 0) tma_store_wait_read<kStoreBuffers - 1>();
    named_barrier(1 + warpgroup, 128);
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      // Four 8 x 8 matrices: rows +0 and +8 of column groups j and j + 1.
      const float* f = d + 4 * (box * 8 + j);
      const int r = warp * 16 + lane % 16, chunk = j + lane / 16;
      stmatrix_x4(shared_address(out) + static_cast<std::uint32_t>(r * 128 + ((chunk ^ (r % 8)) << 4)),
                  pack2<T>(f[0], f[1]), pack2<T>(f[2], f[3]), pack2<T>(f[4], f[5]), pack2<T>(f[6], f[7]));
    }
    fence_async_proxy();
    named_barrier(1 + warpgroup, 128);
    if (thread == 0) {
      if (column + box * kStoreColumns < columns) tma_store(map, out, column + box * kStoreColumns, row);
      tma_store_commit();
    }
    buffer ^= 1;
  }
}

template <class T, bool kEntropy, bool kGeneral>
__global__ void __launch_bounds__(kThreads, 1) dlogits_kernel(const __grid_constant__ DlogitsWork w) {
  extern __shared__ std::uint8_t raw[];
  Shared<T>& s = aligned_shared<Shared<T>>(raw);
  const int rows = static_cast<int>(*w.count);
  // Another pass writes dl of the first ones.
  const int first = w.cached != nullptr ? cached_rows(w.cached, w.begin, rows) : 0;
  if (first >= rows) return;
  init_stages<T>(s);
  const TileOrder order{(rows - first + kTileRows - 1) / kTileRows, (w.columns + kTileColumns - 1) / kTileColumns,
                        w.group};
  const int k_steps = (w.h + kTileDepth - 1) / kTileDepth, items = order.count();
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
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const float factor = kGeneral ? kLog2E<float> : w.head.scale * kLog2E<float>;
    const float inverse_softcap = w.head.softcap > 0.0f ? 1.0f / w.head.softcap : 0.0f;
    Cursor cursor(kConsumerParity);
    RingCursor<kTicketSlots> tickets(kConsumerParity);
    int buffer = 0;
    float d[128];
    for (int i; (i = take_item<T>(s, tickets)) < items;) {
      int block, tile;
      order.decode(i, block, tile);
      const int row0 = first + block * kTileRows + warpgroup * 64, row = row0 + warp * 16 + lane / 4;
      const int column = w.column + tile * kTileColumns;
      const Coefficients r0 = coefficients<kEntropy>(w.terms + row, row < rows, factor, w.head.scale);
      const Coefficients r1 = coefficients<kEntropy>(w.terms + row + 8, row + 8 < rows, factor, w.head.scale);
      multiply_tile<T, kTileColumns, 0, 0>(s, cursor, warpgroup, k_steps, d);
      if constexpr (kGeneral) apply_head<0, kTileColumns / 8>(d, w.head, column);
      differentiate<kEntropy, kGeneral, 0>(d, r0, column, inverse_softcap);
      differentiate<kEntropy, kGeneral, 1>(d, r1, column, inverse_softcap);
      store_tile<T>(s, &w.dl, d, warpgroup, row0, tile * kTileColumns, w.columns, buffer);
    }
    if (threadIdx.x % 128 == 0) tma_store_wait();
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
