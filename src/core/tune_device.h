// Memory and clocks for tune(): the host's, or those of the current CUDA device.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "core/tuning_cache.h"

namespace lmhead {

class TuneDevice {
 public:
  virtual ~TuneDevice() = default;
  /// 256-byte aligned; lives as long as this object.
  virtual Result<void*> allocate(std::size_t bytes) = 0;
  /// Fills `bytes` with copies of a block of host memory.
  virtual Status fill(void* to, std::size_t bytes, const void* block, std::size_t block_bytes) = 0;
  /// Milliseconds that the device takes for what `work` runs or queues.
  virtual Result<double> time(const std::function<Status()>& work) = 0;
};

std::unique_ptr<TuneDevice> host_tune_device();
/// "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", or "unknown CPU".
std::string host_model();

namespace cuda {  // with LMHEAD_HAS_CUDA
std::unique_ptr<TuneDevice> tune_device();
/// The current device's, for a backend of this name (a literal).
Result<const TuningSource*> tuning_source(const char* backend);
}  // namespace cuda

}  // namespace lmhead
