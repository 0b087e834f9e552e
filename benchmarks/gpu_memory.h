// Device memory and the end of a program on an error, for the GPU benchmarks.
#pragma once

#include <cuda_runtime_api.h>
#include <errno.h>  // program_invocation_short_name

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead::bench {

[[noreturn]] inline void fail(const std::string& message) {
  std::fprintf(stderr, "%s: %s\n", program_invocation_short_name, message.c_str());
  std::exit(1);
}
inline void require(cudaError_t error) {
  if (error != cudaSuccess) fail(cudaGetErrorString(error));
}
inline void require(const Status& status) {
  if (!status.ok()) fail(status.to_string());
}

class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {
    const cudaError_t error = cudaMalloc(&data_, std::max<std::size_t>(bytes, 1));
    if (error != cudaSuccess) fail(std::to_string(bytes) + " bytes of device memory: " + cudaGetErrorString(error));
  }
  template <class T>
  explicit Memory(const std::vector<T>& host) : Memory(host.size() * sizeof(T)) {
    require(cudaMemcpy(data_, host.data(), bytes_, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  template <class T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::byte* data() const { return as<std::byte>(); }
  std::size_t bytes() const { return bytes_; }
  Vector floats() const { return {data_, count(), 1, DType::kFloat32}; }
  ConstVector inputs() const { return {data_, count(), 1, DType::kFloat32}; }

 private:
  std::int64_t count() const { return static_cast<std::int64_t>(bytes_ / sizeof(float)); }

  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace lmhead::bench
