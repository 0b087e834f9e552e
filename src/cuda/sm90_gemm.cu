// Both gradient products of a chunk as one list of 128 x 256 tiles, the longer ones first, dealt out by a
// ticket counter: the tail of one product runs under the other, whatever the row count turns out to be.
#include "cuda/element.cuh"
#include "cuda/sm90_gemm.h"
#include "cuda/sm90_launch.cuh"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {
namespace {

struct Plan {
  TileOrder dx, dw;
  int dx_steps, dw_steps;
  int dw_row;  ///< first row of dW's sum
  int first;   ///< tiles of the product that comes first
  bool dw_first;
  __device__ __forceinline__ int count() const { return dx.count() + dw.count(); }
};

__device__ __forceinline__ Plan make_plan(const GemmWork& w, int rows) {
  Plan p;
  const int columns = (w.h + kTileColumns - 1) / kTileColumns;
  const int group = max(11, ((int)gridDim.x + columns - 1) / columns);  // 11 x 12 tiles in flight share operands
  p.dx = {w.dx.store == Store::kNone ? 0 : (rows + kTileRows - 1) / kTileRows, columns, group};
  p.dw = {w.dw.store == Store::kNone ? 0 : (w.columns + kTileRows - 1) / kTileRows, columns, group};
  p.dx_steps = (w.columns + kTileDepth - 1) / kTileDepth;
  // Without rows dW is still defined: one step beyond the tensors' end, which TMA reads as zeros.
  p.dw_steps = max(1, (rows + kTileDepth - 1) / kTileDepth);
  p.dw_row = rows > 0 ? 0 : w.max_rows;
  p.dw_first = p.dw_steps > p.dx_steps;
  p.first = p.dw_first ? p.dw.count() : p.dx.count();
  return p;
}

struct Tile {
  bool dw;
  int row, column;
};
__device__ __forceinline__ Tile decode(const Plan& p, int i) {
  Tile t;
  const bool second = i >= p.first;
  t.dw = p.dw_first != second;
  (t.dw ? p.dw : p.dx).decode(second ? i - p.first : i, t.row, t.column);
  t.row *= kTileRows;
  t.column *= kTileColumns;
  return t;
}

/// Four consecutive columns of a row; `aligned`: vector accesses are possible everywhere.
template <class T, Store kStore>
__device__ __forceinline__ void write4(void* data, std::int64_t at, bool aligned, const float4& x) {
  if constexpr (kStore == Store::kRounded) {
    T* to = static_cast<T*>(data) + at;
    if (aligned) {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(x.x, x.y), pack2<T>(x.z, x.w));
    } else {
      to[0] = from_float<T>(x.x), to[1] = from_float<T>(x.y), to[2] = from_float<T>(x.z), to[3] = from_float<T>(x.w);
    }
  } else {
    float* to = static_cast<float*>(data) + at;
    if (kStore == Store::kWrite && aligned) {
      *reinterpret_cast<float4*>(to) = x;
    } else if (kStore == Store::kWrite) {
      to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
    } else if (aligned) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x.x), "f"(x.y), "f"(x.z),
                   "f"(x.w)
                   : "memory");
    } else {
      to[0] += x.x, to[1] += x.y, to[2] += x.z, to[3] += x.w;
    }
  }
}

