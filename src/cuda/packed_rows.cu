#include "cuda/packed_rows.h"

#include <string>

#include "core/return_if_error.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;

/// fn(i) for i in [0, n), a thread an element.
template <class Fn>
__global__ void for_each_kernel(std::int64_t n, Fn fn) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads)
    fn(i);
}

template <class Fn>
Status for_each(const char* what, std::int64_t n, const Fn& fn, void* stream) {
  if (n <= 0) return {};
  for_each_kernel<<<grid_for(n, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(n, fn);
  return last_launch(what);
}

struct TakeTargets {
  ConstVector ids, mask;
  const std::int64_t *source, *target;
  std::int64_t ignore_index;
  std::int64_t* targets;
  std::uint8_t* active;
  __device__ void operator()(std::int64_t i) const {
    const std::int64_t at = target[i];
    targets[i] = at < 0 ? ignore_index : load_int(ids, at);
    active[i] = at >= 0 && (mask.data == nullptr || load_int(mask, source[i]) > 0);
  }
};

struct TakeValues {
  ConstVector from;
  const std::int64_t* rows;
  float otherwise;
  float* out;
  __device__ void operator()(std::int64_t i) const { out[i] = rows[i] < 0 ? otherwise : load_float(from, rows[i]); }
};

struct BringBack {
  const float* parts;
  const std::int64_t* position;
  std::int64_t n, columns, column;
  Vector out;
  __device__ void operator()(std::int64_t t) const {
    const std::int64_t part = position[t] / n, row = position[t] % n;
    store_float(out, t, parts[(part * columns + column) * n + row]);
  }
};

}  // namespace

Status check_on_device(const char* name, const void* data) {
  if (data == nullptr) return {};
  cudaPointerAttributes attributes{};
  LMHEAD_RETURN_IF_ERROR(to_status(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes"));
  if (attributes.type != cudaMemoryTypeUnregistered) return {};
  return {StatusCode::kInvalidArgument, std::string(name) + ": expected device memory, got a host pointer"};
}

Status upload(void* to, const void* from, std::size_t bytes, void* stream) {
  return to_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)),
                   "cudaMemcpyAsync");
}

Status copy_rows(const ConstMatrix& from, void* out, void* stream) {
  if (from.rows == 0) return {};
  const std::size_t element = size_of(from.dtype), row = static_cast<std::size_t>(from.cols) * element;
  // A single row may come with any stride.
  const std::size_t pitch = from.rows == 1 ? row : static_cast<std::size_t>(from.row_stride) * element;
  return to_status(cudaMemcpy2DAsync(out, row, from.data, pitch, row, static_cast<std::size_t>(from.rows),
                                     cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
                   "cudaMemcpy2DAsync");
}

Status take_targets(const ConstVector& ids, const ConstVector& mask, const std::int64_t* source,
                    const std::int64_t* target, std::int64_t n, std::int64_t ignore_index, std::int64_t* targets,
                    std::uint8_t* active, void* stream) {
  return for_each("targets of packed rows", n, TakeTargets{ids, mask, source, target, ignore_index, targets, active},
                  stream);
}

Status take_values(const ConstVector& from, const std::int64_t* rows, std::int64_t n, float otherwise, float* out,
                   void* stream) {
  return for_each("values of packed rows", n, TakeValues{from, rows, otherwise, out}, stream);
}

Status bring_back(const float* parts, const std::int64_t* position, std::int64_t n, std::int64_t columns,
                  std::int64_t column, const Vector& out, void* stream) {
  return for_each("results of packed rows", out.size, BringBack{parts, position, n, columns, column, out}, stream);
}

}  // namespace lmhead::cuda
