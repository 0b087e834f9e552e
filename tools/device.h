// Host data on the device of a backend: what --backend means, RAII device memory, copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lmhead/lmhead.h"

namespace lmhead::tools {

/// A backend for Execution and where its tensors live.
struct BackendChoice {
  std::string backend;
  Device device = Device::kCpu;
};
/// --backend NAME: "cuda" is "auto" among the CUDA backends; "auto" takes the device of the first backend
/// that `lmhead info` lists as usable. Throws CommandError for a name that is neither nor in the list, and for one
/// that this machine (no device) or this build (no CUDA) does not run, with the reason.
BackendChoice choose_backend(const std::string& name);
/// The usable backends that --backend NAME allows, all of a device for "auto" and "cuda"; "" means all of them.
std::vector<BackendInfo> choose_backends(const std::string& name);

/// Memory on a device, 256-byte aligned, freed at the end of its scope. Errors are thrown as CommandError.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device device, std::size_t bytes);

  void* data() const { return data_.get(); }
  std::size_t size() const { return bytes_; }
  /// Grows to at least `bytes`; the content is lost when it has to.
  void reserve(Device device, std::size_t bytes);
  void upload(const void* from, std::size_t bytes);
  /// Waits for the work queued before it.
  void download(void* to, std::size_t bytes) const;

 private:
  struct Free {
    Device device;
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  std::size_t bytes_ = 0;
  Device device_ = Device::kCpu;
};

/// Read-only host tensors brought to a device once. On the CPU nothing is copied and the views stay.
class Uploads {
 public:
  explicit Uploads(Device device) : device_(device) {}
  ConstMatrix matrix(const ConstMatrix& host);
  ConstVector vector(const ConstVector& host);

 private:
  void* store(const void* first, std::int64_t rows, std::int64_t row_bytes, std::int64_t stride_bytes);
  Device device_;
  std::vector<DeviceBuffer> buffers_;
};

/// Waits until the device has done everything queued so far.
void synchronize(Device device);

}  // namespace lmhead::tools
