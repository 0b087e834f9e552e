// The main loop shared by the sm90 kernels: one producer warp fills a ring of shared-memory stages
// through TMA, two consumer warpgroups of 64 rows each multiply them with wgmma.
//
// A tile is kTileRows x kTileColumns outputs; a stage holds kTileDepth values of k of both operands.
// The two consumers may be up to kStages steps apart, so the epilogue of one runs under the products of
// the other.
#pragma once

#include "cuda/sm90_device.cuh"
#include "cuda/sm90_tiles.h"

namespace lmhead::cuda::sm90 {

inline constexpr int kStages = 4;
inline constexpr int kThreads = 384;  // one producer and two consumer warpgroups
inline constexpr int kConsumerWarps = 8;
inline constexpr int kTicketSlots = 2;
inline constexpr int kBoxColumns = 64;  // 128 bytes, the width of the swizzle
// 65536 registers: 128 * (40 + 2 * 232). The producer spills below 40.
inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

template <class T>
struct alignas(1024) Stages {  // 1024: one period of the 128-byte swizzle
  T a[kStages][kTileRows * kTileDepth];
  T b[kStages][kTileColumns * kTileDepth];
  std::uint64_t full[kStages], empty[kStages];
  std::uint64_t ticket_full[kTicketSlots], ticket_empty[kTicketSlots];
  int ticket[kTicketSlots];
};

/// The dynamic shared memory as S, aligned as it needs; launch with shared_bytes<S>().
template <class S>
constexpr std::size_t shared_bytes() {
  return sizeof(S) + alignof(S);
}
template <class S>
__device__ __forceinline__ S& aligned_shared(std::uint8_t* raw) {
  return *reinterpret_cast<S*>((reinterpret_cast<std::uintptr_t>(raw) + alignof(S) - 1) &
                               ~std::uintptr_t{alignof(S) - 1});
}

/// All threads of the block, before any wait.
template <class T>
__device__ __forceinline__ void init_stages(Stages<T>& s) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&s.full[i], 1);
      barrier_init(&s.empty[i], kConsumerWarps);
    }
    for (int i = 0; i < kTicketSlots; ++i) {
      barrier_init(&s.ticket_full[i], 1);
      barrier_init(&s.ticket_empty[i], kConsumerWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
}

/// Position in a ring: the slot, and the parity of its next completion.
template <int kSlots>
struct RingCursor {
  int stage = 0;
  std::uint32_t parity;
  __device__ __forceinline__ explicit RingCursor(std::uint32_t first) : parity(first) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kSlots) {
      stage = 0;
      parity ^= 1;
    }
  }
};
using Cursor = RingCursor<kStages>;
// A fresh barrier counts as completed with parity 1: the producer finds all stages empty.
inline constexpr std::uint32_t kProducerParity = 1, kConsumerParity = 0;

// Work items are dealt by a counter in global memory: a block that is done early takes more, so that
// neither ragged items nor slower multiprocessors leave a long tail. Which block computes an item changes
// no bit of it.

/// Producer thread: hands the consumers the items of this block, calling load(item) for each.
template <class T, class Load>
__device__ __forceinline__ void deal_items(Stages<T>& s, int* counter, int items, Load&& load) {
  RingCursor<kTicketSlots> cursor(kProducerParity);
  for (int item = static_cast<int>(blockIdx.x);; cursor.advance()) {
    barrier_wait(&s.ticket_empty[cursor.stage], cursor.parity);
    s.ticket[cursor.stage] = item;
    barrier_arrive(&s.ticket_full[cursor.stage]);
    if (item >= items) return;
    const int ticket = atomicAdd(counter, 1);  // arrives while this item loads: no use of it may stand before
    load(item);
    item = static_cast<int>(gridDim.x) + ticket;
  }
}
/// Consumers: the next item.
template <class T>
__device__ __forceinline__ int take_item(Stages<T>& s, RingCursor<kTicketSlots>& cursor) {
  barrier_wait(&s.ticket_full[cursor.stage], cursor.parity);
  const int item = __shfl_sync(~0u, s.ticket[cursor.stage], 0);
  if (threadIdx.x % 32 == 0) barrier_arrive(&s.ticket_empty[cursor.stage]);
  cursor.advance();
  return item;
}

/// Where one operand's boxes come from. k-major: the tensor's columns are k. mn-major (kTranspose): its
/// rows are k, its columns m or n, so a stage takes one box of 64 columns per 64 values of m or n.
template <int kTranspose>
__device__ __forceinline__ void load_operand(void* to, const CUtensorMap* map, std::uint64_t* barrier, int mn, int k,
                                             int extent) {
  if constexpr (!kTranspose) {
    tma_load(to, map, barrier, k, mn);
  } else {
    for (int i = 0; i < extent; i += kBoxColumns)
      tma_load(static_cast<std::uint8_t*>(to) + i * kTileDepth * 2, map, barrier, mn + i, k);
  }
}

