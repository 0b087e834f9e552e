#include "dist/row_moves.h"

#include <cstring>

#include "core/element.h"
#include "core/return_if_error.h"
#if LMHEAD_HAS_CUDA
#include "cuda/packed_rows.h"
#endif

namespace lmhead {
namespace {

#if LMHEAD_HAS_CUDA
bool on_cuda(const Execution& execution) { return execution.device == Device::kCuda; }
#endif

}  // namespace

std::size_t placed_rows_bytes(std::int64_t rows, std::int64_t tokens, Device device) {
  return device == Device::kCpu ? 0 : static_cast<std::size_t>(2 * rows + tokens) * sizeof(std::int64_t);
}

Status place_rows(const PackedRows& rows, void* memory, const Execution& execution, PlacedRows* placed) {
  *placed = {rows.source.data(), rows.target.data(), rows.gathered.data(),
             static_cast<std::int64_t>(rows.source.size()), static_cast<std::int64_t>(rows.gathered.size())};
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution)) {
    auto* next = static_cast<std::int64_t*>(memory);
    const auto put = [&](const std::vector<std::int64_t>& map, const std::int64_t** at) -> Status {
      *at = next;
      next += map.size();
      return map.empty() ? Status()
                         : cuda::upload(const_cast<std::int64_t*>(*at), map.data(), map.size() * sizeof(std::int64_t),
                                        execution.stream);
    };
    LMHEAD_RETURN_IF_ERROR(put(rows.source, &placed->source));
    LMHEAD_RETURN_IF_ERROR(put(rows.target, &placed->target));
    return put(rows.gathered, &placed->gathered);
  }
#endif
  (void)memory, (void)execution;
  return {};
}

Status check_place(const char* name, const void* data, const Execution& execution) {
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution)) return cuda::check_on_device(name, data);
#endif
  (void)name, (void)data, (void)execution;
  return {};
}

Status take_targets(const ConstVector& ids, const ConstVector& mask, const PlacedRows& rows, std::int64_t ignore_index,
                    std::int64_t* targets, std::uint8_t* active, const Execution& execution) {
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution))
    return cuda::take_targets(ids, mask, rows.source, rows.target, rows.rows, ignore_index, targets, active,
                              execution.stream);
#endif
  (void)execution;
  for (std::int64_t i = 0; i < rows.rows; ++i) {
    const std::int64_t target = rows.target[i];
    targets[i] = target < 0 ? ignore_index : load_int(ids, target);
    active[i] = target >= 0 && (mask.data == nullptr || load_int(mask, rows.source[i]) > 0);
  }
  return {};
}

Status take_values(const ConstVector& from, const PlacedRows& rows, double otherwise, void* out,
                   const Execution& execution) {
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution))
    return cuda::take_values(from, rows.source, rows.rows, static_cast<float>(otherwise), static_cast<float*>(out),
                             execution.stream);
#endif
  (void)execution;
  for (std::int64_t i = 0; i < rows.rows; ++i)
    store_float(out, from.dtype, i, rows.source[i] < 0 ? otherwise : load_float(from, rows.source[i]));
  return {};
}

Status copy_rows(const ConstMatrix& from, void* out, const Execution& execution) {
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution)) return cuda::copy_rows(from, out, execution.stream);
#endif
  (void)execution;
  const std::size_t row = static_cast<std::size_t>(from.cols) * size_of(from.dtype);
  for (std::int64_t i = 0; i < from.rows; ++i)
    std::memcpy(static_cast<std::byte*>(out) + row * static_cast<std::size_t>(i), row_data(from, i), row);
  return {};
}

Status bring_back(const void* parts, const PlacedRows& rows, std::int64_t columns, std::int64_t column,
                  const Vector& out, const Execution& execution) {
  if (out.absent()) return {};
#if LMHEAD_HAS_CUDA
  if (on_cuda(execution))
    return cuda::bring_back(static_cast<const float*>(parts), rows.gathered, rows.rows, columns, column, out,
                            execution.stream);
#endif
  (void)execution;
  for (std::int64_t t = 0; t < rows.tokens; ++t) {
    const std::int64_t rank = rows.gathered[t] / rows.rows, row = rows.gathered[t] % rows.rows;
    store_float(out, t, load_float(parts, out.dtype, (rank * columns + column) * rows.rows + row));
  }
  return {};
}

}  // namespace lmhead
