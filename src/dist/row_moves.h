// Token-aligned tensors brought to a rank's rows and results brought back, where the tensors live: on the CPU, or on
// execution.stream of a CUDA device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dist/packed_rows.h"
#include "lmhead/lmhead.h"

namespace lmhead {

/// PackedRows in the memory of the call's device.
struct PlacedRows {
  const std::int64_t* source = nullptr;
  const std::int64_t* target = nullptr;
  const std::int64_t* gathered = nullptr;
  std::int64_t rows = 0;    ///< of this rank
  std::int64_t tokens = 0;  ///< of all ranks, without padding
};

/// Bytes of memory that place_rows needs; none on the CPU, where the maps are used as they are.
std::size_t placed_rows_bytes(std::int64_t rows, std::int64_t tokens, Device device);
Status place_rows(const PackedRows& rows, void* memory, const Execution& execution, PlacedRows* placed);

/// kInvalidArgument when a tensor of a call on a CUDA device is plain host memory.
Status check_place(const char* name, const void* data, const Execution& execution);

/// targets[i]: the id that row i predicts, or ignore_index; active[i]: whether it predicts one and the mask (if any) is
/// > 0 there.
Status take_targets(const ConstVector& ids, const ConstVector& mask, const PlacedRows& rows, std::int64_t ignore_index,
                    std::int64_t* targets, std::uint8_t* active, const Execution& execution);

/// out[i] = from[source row of row i], or `otherwise` in padding; out has the dtype of from.
Status take_values(const ConstVector& from, const PlacedRows& rows, double otherwise, void* out,
                   const Execution& execution);

/// out[i] = the contiguous row i of `from`.
Status copy_rows(const ConstMatrix& from, void* out, const Execution& execution);

/// out[t] = token t's value in `column` of parts [cp, columns, rows], which are of out's dtype.
Status bring_back(const void* parts, const PlacedRows& rows, std::int64_t columns, std::int64_t column,
                  const Vector& out, const Execution& execution);

}  // namespace lmhead
