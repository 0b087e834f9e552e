#include <chrono>
#include <cstring>
#include <fstream>
#include <new>
#include <vector>

#include "core/return_if_error.h"
#include "core/tune_device.h"

namespace lmhead {
namespace {

class HostDevice final : public TuneDevice {
 public:
  Result<void*> allocate(std::size_t bytes) override {
    void* data = ::operator new(bytes, kAlignment, std::nothrow);
    if (data == nullptr)
      return Status(StatusCode::kOutOfMemory,
                    "memory: expected " + std::to_string(bytes) + " bytes for tune, got an allocation that failed");
    owned_.emplace_back(data);
    return data;
  }
  Status fill(void* to, std::size_t bytes, const void* block, std::size_t block_bytes) override {
    for (std::size_t done = 0; done < bytes; done += block_bytes)
      std::memcpy(static_cast<std::byte*>(to) + done, block, std::min(block_bytes, bytes - done));
    return {};
  }
  Result<double> time(const std::function<Status()>& work) override {
    const auto begin = std::chrono::steady_clock::now();
    LMHEAD_RETURN_IF_ERROR(work());
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(void* data) const { ::operator delete(data, kAlignment); }
  };
  std::vector<std::unique_ptr<void, Free>> owned_;
};

}  // namespace

std::unique_ptr<TuneDevice> host_tune_device() { return std::make_unique<HostDevice>(); }

std::string host_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (const auto colon = line.find(": "); line.starts_with("model name") && colon != std::string::npos)
      return line.substr(colon + 2);
  return "unknown CPU";
}

}  // namespace lmhead