/// Producer thread: streams the operands of one tile. (row, col) is the tile's origin, a_k and b_k the
/// first k of each operand's tensor.
template <class T, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void load_tile(Stages<T>& s, Cursor& cursor, const CUtensorMap* a, const CUtensorMap* b,
                                          int row, int col, int columns, int a_k, int b_k, int k_steps) {
  const std::uint32_t bytes = static_cast<std::uint32_t>((kTileRows + columns) * kTileDepth * sizeof(T));
  for (int k = 0; k < k_steps; ++k) {
    barrier_wait(&s.empty[cursor.stage], cursor.parity);
    std::uint64_t* full = &s.full[cursor.stage];
    barrier_expect(full, bytes);
    load_operand<kTransposeA>(s.a[cursor.stage], a, full, row, a_k + k * kTileDepth, kTileRows);
    load_operand<kTransposeB>(s.b[cursor.stage], b, full, col, b_k + k * kTileDepth, columns);
    cursor.advance();
  }
}

/// Consumer warpgroup (0 or 1): d = its 64 rows of the tile, all k. The last stages are handed back
/// before it returns. k_steps >= 1.
template <class T, int kColumns, int kTransposeA, int kTransposeB>
__device__ __forceinline__ void multiply_tile(Stages<T>& s, Cursor& cursor, int warpgroup, int k_steps,
                                              float (&d)[128]) {
  const bool elected = threadIdx.x % 32 == 0;
  int previous = 0;
  for (int k = 0; k < k_steps; ++k) {
    if (elected) barrier_wait(&s.full[cursor.stage], cursor.parity);  // 32 lanes polling cost 1 %, in power
    __syncwarp();
    wgmma_fence();
    // Both layouts keep 64 rows of A in 64 * kTileDepth elements.
    std::uint64_t a = operand_descriptor<kTransposeA, kTileDepth>(s.a[cursor.stage] + warpgroup * 64 * kTileDepth);
    std::uint64_t b = operand_descriptor<kTransposeB, kTileDepth>(s.b[cursor.stage]);
#pragma unroll
    for (int kk = 0; kk < kTileDepth / 16; ++kk) {
      wgmma<T, kColumns, kTransposeA, kTransposeB>(d, a, b, k | kk);
      a += kDescriptorStep<kTransposeA>;
      b += kDescriptorStep<kTransposeB>;
    }
    wgmma_commit();
    if (k > 0) {
      wgmma_wait<1>();  // one group stays in flight: waiting for all of them costs 10 %
      if (elected) barrier_arrive(&s.empty[previous]);
    }
    previous = cursor.stage;
    cursor.advance();
  }
  wgmma_wait<0>();
  if (elected) barrier_arrive(&s.empty[previous]);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");  // no read moves above the wait
}

// A tile whose epilogue runs under products, its own and the next tile's. The ring is too short for one consumer to run
// ahead of the other by an epilogue (three stages are held or under way), so both reach their epilogues at once and
// each must hide its own: the first two and the last two steps multiply the halves of the tile's columns one after the
// other. While the tensor cores do the second half of the last steps, the first half is complete and is folded; the
// second half is folded under the next tile's first steps.
//
//   begin_tile; fold the second half of the tile before; continue_tile; fold the first half; end_tile

inline constexpr int kLeastOverlapped = 4;  // steps: two pairs

/// Stages still read by products in flight.
struct TileHead {
  int first, second;
};
struct TileTail {
  int first, second;
};

/// One step's products with the columns of one half. The steps between the pairs use it too: with 64 x 256 products
/// beside halves of the same registers the compiler runs all of them one by one (C7511).
template <class T, int kHalf>
__device__ __forceinline__ void multiply_half(const Stages<T>& s, int stage, int warpgroup, int accumulate,
                                              float (&d)[128]) {
  std::uint64_t a = operand_descriptor<0, kTileDepth>(s.a[stage] + warpgroup * 64 * kTileDepth);
  std::uint64_t b = operand_descriptor<0, kTileDepth>(s.b[stage] + kHalf * (kTileColumns / 2) * kTileDepth);
#pragma unroll
  for (int kk = 0; kk < kTileDepth / 16; ++kk) {
    wgmma<T, kTileColumns / 2, 0, 0, kHalf * 64>(d, a, b, accumulate | kk);
    a += kDescriptorStep<0>;
    b += kDescriptorStep<0>;
  }
}
template <class T>
__device__ __forceinline__ int wait_stage(Stages<T>& s, Cursor& cursor) {
  const int stage = cursor.stage;
  if (threadIdx.x % 32 == 0) barrier_wait(&s.full[stage], cursor.parity);
  __syncwarp();
  cursor.advance();
  return stage;
}
template <class T>
__device__ __forceinline__ void release_stage(Stages<T>& s, int stage) {
  if (threadIdx.x % 32 == 0) barrier_arrive(&s.empty[stage]);
}
/// No read of the registers from kFirst to kFirst + 63 moves above this.
template <int kFirst>
__device__ __forceinline__ void pin_half(float (&d)[128]) {
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[kFirst + i])::"memory");
}