/// The warpgroup's 64 x 256 outputs. Lane pairs swap halves, so that each lane writes 4 columns of one row. kRounded:
/// plus `sums` [rows, columns], unless they are null.
template <class T, Store kStore>
__device__ __forceinline__ void write_tile(const float (&d)[128], const GemmOutput& out, const std::int32_t* index,
                                           const float* sums, int row0, int rows, int column, int columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const bool odd = lane % 2 != 0;
  const int row = row0 + warp * 16 + lane / 4 + (odd ? 8 : 0);
  const bool present = row < rows;
  const std::int64_t to = (present && index != nullptr ? index[row] : row) * out.row_stride;
  constexpr std::uintptr_t kVector = 4 * (kStore == Store::kRounded ? sizeof(T) : sizeof(float));
  const bool aligned = reinterpret_cast<std::uintptr_t>(out.data) % kVector == 0 && out.row_stride % 4 == 0;
  column += lane % 4 / 2 * 4;
#pragma unroll
  for (int j = 0; j < kTileColumns / 8; ++j) {
    const float d0 = d[4 * j], d1 = d[4 * j + 1], d2 = d[4 * j + 2], d3 = d[4 * j + 3];
    const float swap0 = __shfl_xor_sync(~0u, odd ? d0 : d2, 1), swap1 = __shfl_xor_sync(~0u, odd ? d1 : d3, 1);
    if (present && column + 8 * j < columns) {  // H is a multiple of 8: no group of 4 straddles the end
      float4 x = {odd ? swap0 : d0, odd ? swap1 : d1, odd ? d2 : swap0, odd ? d3 : swap1};
      if (kStore == Store::kRounded && sums != nullptr) {
        const float4 sum = __ldcs(reinterpret_cast<const float4*>(sums + std::int64_t{row} * columns + column + 8 * j));
        x = {x.x + sum.x, x.y + sum.y, x.z + sum.z, x.w + sum.w};
      }
      write4<T, kStore>(out.data, to + column + 8 * j, aligned, x);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ GemmWork w) {
  extern __shared__ std::uint8_t raw[];
  Stages<T>& s = aligned_shared<Stages<T>>(raw);
  const int rows = static_cast<int>(*w.count);
  const Plan plan = make_plan(w, rows);
  const int tiles = plan.count();
  if (static_cast<int>(blockIdx.x) >= tiles) return;
  init_stages<T>(s);
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0) - 1;

  if (warpgroup < 0) {
    registers_decrease<kProducerRegisters>();
    if (threadIdx.x == 0) {
      const CUtensorMap* hidden = *w.compacted != 0 ? &w.gathered : &w.hidden;
      Cursor cursor(kProducerParity);
      deal_items(s, w.ticket, tiles, [&](int i) {
        const Tile t = decode(plan, i);
        if (t.dw) {
          load_tile<T, 1, 1>(s, cursor, &w.dl_columns, hidden, t.row, t.column, kTileColumns, plan.dw_row, plan.dw_row,
                             plan.dw_steps);
        } else {
          load_tile<T, 0, 1>(s, cursor, &w.dl_rows, &w.weight, t.row, t.column, kTileColumns, 0, w.column,
                             plan.dx_steps);
        }
      });
    }
  } else {
    registers_increase<kConsumerRegisters>();
    Cursor cursor(kConsumerParity);
    RingCursor<kTicketSlots> tickets(kConsumerParity);
    const bool rounded = w.rounded.data != nullptr && *w.compacted == 0;
    float d[128];
    for (int i; (i = take_item(s, tickets)) < tiles;) {
      const Tile t = decode(plan, i);
      const int row0 = t.row + warpgroup * 64;
      if (t.dw) {
        multiply_tile<T, kTileColumns, 1, 1>(s, cursor, warpgroup, plan.dw_steps, d);
      } else {
        multiply_tile<T, kTileColumns, 0, 1>(s, cursor, warpgroup, plan.dx_steps, d);
      }
      const GemmOutput out = t.dw ? w.dw : rounded ? w.rounded : w.dx;
      const std::int32_t* index = t.dw || rounded ? nullptr : w.index;
      const float* sums =
          !t.dw && rounded && w.dx.store == Store::kAdd ? static_cast<const float*>(w.dx.data) : nullptr;
      const int end = t.dw ? w.columns : rows;
      switch (out.store) {
        case Store::kWrite: write_tile<T, Store::kWrite>(d, out, index, nullptr, row0, end, t.column, w.h); break;
        case Store::kAdd: write_tile<T, Store::kAdd>(d, out, index, nullptr, row0, end, t.column, w.h); break;
        default: write_tile<T, Store::kRounded>(d, out, index, sums, row0, end, t.column, w.h);
      }
    }
  }
}

template <class T>
Status launch(const GemmWork& w, int multiprocessors, cudaStream_t stream) {
  const std::int64_t width = ceil_div(w.h, kTileColumns);
  const std::int64_t tiles = (w.dx.store == Store::kNone ? 0 : ceil_div(w.max_rows, kTileRows) * width) +
                             (w.dw.store == Store::kNone ? 0 : ceil_div(w.columns, kTileRows) * width);
  return launch_persistent<Stages<T>>(gemm_kernel<T>, w, tiles, multiprocessors, stream, "sm90 gradient products");
}

}  // namespace

Status launch_gemm(const GemmWork& work, DType dtype, int multiprocessors, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch<__nv_bfloat16>(work, multiprocessors, stream)
                                   : launch<__half>(work, multiprocessors, stream);
}

}  // namespace lmhead::cuda::sm90
