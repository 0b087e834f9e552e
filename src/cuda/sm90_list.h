// Which rows take part, known to the device alone: their list, their terms and the row counts of the chunks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/rows.h"

namespace lmhead::cuda::sm90 {

/// Rows whose bookkeeping (terms, list) is held at a time: 10 MiB.
inline constexpr std::int64_t kRangeRows = std::int64_t{1} << 18;

/// From the number of active rows to the rows of every chunk. Not all rows active: `gathered` chunks get
/// theirs, `whole` ones 0; all active: the other way round. Either may be empty. *compacted says which.
struct ChunkCounts {
  std::int64_t* whole;
  int wholes;
  std::int64_t whole_rows;
  std::int64_t* gathered;
  int gathereds;
  std::int64_t gathered_rows;
  int* compacted;
  int* tickets;  ///< counters of the launches to come, zeroed
  int ticket_count;
};

/// What the list is written to.
struct ListBuffers {
  std::int32_t* parts;  ///< [list_parts(n)], scratch
  std::int32_t* index;  ///< [n]: the rows that take part, ascending
  std::int64_t* count;  ///< how many they are
  RowTerms* terms;      ///< [n]: of the rows of the list, in its order; behind them terms of no row
};
std::int64_t list_parts(std::int64_t n);

/// Lists the rows of [0, n) that take part, n <= kRangeRows, with their terms and the counts of the chunks. Results of
/// the other rows become zeros (the empty state) where `clear` names outputs.
void list_rows(const RowInputs& rows, std::int64_t n, bool backward, const ListBuffers& list, const ChunkCounts& counts,
               const RowOutputs& clear, cudaStream_t stream);

}  // namespace lmhead::cuda::sm90
