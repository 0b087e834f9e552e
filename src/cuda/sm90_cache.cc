#include "cuda/sm90_cache.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90_list.h"

namespace lmhead::cuda::sm90 {

CacheLayout CacheLayout::make(const ResolvedProblem& r, void* base, std::size_t bytes) {
  if (bytes == 0 || r.n == 0 || r.v_valid == 0) return {};
  const std::int64_t start = r.given.vocab_start, range = std::min(r.n, kRangeRows);
  const SegmentGrid grid = SegmentGrid::of(r.order(), start, start + r.v_valid);
  constexpr std::int64_t kTilesPerSegment = kSegmentColumns / kTileColumns;
  const std::int64_t per_octant = ceil_div(grid.octant_size, kTileColumns);
  const auto tile_of = [&](std::int64_t segment) {
    return segment / grid.per_octant * per_octant + segment % grid.per_octant * kTilesPerSegment;
  };
  const std::int64_t last = grid.id(grid.end - 1), last_begin = std::max(grid.origin(last), grid.begin);
  CacheLayout l;
  l.tiles_per_octant = static_cast<int>(per_octant);
  l.first_tile = static_cast<int>(tile_of(grid.first()));
  l.tiles = tile_of(last) + ceil_div(grid.end - last_begin, kTileColumns) - l.first_tile;

  const auto carve = [&](std::int64_t rows, void* at) {
    Workspace w(at);
    l.rows = rows;
    l.blocks = static_cast<int>(ceil_div(rows, kBlockRows));
    l.exponentials = w.take<uint4>(l.tiles * l.blocks * kBlockVectors);
    l.top = w.take<float>(l.tiles * l.blocks * kBlockTops);
    l.target = w.take<float>(range);
    l.place = w.take<std::int32_t>(range);
    return l.bytes = w.used();
  };
  std::int64_t rows = range;
  if (carve(rows, nullptr) > bytes) {
    const std::int64_t row_bytes = l.tiles * (kTileColumns * 2 + 32);
    rows = std::min(rows - 1, static_cast<std::int64_t>(bytes) / row_bytes) / kTileRows * kTileRows;
    while (rows > 0 && carve(rows, nullptr) > bytes) rows -= kTileRows;
  }
  if (rows == 0) return {};
  carve(rows, base);
  return l;
}

}  // namespace lmhead::cuda::sm90
