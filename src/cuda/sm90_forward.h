// Forward kernel of the sm90 backend: hidden tile x weight segment -> partial softmax states.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/rows.h"
#include "cuda/sm90_tiles.h"

namespace lmhead::cuda::sm90 {

/// Segments of the shard's valid columns in 32 bits; see SegmentGrid.
struct Segments {
  int octant_size, per_octant, first, count;
  int begin, end;   ///< global columns
  int vocab_start;  ///< of the shard
};

/// How a logit is made from a product; the plain head (scale > 0, no bias, no softcap) is its own kernel.
struct Head {
  const float* bias;  ///< [v_valid + kTileColumns] fp32, or nullptr
  float scale;
  float softcap;  ///< 0: none
  bool general;   ///< bias, softcap, or a scale that is not > 0
};

/// Where the exponentials of the chunk's first rows are kept, in blocks of 16 rows and one tile; see sm90_cache.h.
struct KeptTiles {
  uint4* exponentials;  ///< [tile, block of rows] from the chunk's first row on
  float* top;           ///< the same
  int stride;           ///< blocks of a tile
  int rows;             ///< of the chunk; 0: none, and nothing else here is looked at
  int tiles_per_octant, first_tile;
};

struct ForwardWork {
  CUtensorMap hidden;         ///< [rows of the chunk, H], boxes of kTileRows x 64
  CUtensorMap weight;         ///< [v_valid, H], boxes of kTileColumns x 64
  CUtensorMap weight_narrow;  ///< the same, boxes of kNarrowColumns x 64
  Segments segments;
  Head head;
  const RowTerms* terms;      ///< of the chunk's rows
  const std::int64_t* count;  ///< rows of the chunk, on the device; 0: nothing is done; nullptr: max_rows
  SoftmaxState* partial;      ///< [segment, row]
  std::int64_t partial_stride;
  int* ticket;   ///< one zeroed counter of this launch: the next item
  int max_rows;  ///< of the chunk
  int h;
  int group;  ///< row blocks per L2 group
  KeptTiles kept;
};

/// Writes partial[s, i] for every segment s and every row i < *count of the chunk.
Status launch_forward(const ForwardWork& work, DType dtype, bool entropy, int multiprocessors, cudaStream_t stream);
/// The same for work.kept.rows > 0; launch_forward calls it.
Status launch_keeping_forward(const ForwardWork& work, DType dtype, bool entropy, int multiprocessors,
                              cudaStream_t stream);

}  // namespace lmhead::cuda::sm90
