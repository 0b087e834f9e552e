// Exponentials that the forward keeps for the backward, so that the projection of their rows is not repeated.
//
// For the rows whose place in the list of active rows is below `rows`, p = 2^(c (x - top)) in 16 bits (sm90_kept.cuh),
// as the statistics compute it: x is the logit before the factor c = log2(e) / T, top the largest x of the row among
// the columns that the same lane has seen in this segment, this half of the tile included. The logit comes back as
// x = top + log2(p) / c. A probability of 1/2 or more is the largest of its lane, and so exact; at most 256 columns
// share a top, so no more than these lose digits to a peak.
//
// A block is what one warp of the forward holds of a tile: 16 rows, 256 columns, 8 KiB in the order of its
// accumulators, so that it stores whole lines straight from registers. The blocks of a tile lie side by side:
// neighbours in time are neighbours in memory. Rows of all tiles one after the other, written as boxes of 128 bytes
// every 2 V bytes, made the forward 25 to 35 % slower. Vector k of lane l, four pairs of columns, is row l / 4 + 8 (k %
// 2), columns 32 (k / 2) + 8 i + 2 (l % 4) and the next, i = 0 to 3. A row has one top for each lane of its quad and
// half of the columns.
#pragma once

#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

inline constexpr int kBlockRows = 16, kBlockVectors = kBlockRows * kTileColumns / 8, kBlockTops = 2 * 4 * kBlockRows;

/// Carves the caller's cache. Rows beyond the first kRangeRows of a batch are never kept.
struct CacheLayout {
  std::int64_t rows = 0;  ///< that fit: a multiple of kTileRows, or all of the first range
  std::int64_t tiles = 0;
  int tiles_per_octant = 0, first_tile = 0;  ///< whole vocabulary's numbering; first_tile is the shard's first
  int blocks = 0;                            ///< of 16 rows
  uint4* exponentials = nullptr;             ///< [tiles, blocks] of kBlockVectors, see sm90_kept.cuh
  float* top = nullptr;                      ///< [tiles, blocks] of kBlockTops
  float* target = nullptr;                   ///< [first range]: z at the target
  std::int32_t* place = nullptr;             ///< [first range]: of a row in the forward's list, or -1
  std::size_t bytes = 0;                     ///< 0: no row fits

  /// What fits into `bytes` at `base`; nullptr only measures. Equal bytes give equal layouts.
  static CacheLayout make(const ResolvedProblem& r, void* base, std::size_t bytes);
};

/// place[list[i]] = i, -1 elsewhere.
Status note_places(const RowList& list, std::int64_t n, std::int32_t* place, cudaStream_t stream);
/// *cached = rows of the backward's list that the cache holds; they come first in it.
void count_cached(const RowList& list, const std::int32_t* place, std::int64_t rows, std::int64_t* cached,
                  cudaStream_t stream);

/// dl of a chunk from the cache.
struct CachedWork {
  CacheLayout cache;
  Segments segments;
  Head head;
  const RowTerms* terms;       ///< of the chunk's rows
  const std::int32_t* index;   ///< of the chunk's rows in the range
  const std::int64_t* count;   ///< rows of the chunk, on the device
  const std::int64_t* cached;  ///< rows of the list that the cache holds, on the device
  std::int64_t begin;          ///< place in the list of the chunk's first row
  void* dl;                    ///< [max_rows, columns]
  std::int64_t dl_stride;      ///< a multiple of kTileColumns
  std::int64_t max_rows;
  int column, columns;  ///< the chunk's first local column and its width
  bool entropy;
};
/// Writes dl for the rows of the chunk that cached_rows() names, and zeros behind the last row as launch_dlogits does.
Status launch_cached(const CachedWork& work, DType dtype, cudaStream_t stream);

/// Rows at the beginning of a chunk whose dl comes from the cache: whole tiles, or all `rows`. The dlogits kernel does
/// the rest.
#ifdef __CUDACC__
__device__ __forceinline__ int cached_rows(const std::int64_t* cached, std::int64_t begin, int rows) {
  const std::int64_t behind = *cached - begin;
  return behind >= rows ? rows : behind <= 0 ? 0 : static_cast<int>(behind) / kTileRows * kTileRows;
}
#endif

}  // namespace lmhead::cuda::sm90
