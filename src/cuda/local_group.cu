#include "cuda/local_group.h"

#include "core/return_if_error.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void add(float& sum, float x) { sum += x; }
__device__ __forceinline__ void add(float& sum, __nv_bfloat16 x) { sum += to_float(x); }
__device__ __forceinline__ void add(float& sum, __half x) { sum += to_float(x); }
__device__ __forceinline__ void add(double& sum, double x) { sum += x; }
template <class T>
__device__ __forceinline__ void store(T& out, float sum) {
  out = from_float<T>(sum);
}
__device__ __forceinline__ void store(double& out, double sum) { out = sum; }

/// `out` may alias one of the tensors: every thread reads its element of all ranks before it writes.
template <class T, class Sum>
__global__ void sum_ranks_kernel(RankTensors tensors, std::int64_t first, std::int64_t count, T* out) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * kThreads) {
    Sum sum = 0;
    for (int r = 0; r < tensors.ranks; ++r) add(sum, static_cast<const T*>(tensors.data[r])[first + i]);
    store(out[i], sum);
  }
}

}  // namespace

StreamMark::~StreamMark() {
  if (event_ != nullptr) cudaEventDestroy(static_cast<cudaEvent_t>(event_));
}

Status StreamMark::record(void* stream) {
  if (event_ == nullptr) {
    cudaEvent_t event = nullptr;
    LMHEAD_RETURN_IF_ERROR(
        to_status(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags"));
    event_ = event;
  }
  return to_status(cudaEventRecord(static_cast<cudaEvent_t>(event_), static_cast<cudaStream_t>(stream)),
                   "cudaEventRecord");
}

Status StreamMark::precede(void* stream) const {
  if (event_ == nullptr) return {};
  return to_status(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event_), 0),
                   "cudaStreamWaitEvent");
}

int current_ordinal() {
  int ordinal = -1;
  return cudaGetDevice(&ordinal) == cudaSuccess ? ordinal : -1;
}

Status copy_on_device(void* to, const void* from, std::size_t bytes, void* stream) {
  return to_status(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream)),
                   "cudaMemcpyAsync");
}

Status sum_ranks(const RankTensors& tensors, std::int64_t first, std::int64_t count, DType dtype, void* out,
                 void* stream) {
  if (count <= 0) return {};
  const auto run = [&]<class T, class Sum>(T* typed, Sum) {
    sum_ranks_kernel<T, Sum>
        <<<grid_for(count, kThreads), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(tensors, first, count, typed);
  };
  if (dtype == DType::kFloat64) {
    run(static_cast<double*>(out), 0.0);
  } else {
    with_type(dtype, [&]<class T>(T*) { run(static_cast<T*>(out), 0.0f); });
  }
  return last_launch("sum over ranks");
}

}  // namespace lmhead::cuda
