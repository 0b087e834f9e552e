#include "device.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "commands.h"

#if LMHEAD_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace lmhead::tools {
namespace {

#if LMHEAD_HAS_CUDA
void require(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) throw failed(what + ": " + cudaGetErrorString(error));
}
#else
[[noreturn]] void without_cuda() { throw failed("this build has no CUDA"); }
#endif

constexpr std::align_val_t kAlignment{256};

}  // namespace

BackendChoice choose_backend(const std::string& name) {
  std::string names = "auto, cuda", no_cuda = "this build has no CUDA";
  for (const BackendInfo& backend : backends()) {
    if (name == backend.name) {
      if (backend.available) return {name, backend.device};
      throw bad_input("--backend: expected one that this machine runs, got " + name + ": " + backend.description);
    }
    if (name == "auto" && backend.available) return {name, backend.device};
    if (backend.device == Device::kCuda) {
      if (name == "cuda" && backend.available) return {"auto", Device::kCuda};
      no_cuda = backend.description;
    }
    names += ", " + backend.name;
  }
  if (name == "cuda" || name == "cuda_portable" || name == "sm90")  // the latter two are listed where CUDA is built
    throw bad_input("--backend: expected one that this machine runs, got " + name + ": " + no_cuda);
  throw bad_input("--backend: expected one of " + names + ", got " + name);
}

std::vector<BackendInfo> choose_backends(const std::string& name) {
  const BackendChoice choice = name.empty() ? BackendChoice{"all", Device::kCpu} : choose_backend(name);
  std::vector<BackendInfo> chosen;
  for (const BackendInfo& backend : backends()) {
    const bool wanted = choice.backend == "all" || choice.backend == backend.name ||
                        (choice.backend == "auto" && choice.device == backend.device);
    if (wanted && backend.available) chosen.push_back(backend);
  }
  return chosen;
}

void DeviceBuffer::Free::operator()(void* data) const {
  if (device == Device::kCpu) {
    ::operator delete(data, kAlignment);
    return;
  }
#if LMHEAD_HAS_CUDA
  cudaFree(data);
#endif
}

DeviceBuffer::DeviceBuffer(Device device, std::size_t bytes) : bytes_(bytes), device_(device) {
  if (bytes == 0) return;
  void* data = nullptr;
  if (device == Device::kCpu) {
    data = ::operator new(bytes, kAlignment);
  } else {
#if LMHEAD_HAS_CUDA
    require(cudaMalloc(&data, bytes), std::to_string(bytes) + " bytes of device memory");
#else
    without_cuda();
#endif
  }
  data_ = std::unique_ptr<void, Free>(data, Free{device});
}

void DeviceBuffer::reserve(Device device, std::size_t bytes) {
  if (bytes <= bytes_ && device == device_) return;
  *this = DeviceBuffer();  // free first: both may not fit
  *this = DeviceBuffer(device, bytes);
}

void DeviceBuffer::upload(const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (device_ == Device::kCpu) {
    std::memcpy(data_.get(), from, bytes);
    return;
  }
#if LMHEAD_HAS_CUDA
  require(cudaMemcpy(data_.get(), from, bytes, cudaMemcpyHostToDevice), "copy to the device");
#endif
}

void DeviceBuffer::download(void* to, std::size_t bytes) const {
  if (bytes == 0) return;
  if (device_ == Device::kCpu) {
    std::memcpy(to, data_.get(), bytes);
    return;
  }
#if LMHEAD_HAS_CUDA
  require(cudaMemcpy(to, data_.get(), bytes, cudaMemcpyDeviceToHost), "copy from the device");
#endif
}

void* Uploads::store(const void* first, std::int64_t rows, std::int64_t row_bytes, std::int64_t stride_bytes) {
  DeviceBuffer buffer(device_, static_cast<std::size_t>(rows * row_bytes));
#if LMHEAD_HAS_CUDA
  // Row pitches of cudaMemcpy2D end at 2^31; a contiguous block has none.
  if (rows > 0 && row_bytes > 0 && stride_bytes == row_bytes) {
    buffer.upload(first, static_cast<std::size_t>(rows * row_bytes));
  } else {
    for (std::int64_t i = 0; i < rows; ++i)
      require(cudaMemcpy(static_cast<std::byte*>(buffer.data()) + i * row_bytes,
                         static_cast<const std::byte*>(first) + i * stride_bytes, static_cast<std::size_t>(row_bytes),
                         cudaMemcpyHostToDevice),
              "copy to the device");
  }
#else
  static_cast<void>(first);
  static_cast<void>(stride_bytes);
#endif
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

ConstMatrix Uploads::matrix(const ConstMatrix& host) {
  if (device_ == Device::kCpu || host.data == nullptr) return host;
  const auto size = static_cast<std::int64_t>(size_of(host.dtype));
  return {store(host.data, host.rows, host.cols * size, host.rows > 1 ? host.row_stride * size : host.cols * size),
          host.rows, host.cols, host.cols, host.dtype};
}

ConstVector Uploads::vector(const ConstVector& host) {
  if (device_ == Device::kCpu || host.data == nullptr) return host;
  const auto size = static_cast<std::int64_t>(size_of(host.dtype));
  return {store(host.data, host.size, size, host.stride * size), host.size, 1, host.dtype};
}

void synchronize(Device device) {
#if LMHEAD_HAS_CUDA
  if (device == Device::kCuda) require(cudaDeviceSynchronize(), "device");
#else
  static_cast<void>(device);
#endif
}

}  // namespace lmhead::tools
