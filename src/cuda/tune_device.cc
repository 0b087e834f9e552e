#include "core/tune_device.h"

#include <fstream>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "core/return_if_error.h"
#include "cuda/cublas_lt.h"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

class CudaDevice final : public TuneDevice {
 public:
  CudaDevice() = default;
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;
  ~CudaDevice() override {
    for (cudaEvent_t event : {begin_, end_})
      if (event != nullptr) cudaEventDestroy(event);
    for (void* data : owned_) cudaFree(data);
  }
  Result<void*> allocate(std::size_t bytes) override {
    void* data = nullptr;
    LMHEAD_RETURN_IF_ERROR(to_status(cudaMalloc(&data, bytes > 0 ? bytes : 1), "cudaMalloc"));
    owned_.push_back(data);
    return data;
  }
  /// One upload; the copies double on the device.
  Status fill(void* to, std::size_t bytes, const void* block, std::size_t block_bytes) override {
    std::size_t done = std::min(bytes, block_bytes);
    LMHEAD_RETURN_IF_ERROR(to_status(cudaMemcpy(to, block, done, cudaMemcpyHostToDevice), "cudaMemcpy"));
    while (done < bytes) {
      const std::size_t more = std::min(done, bytes - done);
      LMHEAD_RETURN_IF_ERROR(
          to_status(cudaMemcpy(static_cast<std::byte*>(to) + done, to, more, cudaMemcpyDeviceToDevice), "cudaMemcpy"));
      done += more;
    }
    return {};
  }
  Result<double> time(const std::function<Status()>& work) override {
    for (cudaEvent_t* event : {&begin_, &end_})
      if (*event == nullptr) LMHEAD_RETURN_IF_ERROR(to_status(cudaEventCreate(event), "cudaEventCreate"));
    LMHEAD_RETURN_IF_ERROR(to_status(cudaEventRecord(begin_, nullptr), "cudaEventRecord"));
    LMHEAD_RETURN_IF_ERROR(work());
    LMHEAD_RETURN_IF_ERROR(to_status(cudaEventRecord(end_, nullptr), "cudaEventRecord"));
    LMHEAD_RETURN_IF_ERROR(to_status(cudaEventSynchronize(end_), "cudaEventSynchronize"));
    float ms = 0;
    LMHEAD_RETURN_IF_ERROR(to_status(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime"));
    return static_cast<double>(ms);
  }

 private:
  std::vector<void*> owned_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// CUDA's version, and the kernel driver's where it publishes one: the first word of digits and dots behind
/// "Module" in "... Kernel Module for x86_64  580.159.04 ...".
std::string driver_version() {
  int cuda = 0;
  cudaDriverGetVersion(&cuda);
  std::string text = "CUDA " + std::to_string(cuda / 1000) + "." + std::to_string(cuda % 1000 / 10), word;
  std::ifstream file("/proc/driver/nvidia/version");
  while (file >> word)
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos)
      return text + ", kernel module " + word;
  return text;
}

}  // namespace

std::unique_ptr<TuneDevice> tune_device() { return std::make_unique<CudaDevice>(); }

Result<const TuningSource*> tuning_source(const char* backend) {
  static std::mutex mutex;
  static auto* const sources = new std::map<std::pair<const char*, int>, TuningSource>;  // outlives every caller
  Result<const DeviceProperties*> device = current_device();
  if (!device.ok()) return device.status();
  const DeviceProperties& d = **device;
  const std::lock_guard lock(mutex);
  const auto [at, missing] = sources->try_emplace({backend, d.ordinal});
  if (missing) {
    const Result<const CublasLt*> products = cublas_lt();
    at->second = {backend, d.name + ", " + std::to_string(d.multiprocessors) + " multiprocessors", driver_version(),
                  products.ok() ? "cuBLASLt " + std::to_string((*products)->cublasLtGetVersion()) : "no cuBLASLt",
                  version()};
  }
  return &at->second;
}

}  // namespace lmhead::cuda
