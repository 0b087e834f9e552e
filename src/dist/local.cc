// Ranks as threads of one process, on host memory.
#include <cstring>
#include <string>

#include "dist/host_communicator.h"
#include "dist/meeting.h"

namespace lmhead {
namespace {

class LocalCommunicator final : public HostCommunicator {
 public:
  LocalCommunicator(int rank, int size, std::shared_ptr<Meeting> meeting)
      : HostCommunicator(rank, size, Device::kCpu), meeting_(std::move(meeting)) {}
  ~LocalCommunicator() override { meeting_->break_off("rank " + std::to_string(rank()) + " is gone"); }

  const char* transport() const override { return "local"; }

  void abort(const Status& reason) override {
    meeting_->break_off("rank " + std::to_string(rank()) + ": " + reason.message());
  }

 protected:
  Status gather(const void* send, void* receive, std::size_t bytes, const char* operation) override {
    return meeting_->meet(rank(), {operation, send, bytes}, [&](const std::vector<Post>& posts) {
      for (std::size_t r = 0; r < posts.size(); ++r) {
        std::byte* to = static_cast<std::byte*>(receive) + r * bytes;
        if (bytes > 0 && to != posts[r].send) std::memcpy(to, posts[r].send, bytes);
      }
      return Status();
    });
  }

  Status all_to_all(const void* send, void* receive, std::size_t bytes, const char* operation) override {
    return meeting_->meet(rank(), {operation, send, bytes}, [&](const std::vector<Post>& posts) {
      for (std::size_t r = 0; bytes > 0 && r < posts.size(); ++r)
        std::memcpy(static_cast<std::byte*>(receive) + r * bytes,
                    static_cast<const std::byte*>(posts[r].send) + static_cast<std::size_t>(rank()) * bytes, bytes);
      return Status();
    });
  }

 private:
  const std::shared_ptr<Meeting> meeting_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> local_communicators(int size, std::chrono::milliseconds timeout,
                                                                       Device device) {
  if (size < 1) return Status(StatusCode::kInvalidArgument, "size: expected >= 1, got " + std::to_string(size));
  if (device == Device::kCuda) {
#if LMHEAD_HAS_CUDA
    if (size > kMaxLocalCudaRanks)
      return Status(StatusCode::kInvalidArgument, "size: expected at most " + std::to_string(kMaxLocalCudaRanks) +
                                                      " ranks on a CUDA device, got " + std::to_string(size));
    return local_cuda_communicators(size, timeout);
#else
    return Status(StatusCode::kUnsupported,
                  "device: expected a build with CUDA (LMHEAD_CUDA) for ranks on a CUDA device, got one without");
#endif
  }
  const auto meeting = std::make_shared<Meeting>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  ranks.reserve(static_cast<std::size_t>(size));
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<LocalCommunicator>(r, size, meeting));
  return ranks;
}

}  // namespace lmhead
