// Upstream gradients at selected ids, folded into a tile of dl.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/rows.h"

namespace lmhead::cuda {

/// A tile of dl [rows, end - begin] for the columns [begin, end) of a shard.
struct GradientTile {
  void* dl;
  std::int64_t stride;  ///< elements between rows
  DType type;
  std::int64_t rows, begin, end;
  float scale, softcap;  ///< softcap 0: none
};

/// Rewrites dl at the selected ids of each active row, after the column pass: their upstream gradient joins
/// in fp32 before the one rounding, as a target's does. `rows` are the inputs of the rows of the work (through
/// `list` when they were compacted), `terms` what prepare_rows made of them.
void add_selected(const GradientTile& tile, const RowInputs& rows, const RowList& list, const RowTerms* terms,
                  cudaStream_t stream);

}  // namespace lmhead::cuda
