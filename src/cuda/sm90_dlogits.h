// Recomputed projection and softmax gradient of the sm90 backend: hidden tile x weight tile -> dl, rounded
// once, into a chunk of workspace.
#pragma once

#include "cuda/sm90_forward.h"

namespace lmhead::cuda::sm90 {

/// A consumer warp of the kernel stores its rows of a tile.
inline constexpr int kDlogitsBoxRows = 16;

struct DlogitsWork {
  CUtensorMap hidden;    ///< [rows of the chunk, H], boxes of kTileRows x 64, read in place
  CUtensorMap gathered;  ///< the compacted copy, used when not all rows are active
  CUtensorMap weight;    ///< [v_valid, H], boxes of kTileColumns x 64
  CUtensorMap dl;        ///< [rows of the chunk, columns of the chunk], boxes of kDlogitsBoxRows x 64
  Head head;
  const RowTerms* terms;      ///< of the chunk's rows
  const std::int64_t* count;  ///< rows of the chunk, on the device; 0: nothing is done
  const int* compacted;       ///< on the device: 1 when `gathered` holds the rows
  int* ticket;                ///< one zeroed counter of this launch: the next tile
  int max_rows;
  int h;
  const std::int64_t* cached;  ///< rows of the list whose dl another pass writes, see cached_rows(); nullptr: none
  std::int64_t begin;          ///< with `cached`: place in the list of the chunk's first row
  int column, columns;         ///< the chunk's first local column and its width
  int group;                   ///< row blocks per L2 group
};

/// Writes dl for the rows of the chunk behind the cached ones, zeros for the rest of its last 128 rows.
Status launch_dlogits(const DlogitsWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream);

}  // namespace lmhead::cuda::sm90
