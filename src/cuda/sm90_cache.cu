// The pass that turns kept exponentials into dl: as many bytes read as written, no product.
#include "core/return_if_error.h"
#include "cuda/launch.h"
#include "cuda/sm90_cache.h"
#include "cuda/sm90_gradient.cuh"
#include "cuda/sm90_kept.cuh"

namespace lmhead::cuda::sm90 {
namespace {

constexpr int kBlock = 256, kWarps = kBlock / 32;
/// A warp turns eight rows of a tile, a block 16 rows of four tiles: lines of 2 KiB are read and written.
constexpr int kWarpRows = 8, kGroupTiles = 4, kGroupRows = kWarps / kGroupTiles * kWarpRows;

__global__ void note_places_kernel(RowList list, std::int64_t n, std::int32_t* place) {
  const std::int64_t count = list.count != nullptr ? *list.count : n;
  for (std::int64_t i = blockIdx.x * std::int64_t{kBlock} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kBlock)
    place[list.index != nullptr ? list.index[i] : i] = static_cast<std::int32_t>(i);
}

/// Both lists ascend, so the kept rows come first.
__global__ void count_cached_kernel(RowList list, const std::int32_t* place, std::int64_t rows, std::int64_t* cached) {
  std::int64_t low = 0, high = *list.count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (place[list.index[middle]] < rows) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  *cached = low;
}

/// Local columns [begin, end) of a kept tile; empty for the numbers that a shard's first segment leaves out.
struct TileSpan {
  int begin, end;
};
__device__ __forceinline__ TileSpan tile_span(const CachedWork& w, int tile) {
  constexpr int kTilesPerSegment = static_cast<int>(kSegmentColumns) / kTileColumns;
  const Segments& s = w.segments;
  const int id = tile + w.cache.first_tile, octant = id / w.cache.tiles_per_octant;
  const int in_octant = id - octant * w.cache.tiles_per_octant, segment = in_octant / kTilesPerSegment;
  const int origin = octant * s.octant_size + segment * static_cast<int>(kSegmentColumns);
  const int limit = min(min(origin + static_cast<int>(kSegmentColumns), (octant + 1) * s.octant_size), s.end);
  const int begin = max(origin, s.begin) + (in_octant - segment * kTilesPerSegment) * kTileColumns;
  return {begin - s.vocab_start, min(begin + kTileColumns, limit) - s.vocab_start};
}

/// Eight values of a row to dl[j .. j + 8), without those outside [0, columns).
__device__ __forceinline__ void store8(std::uint16_t* dl, int j, int end, const uint4& packed) {
  if (j >= 0 && j + 8 <= end && j % 8 == 0) {  // rows of dl start on 16 bytes
    *reinterpret_cast<uint4*>(dl + j) = packed;
    return;
  }
  const std::uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (j + i >= 0 && j + i < end) dl[j + i] = static_cast<std::uint16_t>(words[i / 2] >> (16 * (i % 2)));
}

/// word[i] of lane q of each quad becomes word[q] of lane i.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&word)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::uint32_t& low = word[bit == 1 ? 2 * k : k];
      std::uint32_t& high = word[bit == 1 ? 2 * k + 1 : k + 2];
      const std::uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, bit);
      low = upper ? other : low;
      high = upper ? high : other;
    }
  }
}

