// Moving token-aligned tensors between the order of the tokens and a rank's rows, through index maps in device memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead::cuda {

/// kInvalidArgument for a pointer that is plain host memory.
Status check_on_device(const char* name, const void* data);

/// The host bytes are staged before the call returns.
Status upload(void* to, const void* from, std::size_t bytes, void* stream);

/// out[i] = the contiguous row i of `from`.
Status copy_rows(const ConstMatrix& from, void* out, void* stream);

/// For i in [0, n): targets[i] = ids[target[i]] and active[i] = mask[source[i]] > 0 (1 without a mask); where
/// target[i] < 0 the row predicts nothing: ignore_index and 0.
Status take_targets(const ConstVector& ids, const ConstVector& mask, const std::int64_t* source,
                    const std::int64_t* target, std::int64_t n, std::int64_t ignore_index, std::int64_t* targets,
                    std::uint8_t* active, void* stream);

/// out[i] = from[rows[i]], or `otherwise` where rows[i] < 0. fp32.
Status take_values(const ConstVector& from, const std::int64_t* rows, std::int64_t n, float otherwise, float* out,
                   void* stream);

/// out[t] = parts[position[t] / n][column][position[t] % n] for parts [cp, columns, n], fp32.
Status bring_back(const float* parts, const std::int64_t* position, std::int64_t n, std::int64_t columns,
                  std::int64_t column, const Vector& out, void* stream);

}  // namespace lmhead::cuda
