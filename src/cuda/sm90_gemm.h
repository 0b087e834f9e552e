// Gradient products of the sm90 backend over one chunk of dl, in one launch:
//   dX[rows, H] += dl[rows, columns] W[columns, H]        dW[columns, H] += dl^T X
// The row count is read on the device, so both shrink with the active rows.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/launch.h"

namespace lmhead::cuda::sm90 {

enum class Store : int {
  kNone,     ///< this product is not wanted
  kWrite,    ///< fp32, overwrite
  kAdd,      ///< fp32, add to what is there (one writer per element and launch)
  kRounded,  ///< 16-bit, overwrite
};

struct GemmOutput {
  void* data;
  std::int64_t row_stride;
  Store store;
};

struct GemmWork {
  CUtensorMap dl_rows;        ///< [rows, columns], boxes of kTileRows x 64: dl as dX's left operand
  CUtensorMap dl_columns;     ///< the same, boxes of 64 x 64: dl^T as dW's left operand
  CUtensorMap weight;         ///< [v_valid, H], boxes of 64 x 64
  CUtensorMap hidden;         ///< [rows of the chunk, H], boxes of 64 x 64, read in place
  CUtensorMap gathered;       ///< the compacted copy, used when not all rows are active
  const std::int64_t* count;  ///< rows of the chunk, on the device
  const int* compacted;       ///< on the device: 1 when `gathered` holds the rows
  const std::int32_t* index;  ///< row of dx of each row of the chunk; nullptr: the row itself
  GemmOutput dx, dw;          ///< dw from the chunk's first column on
  GemmOutput rounded;         ///< the last chunk of columns: where dX goes, rounded, with what dx holds; else no data
  int* ticket;                ///< one zeroed counter of this launch: the next tile
  int max_rows;
  int h;
  int column, columns;  ///< the chunk's first local column and its width
};

Status launch_gemm(const GemmWork& work, DType dtype, int multiprocessors, cudaStream_t stream);

}  // namespace lmhead::cuda::sm90