/// Starts a tile with the first half of its columns; the registers of the second half are still the caller's.
template <class T>
__device__ __forceinline__ TileHead begin_tile(Stages<T>& s, Cursor& cursor, int warpgroup, float (&d)[128]) {
  TileHead head;
  head.first = wait_stage(s, cursor);
  wgmma_fence();
  multiply_half<T, 0>(s, head.first, warpgroup, 0, d);
  head.second = wait_stage(s, cursor);
  wgmma_fence();
  multiply_half<T, 0>(s, head.second, warpgroup, 1, d);
  wgmma_commit();
  return head;
}
/// Returns when the first half is complete, with the second one's last two steps in flight.
template <class T>
__device__ __forceinline__ TileTail continue_tile(Stages<T>& s, Cursor& cursor, int warpgroup, int k_steps,
                                                  const TileHead& head, float (&d)[128]) {
  wgmma_fence();
  multiply_half<T, 1>(s, head.first, warpgroup, 0, d);
  wgmma_commit();
  multiply_half<T, 1>(s, head.second, warpgroup, 1, d);
  wgmma_commit();
  wgmma_wait<1>();
  release_stage(s, head.first);
  int previous = head.second;
  for (int k = 4; k < k_steps; ++k) {
    const int stage = wait_stage(s, cursor);
    wgmma_fence();
    multiply_half<T, 0>(s, stage, warpgroup, 1, d);
    multiply_half<T, 1>(s, stage, warpgroup, 1, d);
    wgmma_commit();
    wgmma_wait<1>();
    release_stage(s, previous);
    previous = stage;
  }
  TileTail tail;
  tail.first = wait_stage(s, cursor);
  wgmma_fence();
  multiply_half<T, 0>(s, tail.first, warpgroup, 1, d);
  wgmma_commit();
  wgmma_wait<1>();
  release_stage(s, previous);
  tail.second = wait_stage(s, cursor);
  wgmma_fence();
  multiply_half<T, 0>(s, tail.second, warpgroup, 1, d);
  wgmma_commit();
  multiply_half<T, 1>(s, tail.first, warpgroup, 1, d);
  wgmma_commit();
  multiply_half<T, 1>(s, tail.second, warpgroup, 1, d);
  wgmma_commit();
  wgmma_wait<2>();
  pin_half<0>(d);
  return tail;
}
/// A tile of at most kNarrowColumns columns, in d[0..31], nothing overlapped.
template <class T>
__device__ __forceinline__ void narrow_tile(Stages<T>& s, Cursor& cursor, int warpgroup, int k_steps, float (&d)[128]) {
  const auto step = [&](int accumulate) {
    const int stage = wait_stage(s, cursor);
    wgmma_fence();
    std::uint64_t a = operand_descriptor<0, kTileDepth>(s.a[stage] + warpgroup * 64 * kTileDepth);
    std::uint64_t b = operand_descriptor<0, kTileDepth>(s.b[stage]);
#pragma unroll
    for (int kk = 0; kk < kTileDepth / 16; ++kk) {
      wgmma<T, kNarrowColumns, 0, 0>(d, a, b, accumulate | kk);
      a += kDescriptorStep<0>;
      b += kDescriptorStep<0>;
    }
    wgmma_commit();
    wgmma_wait<0>();
    release_stage(s, stage);
  };
  step(0);
#pragma unroll 1
  for (int k = 1; k < k_steps; ++k) step(1);
  pin_half<0>(d);
}

/// Hands back the first of the last two stages: to be called within the first half's epilogue.
template <class T>
__device__ __forceinline__ void release_first(Stages<T>& s, const TileTail& tail) {
  wgmma_wait<1>();
  release_stage(s, tail.first);
}
template <class T>
__device__ __forceinline__ void end_tile(Stages<T>& s, const TileTail& tail, float (&d)[128]) {
  wgmma_wait<0>();
  release_stage(s, tail.second);
  pin_half<64>(d);
}

/// Tile order: row blocks fastest inside groups of `group` row blocks, so that the tiles in flight share
/// operands in L2; item i of rows x columns tiles.
struct TileOrder {
  int rows, columns, group;
  __device__ __forceinline__ int count() const { return rows * columns; }
  __device__ __forceinline__ void decode(int i, int& row, int& column) const {
    const int g0 = i / (group * columns) * group, height = min(group, rows - g0), j = i - g0 * columns;
    row = g0 + j % height;
    column = j / height;
  }
};

}  // namespace lmhead::cuda::sm90