template <class T, bool kEntropy, bool kSoftcap>
__global__ void __launch_bounds__(kBlock)
    cached_kernel(const __grid_constant__ CachedWork w, int first, int last, int groups) {
  const std::int64_t rows = *w.count, taken = cached_rows(w.cached, w.begin, static_cast<int>(rows));
  // Behind the last row zeros up to a whole tile, which the products read.
  const std::int64_t end = taken == rows ? min((rows + kTileRows - 1) / kTileRows * kTileRows, w.max_rows) : taken;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  const std::int64_t i0 = blockIdx.x / groups * std::int64_t{kGroupRows} + warp / kGroupTiles * kWarpRows;
  const int tile = first + static_cast<int>(blockIdx.x % groups) * kGroupTiles + warp % kGroupTiles;
  if (i0 >= end || tile >= last) return;
  const std::int64_t i = i0 + lane / 4;
  const TileSpan span = tile_span(w, tile);

  const std::int32_t row = i < rows ? w.index[i] : -1;
  const std::int32_t place = row >= 0 ? w.cache.place[row] : -1;
  // A row that this forward never kept (another mask than its own) becomes NaN, not a read out of bounds.
  const bool kept = place >= 0 && place < w.cache.rows, lost = row >= 0 && !kept;
  uint4 raw[kTileColumns / 32];
  float top[2] = {lost ? NAN : 0.0f, lost ? NAN : 0.0f};  // of the halves of the columns
  const std::int64_t block = std::int64_t{tile} * w.cache.blocks + place / kBlockRows;
  const int half = place / 8 % 2, from = place % 8 * 4 + quad;
#pragma unroll
  for (int g = 0; g < kTileColumns / 32; ++g) {
    raw[g] = make_uint4(0, 0, 0, 0);
    if (kept && span.begin + 32 * g < span.end)
      raw[g] = __ldcs(w.cache.exponentials + block * kBlockVectors + kept_vector(g, half, from));
  }
  if (kept) {
#pragma unroll
    for (int h = 0; h < 2; ++h)  // a narrow tile has no second half
      if (span.begin + h * kTileColumns / 2 < span.end)
        top[h] = __ldcs(w.cache.top + block * kBlockTops + kept_top(h, half, from));
  }

  const float factor = w.head.general ? kLog2E<float> : w.head.scale * kLog2E<float>;
  const Coefficients r = row_coefficients<kEntropy>(row >= 0 ? w.terms[i] : RowTerms(), row >= 0, factor, w.head.scale);
  const float inverse_softcap = kSoftcap ? 1.0f / w.head.softcap : 0.0f, inverse_c = kSoftcap ? 1.0f / r.c : 0.0f;
  float hit_slope = 1.0f;
  if (kSoftcap && kept && r.target >= 0) {
    const float y = w.cache.target[row] / w.terms[i].inverse_temperature * inverse_softcap;
    hit_slope = fmaf(-y, y, 1.0f);
  }
  // The logit is u + base in log2 units, its probability p 2^base.
  float base[2], a[2], b[2], top_y[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    base[h] = fmaf(top[h], r.c, -r.lse2);
    const float scale = exp2_approx(base[h]);
    a[h] = r.a_term * scale;
    b[h] = r.g_term * scale;
    top_y[h] = top[h] * inverse_softcap;
  }
  auto* dl = static_cast<std::uint16_t*>(w.dl) + i * w.dl_stride;
  const int limit = min(span.end - w.column, w.columns), hit = r.target - span.begin - 2 * quad;
#pragma unroll
  for (int g = 0; g < kTileColumns / 32; ++g) {
    if (span.begin + 32 * g >= span.end) break;
    constexpr int kHalfVectors = kTileColumns / 64;
    const int h = g / kHalfVectors;
    std::uint32_t word[4] = {raw[g].x, raw[g].y, raw[g].z, raw[g].w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      float value[2], p[2], u[2];
      Kept<T>::template unpack<kEntropy || kSoftcap>(word[k], p, u);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = p[e] * (kEntropy ? fmaf(b[h], u[e] + base[h], a[h]) : a[h]);
        const bool target = hit == 32 * g + 8 * k + e;
        if (target) x += r.hit;
        if constexpr (kSoftcap) {
          const float y = fmaf(u[e] * inverse_c, inverse_softcap, top_y[h]);
          x *= target ? hit_slope : fmaf(-y, y, 1.0f);
        }
        value[e] = x;
      }
      word[k] = pack2<T>(value[0], value[1]);
    }
    transpose_quad(word);
    if (i < end)
      store8(dl, span.begin + 32 * g + 8 * quad - w.column, limit, make_uint4(word[0], word[1], word[2], word[3]));
  }
}

/// Number of the kept tile that holds a local column.
int tile_of(const CachedWork& w, std::int64_t column) {
  const SegmentGrid grid{w.segments.octant_size, w.segments.per_octant, w.segments.begin, w.segments.end};
  const std::int64_t at = column + w.segments.vocab_start, segment = grid.id(at);
  const std::int64_t begin = std::max(grid.origin(segment), grid.begin);
  return static_cast<int>(segment / grid.per_octant * w.cache.tiles_per_octant +
                          segment % grid.per_octant * (kSegmentColumns / kTileColumns) + (at - begin) / kTileColumns -
                          w.cache.first_tile);
}

template <class T>
Status launch_typed(const CachedWork& w, cudaStream_t stream) {
  const int first = tile_of(w, w.column), last = tile_of(w, w.column + w.columns - 1) + 1;
  const std::int64_t groups = ceil_div(last - first, kGroupTiles);
  const auto blocks = static_cast<unsigned>(groups * ceil_div(round_up(w.max_rows, kTileRows), kGroupRows));
  const auto kernel = w.head.softcap > 0.0f
                          ? (w.entropy ? cached_kernel<T, true, true> : cached_kernel<T, false, true>)
                          : (w.entropy ? cached_kernel<T, true, false> : cached_kernel<T, false, false>);
  kernel<<<blocks, kBlock, 0, stream>>>(w, first, last, static_cast<int>(groups));
  return last_launch("sm90 cached exponentials");
}

}  // namespace

Status note_places(const RowList& list, std::int64_t n, std::int32_t* place, cudaStream_t stream) {
  LMHEAD_RETURN_IF_ERROR(
      to_status(cudaMemsetAsync(place, 0xff, static_cast<std::size_t>(n) * sizeof *place, stream), "cudaMemsetAsync"));
  note_places_kernel<<<grid_for(n, kBlock), kBlock, 0, stream>>>(list, n, place);
  return last_launch("sm90 cache");
}

void count_cached(const RowList& list, const std::int32_t* place, std::int64_t rows, std::int64_t* cached,
                  cudaStream_t stream) {
  count_cached_kernel<<<1, 1, 0, stream>>>(list, place, rows, cached);
}

Status launch_cached(const CachedWork& work, DType dtype, cudaStream_t stream) {
  return dtype == DType::kBFloat16 ? launch_typed<__nv_bfloat16>(work, stream) : launch_typed<__half>(work, stream);
}

}  // namespace lmhead::cuda::sm90
