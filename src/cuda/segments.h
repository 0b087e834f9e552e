// The canonical segments (core/vocabulary_order.h) that a range of global columns touches, as plain
// arithmetic for kernels.
#pragma once

#include <cstdint>

#include "core/vocabulary_order.h"

namespace lmhead::cuda {

/// Segments of the global columns [begin, end); the first and last one may be cut by the range.
struct SegmentGrid {
  std::int64_t octant_size, per_octant, begin, end;

  static SegmentGrid of(VocabularyOrder order, std::int64_t begin, std::int64_t end) {
    const std::int64_t size = order.octant_size();
    return {size, (size + kSegmentColumns - 1) / kSegmentColumns, begin, end};
  }

  /// Number of the segment that holds a column, counted over the whole vocabulary.
  LMHEAD_HD std::int64_t id(std::int64_t column) const {
    return column / octant_size * per_octant + column % octant_size / kSegmentColumns;
  }
  LMHEAD_HD std::int64_t first() const { return id(begin); }
  LMHEAD_HD std::int64_t count() const { return begin < end ? id(end - 1) - id(begin) + 1 : 0; }
  /// First column of segment `id`, not cut by the range.
  LMHEAD_HD std::int64_t origin(std::int64_t id) const {
    return id / per_octant * octant_size + id % per_octant * kSegmentColumns;
  }
  /// End of segment `id`, not cut by the range.
  LMHEAD_HD std::int64_t limit(std::int64_t id) const {
    const std::int64_t octant_end = (id / per_octant + 1) * octant_size, e = origin(id) + kSegmentColumns;
    return e < octant_end ? e : octant_end;
  }

  /// Largest end <= begin + columns at which no segment is cut; cuts one only if it does not fit.
  std::int64_t chunk_end(std::int64_t chunk_begin, std::int64_t columns) const {
    if (end - chunk_begin <= columns) return end;
    const std::int64_t border = origin(id(chunk_begin + columns));
    return border > chunk_begin ? border : chunk_begin + columns;
  }
};

}  // namespace lmhead::cuda
