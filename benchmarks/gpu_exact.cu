#include "gpu_exact.h"

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "cuda/element.cuh"

namespace lmhead::bench {
namespace {

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "gpu_bench: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

__device__ std::uint32_t hash(std::uint32_t x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

template <class T>
__global__ void fill_kernel(T* data, std::int64_t count, std::uint32_t seed, float scale) {
  for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const auto low = static_cast<std::uint32_t>(i), high = static_cast<std::uint32_t>(i >> 31);
    const float u = (static_cast<float>(hash(2 * low + seed)) + 1.0f) * 0x1p-32f;
    const float v = static_cast<float>(hash(2 * low + 1 + seed * 7919u + high)) * 0x1p-32f;
    data[i] = cuda::from_float<T>(scale * sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
  }
}

template <class T>
__global__ void product_kernel(const T* a, const int* list, const T* b, std::int64_t b_rows, std::int64_t depth,
                               double* out) {
  const std::int64_t j = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (j >= b_rows) return;
  const T* x = a + list[blockIdx.y] * depth;
  double sum = 0;
  for (std::int64_t k = 0; k < depth; ++k)
    sum += static_cast<double>(cuda::to_float(x[k])) * static_cast<double>(cuda::to_float(b[j * depth + k]));
  out[blockIdx.y * b_rows + j] = sum;
}

template <class T>
__global__ void combination_kernel(const double* factors, const T* b, std::int64_t b_rows, std::int64_t depth,
                                   double* out) {
  const std::int64_t k = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (k >= depth) return;
  double sum = 0;
  for (std::int64_t j = 0; j < b_rows; ++j)
    sum += factors[blockIdx.y * b_rows + j] * static_cast<double>(cuda::to_float(b[j * depth + k]));
  out[blockIdx.y * depth + k] = sum;
}

template <class T>
T* upload(const std::vector<T>& host) {
  T* device = nullptr;
  require(cudaMalloc(&device, host.size() * sizeof(T)));
  require(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

std::vector<double> download(double* device, std::int64_t count) {
  std::vector<double> host(static_cast<std::size_t>(count));
  require(cudaMemcpy(host.data(), device, host.size() * sizeof(double), cudaMemcpyDeviceToHost));
  require(cudaFree(device));
  return host;
}

unsigned blocks(std::int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

}  // namespace

void fill_normal(void* data, DType dtype, std::int64_t count, std::uint32_t seed, float scale) {
  cuda::with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    fill_kernel<T><<<2048, 256>>>(static_cast<T*>(data), count, seed, scale);
  });
  require(cudaDeviceSynchronize());
}

std::vector<double> exact_products(const void* a, const std::vector<int>& list, const void* b, std::int64_t b_rows,
                                   std::int64_t depth, DType dtype) {
  const auto rows = static_cast<std::int64_t>(list.size());
  int* device_list = upload(list);
  double* out = nullptr;
  require(cudaMalloc(&out, static_cast<std::size_t>(rows * b_rows) * sizeof(double)));
  cuda::with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    product_kernel<T><<<dim3(blocks(b_rows, 128), static_cast<unsigned>(rows)), 128>>>(
        static_cast<const T*>(a), device_list, static_cast<const T*>(b), b_rows, depth, out);
  });
  require(cudaDeviceSynchronize());
  require(cudaFree(device_list));
  return download(out, rows * b_rows);
}

std::vector<double> exact_combination(const std::vector<double>& factors, std::int64_t rows, const void* b,
                                      std::int64_t b_rows, std::int64_t depth, DType dtype) {
  double* device_factors = upload(factors);
  double* out = nullptr;
  require(cudaMalloc(&out, static_cast<std::size_t>(rows * depth) * sizeof(double)));
  cuda::with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    combination_kernel<T><<<dim3(blocks(depth, 128), static_cast<unsigned>(rows)), 128>>>(
        device_factors, static_cast<const T*>(b), b_rows, depth, out);
  });
  require(cudaDeviceSynchronize());
  require(cudaFree(device_factors));
  return download(out, rows * depth);
}

}  // namespace lmhead::bench
