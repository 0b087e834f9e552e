// Row passes of the portable backend over a tile of fp32 products [rows, columns].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/rows.h"

namespace lmhead::cuda {

/// A tile of raw products <x_i, w_j> in the workspace, and how they become logits.
struct LogitTile {
  float* products;      ///< [rows, stride] fp32, 32-byte aligned rows
  std::int64_t stride;  ///< multiple of 8
  std::int64_t rows;
  std::int64_t begin, end;  ///< columns of the shard; the tile holds column `begin` first
  ConstVector bias;         ///< of the whole shard; may be absent
  float scale;
  float softcap;  ///< 0: none
};

/// State of each (row, canonical segment) of the tile, one warp each:
/// partial[s * tile.rows + i] for segment grid.first() + s. Inactive rows are skipped.
/// Real is float or double, the type of bias, scale, softcap, exponentials and sums; logits are fp32 either way.
template <class Real>
void segment_states(const LogitTile& tile, const SegmentGrid& grid, std::int64_t vocab_start, const RowTerms* terms,
                    SoftmaxStateT<Real>* partial, cudaStream_t stream);

/// Replaces the products of each row by dl rounded once to `dtype`, in place: row i then starts at the same
/// address and holds end - begin elements of dtype. Inactive rows become zero.
/// `entropy`: the rows' g counts; false runs no entropy arithmetic at all. `whole`: the tile holds every column that
/// is not padding, so that fp32 rows sum their p to make up for the rounding of lse.
void logit_gradients(const LogitTile& tile, DType dtype, bool entropy, bool whole, const RowTerms* terms,
                     cudaStream_t stream);

/// Slices of rows that column_sums adds separately before it adds the slices in order.
std::int64_t column_slices(std::int64_t rows);
/// sums[j] (+)= sum over rows of dl[i][j]; partial holds column_slices(rows) * columns floats.
/// dl_stride counts elements of dtype.
void column_sums(const void* dl, DType dtype, std::int64_t dl_stride, std::int64_t rows, std::int64_t columns,
                 float* partial, float* sums, bool accumulate, cudaStream_t stream);

}  // namespace lmhead::cuda
