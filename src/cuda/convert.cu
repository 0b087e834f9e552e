#include "cuda/convert.h"

#include "cuda/element.cuh"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;

/// A block covers kThreads / width rows at a time, `width` threads (a power of two) along a row.
struct RowShape {
  dim3 block;
  unsigned grid;
};
RowShape shape_for(std::int64_t rows, std::int64_t cols) {
  unsigned width = 32;
  while (width < kThreads && width < cols) width *= 2;
  const unsigned height = kThreads / width;
  return {dim3(width, height), grid_for(rows, height)};
}

/// Calls fn(row) for the rows of this thread.
template <class Fn>
__device__ __forceinline__ void for_each_row(std::int64_t rows, Fn&& fn) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.y} + threadIdx.y; i < rows;
       i += std::int64_t{gridDim.x} * blockDim.y)
    fn(i);
}

__device__ __forceinline__ bool listed(const RowList& list, std::int64_t i) {
  return list.index == nullptr || i < *list.count;
}
__device__ __forceinline__ std::int64_t row_of(const RowList& list, std::int64_t i) {
  return list.index == nullptr ? i : list.index[i];
}

template <class In, class Out>
__global__ void gather_kernel(const In* in, std::int64_t in_stride, Out* out, std::int64_t out_stride,
                              std::int64_t rows, std::int64_t cols, const RowTerms* terms, RowList list) {
  for_each_row(rows, [&](std::int64_t i) {
    Out* to = out + i * out_stride;
    if (!listed(list, i) || (terms != nullptr && terms[i].active == 0)) {
      for (std::int64_t j = threadIdx.x; j < cols; j += blockDim.x) to[j] = from_float<Out>(0.0f);
      return;
    }
    const In* from = in + row_of(list, i) * in_stride;
#pragma unroll 4
    for (std::int64_t j = threadIdx.x; j < cols; j += blockDim.x) to[j] = from_float<Out>(to_float(from[j]));
  });
}

template <class Out>
__global__ void store_kernel(const float* in, std::int64_t rows, Out* out, std::int64_t out_stride, std::int64_t cols,
                             const RowTerms* terms, RowList list, bool accumulate) {
  for_each_row(rows, [&](std::int64_t i) {
    if (!listed(list, i)) return;
    Out* to = out + row_of(list, i) * out_stride;
    const float* from = in + i * cols;
    const bool active = terms == nullptr || terms[i].active != 0;
#pragma unroll 4
    for (std::int64_t j = threadIdx.x; j < cols; j += blockDim.x) {
      const float value = active ? from[j] : 0.0f;
      to[j] = from_float<Out>(accumulate ? value + to_float(to[j]) : value);
    }
  });
}

template <class Out>
__global__ void clear_kernel(Out* out, std::int64_t out_stride, std::int64_t rows, std::int64_t cols,
                             const RowTerms* terms) {
  for_each_row(rows, [&](std::int64_t i) {
    if (terms != nullptr && terms[i].active != 0) return;
    for (std::int64_t j = threadIdx.x; j < cols; j += blockDim.x) out[i * out_stride + j] = from_float<Out>(0.0f);
  });
}

__global__ void store_vector_kernel(const float* in, std::int64_t n, Vector out, bool accumulate) {
  for (std::int64_t j = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; j < out.size;
       j += std::int64_t{gridDim.x} * kThreads) {
    const float old = accumulate ? load_float(out.data, out.dtype, j * out.stride) : 0.0f;
    store_float(out, j, (j < n ? in[j] : 0.0f) + old);
  }
}

void clear(const Matrix& out, const RowTerms* terms, cudaStream_t stream) {
  if (out.rows == 0 || out.cols == 0) return;
  const RowShape shape = shape_for(out.rows, out.cols);
  with_type(out.dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    clear_kernel<<<shape.grid, shape.block, 0, stream>>>(static_cast<Out*>(out.data), out.row_stride, out.rows,
                                                         out.cols, terms);
  });
}

}  // namespace

void gather_rows(const ConstMatrix& in, const Matrix& out, const RowTerms* terms, const RowList& list,
                 cudaStream_t stream) {
  if (out.rows == 0 || out.cols == 0) return;
  const RowShape shape = shape_for(out.rows, out.cols);
  with_type(in.dtype, [&](auto* in_type) {
    with_type(out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      gather_kernel<<<shape.grid, shape.block, 0, stream>>>(static_cast<const In*>(in.data), in.row_stride,
                                                            static_cast<Out*>(out.data), out.row_stride, out.rows,
                                                            out.cols, terms, list);
    });
  });
}

void store_rows(const float* in, std::int64_t n, const Matrix& out, const RowTerms* terms, const RowList& list,
                cudaStream_t stream, bool accumulate) {
  if (n == 0 || out.cols == 0) return;
  const RowShape shape = shape_for(n, out.cols);
  with_type(out.dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    store_kernel<<<shape.grid, shape.block, 0, stream>>>(in, n, static_cast<Out*>(out.data), out.row_stride, out.cols,
                                                         terms, list, accumulate);
  });
}

void clear_inactive_rows(const Matrix& out, const RowTerms* terms, cudaStream_t stream) { clear(out, terms, stream); }

void clear_matrix(const Matrix& out, cudaStream_t stream) { clear(out, nullptr, stream); }

void store_vector(const float* in, std::int64_t n, const Vector& out, bool accumulate, cudaStream_t stream) {
  if (out.size == 0) return;
  store_vector_kernel<<<grid_for(out.size, kThreads), kThreads, 0, stream>>>(in, n, out, accumulate);
}

}  // namespace lmhead::cuda
