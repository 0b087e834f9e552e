#include "cuda/sm90_rows.h"

#include <algorithm>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/sm90_tiles.h"

namespace lmhead::cuda::sm90 {
namespace {

constexpr int kBlock = 256;

/// The threads of a block copy one row, or clear it (source == nullptr); rows are 16-byte aligned and long.
__device__ void copy_row(const std::uint8_t* source, int row_bytes, std::uint8_t* target) {
  const auto* from = reinterpret_cast<const uint4*>(source);
  auto* to = reinterpret_cast<uint4*>(target);
  for (int k = threadIdx.x; k < row_bytes / 16; k += blockDim.x)
    to[k] = from != nullptr ? from[k] : make_uint4(0, 0, 0, 0);
}

/// One block a row.
__global__ void gather_kernel(const std::uint8_t* from, std::int64_t from_bytes, int row_bytes,
                              const std::int32_t* index, const std::int64_t* count, const int* compacted,
                              std::int64_t max_rows, std::uint8_t* to, std::int64_t to_bytes) {
  if (*compacted == 0) return;
  const std::int64_t rows = *count, end = min((rows + kTileRows - 1) / kTileRows * kTileRows, max_rows);
  for (std::int64_t i = blockIdx.x; i < end; i += gridDim.x)
    copy_row(i < rows ? from + index[i] * from_bytes : nullptr, row_bytes, to + i * to_bytes);
}

/// One block a row.
__global__ void pad_kernel(const std::uint8_t* from, std::int64_t from_bytes, int row_bytes, int rows,
                           std::uint8_t* to) {
  const int i = static_cast<int>(blockIdx.x);
  copy_row(i < rows ? from + i * from_bytes : nullptr, row_bytes, to + static_cast<std::int64_t>(i) * row_bytes);
}

/// Place of `row` in the ascending list, or -1.
__device__ std::int64_t find_row(const std::int32_t* index, std::int64_t count, std::int64_t row) {
  std::int64_t low = 0, high = count;
  while (low < high) {
    const std::int64_t middle = (low + high) / 2;
    if (index[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && index[low] == row ? low : -1;
}

template <class T>
__global__ void finish_hidden_kernel(const float* sums, const std::int32_t* index, const std::int64_t* active,
                                     std::int64_t begin, std::int64_t rows, bool clear, bool written, T* out,
                                     std::int64_t n, std::int64_t h, std::int64_t stride) {
  const std::int64_t count = *active;
  if (written && count == n) return;
  for (std::int64_t i = blockIdx.x; i < n; i += gridDim.x) {
    const std::int64_t place = count == n ? i : find_row(index, count, i);
    T* to = out + i * stride;
    if (place < 0) {
      if (!clear) continue;
      for (std::int64_t k = threadIdx.x; k < h; k += blockDim.x) to[k] = from_float<T>(0.0f);
    } else if (sums != nullptr && place >= begin && place < begin + rows) {
      const float4* from = reinterpret_cast<const float4*>(sums + (place - begin) * h);  // H is a multiple of 8
      for (std::int64_t k = threadIdx.x; k < h / 4; k += blockDim.x) {
        const float4 x = from[k];
        const T values[4] = {from_float<T>(x.x), from_float<T>(x.y), from_float<T>(x.z), from_float<T>(x.w)};
        if (sizeof(T) == 2 && reinterpret_cast<std::uintptr_t>(to + 4 * k) % 8 == 0) {
          *reinterpret_cast<uint2*>(to + 4 * k) = *reinterpret_cast<const uint2*>(values);
        } else {
          for (int e = 0; e < 4; ++e) to[4 * k + e] = values[e];
        }
      }
    }
  }
}

template <class T>
__global__ void finish_weight_kernel(const float* sums, std::int64_t rows, std::int64_t h, T* out,
                                     std::int64_t stride) {
  for (std::int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
    for (std::int64_t k = threadIdx.x; k < h; k += blockDim.x) out[i * stride + k] = from_float<T>(sums[i * h + k]);
  }
}

template <class T>
__global__ void sum_slices_kernel(const T* dl, std::int64_t stride, const std::int64_t* count, std::int64_t columns,
                                  float* partial) {
  const std::int64_t rows = *count, per_slice = (rows + gridDim.y - 1) / gridDim.y;
  const std::int64_t begin = blockIdx.y * per_slice, end = min(rows, begin + per_slice);
  const std::int64_t j = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (j >= columns) return;
  float sum = 0.0f;
  for (std::int64_t i = begin; i < end; ++i) sum += to_float(dl[i * stride + j]);
  partial[blockIdx.y * columns + j] = sum;
}

__global__ void add_slices_kernel(const float* partial, int slices, std::int64_t columns, float* sums, bool add) {
  const std::int64_t j = std::int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (j >= columns) return;
  float sum = 0.0f;
  for (int slice = 0; slice < slices; ++slice) sum += partial[slice * columns + j];
  sums[j] = add ? sums[j] + sum : sum;
}

__global__ void finish_bias_kernel(const float* sums, std::int64_t valid, Vector out, bool accumulate) {
  for (std::int64_t j = blockIdx.x * std::int64_t{kBlock} + threadIdx.x; j < out.size;
       j += std::int64_t{gridDim.x} * kBlock) {
    float value = j < valid ? sums[j] : 0.0f;
    if (accumulate) value += static_cast<const float*>(out.data)[j * out.stride];
    store_float(out, j, value);
  }
}

__global__ void load_bias_kernel(ConstVector bias, std::int64_t valid, std::int64_t padded, float* out) {
  for (std::int64_t j = blockIdx.x * std::int64_t{kBlock} + threadIdx.x; j < padded;
       j += std::int64_t{gridDim.x} * kBlock)
    out[j] = j < valid ? load_float(bias, j) : 0.0f;
}

unsigned row_blocks(std::int64_t rows) { return grid_for(rows, 1); }

}  // namespace

void gather_rows(const ConstMatrix& from, const std::int32_t* index, const std::int64_t* count, const int* compacted,
                 std::int64_t max_rows, void* to, std::int64_t to_stride, cudaStream_t stream) {
  gather_kernel<<<static_cast<unsigned>(std::min<std::int64_t>(max_rows, 1024)), 128, 0, stream>>>(
      static_cast<const std::uint8_t*>(from.data), from.row_stride * 2, static_cast<int>(from.cols * 2), index, count,
      compacted, max_rows, static_cast<std::uint8_t*>(to), to_stride * 2);
}

void pad_rows(const ConstMatrix& from, std::int64_t begin, std::int64_t rows, void* to, cudaStream_t stream) {
  pad_kernel<<<kTileRows, 128, 0, stream>>>(static_cast<const std::uint8_t*>(from.data) + begin * from.row_stride * 2,
                                            from.row_stride * 2, static_cast<int>(from.cols * 2),
                                            static_cast<int>(rows), static_cast<std::uint8_t*>(to));
}

void finish_hidden(const float* sums, const std::int32_t* index, const std::int64_t* active, std::int64_t begin,
                   std::int64_t rows, bool clear, bool written, const Matrix& out, cudaStream_t stream) {
  with_type(out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    finish_hidden_kernel<T><<<row_blocks(out.rows), 128, 0, stream>>>(sums, index, active, begin, rows, clear, written,
                                                                      static_cast<T*>(out.data), out.rows, out.cols,
                                                                      out.row_stride);
  });
}

void finish_weight(const float* sums, std::int64_t rows, const Matrix& out, cudaStream_t stream) {
  with_type(out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    finish_weight_kernel<T>
        <<<row_blocks(rows), 256, 0, stream>>>(sums, rows, out.cols, static_cast<T*>(out.data), out.row_stride);
  });
}

int sum_slices(std::int64_t rows) { return static_cast<int>(std::clamp<std::int64_t>(rows / 256, 1, 64)); }

void sum_columns(const void* dl, DType dtype, std::int64_t stride, const std::int64_t* count, std::int64_t columns,
                 int slices, float* partial, float* sums, bool add, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(columns, kBlock));
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    sum_slices_kernel<T><<<dim3(blocks, static_cast<unsigned>(slices)), kBlock, 0, stream>>>(
        static_cast<const T*>(dl), stride, count, columns, partial);
  });
  add_slices_kernel<<<blocks, kBlock, 0, stream>>>(partial, slices, columns, sums, add);
}

void finish_bias(const float* sums, std::int64_t valid, const Vector& out, bool accumulate, cudaStream_t stream) {
  if (out.size > 0) finish_bias_kernel<<<grid_for(out.size, kBlock), kBlock, 0, stream>>>(sums, valid, out, accumulate);
}

void load_bias(const ConstVector& bias, std::int64_t valid, std::int64_t padded, float* out, cudaStream_t stream) {
  load_bias_kernel<<<grid_for(padded, kBlock), kBlock, 0, stream>>>(bias, valid, padded, out);
}

}  // namespace lmhead::cuda::sm90
