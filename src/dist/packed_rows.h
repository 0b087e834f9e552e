// Which source row each local row of a packed, sharded batch holds, predicts and returns to.
#pragma once

#include <cstdint>
#include <vector>

#include "lmhead/layout.h"

namespace lmhead {

/// The index maps of one context-parallel rank. Source rows count the unpadded concatenation of all sequences.
struct PackedRows {
  /// [local_total] source row of each local row; -1 for padding.
  std::vector<std::int64_t> source;
  /// [local_total] source row whose id each local row predicts: the next of its own sequence; -1 where there is none.
  std::vector<std::int64_t> target;
  /// [num_tokens] position of each source row among the rows of all ranks, cp_rank * local_total + local row.
  std::vector<std::int64_t> gathered;
};

/// kInvalidArgument unless 0 <= cp_rank < cp.
Result<PackedRows> packed_rows(const PackedLayout& layout, std::int64_t cp_rank);

}  // namespace lmhead
