// Ranks as threads of one process: a meeting point where each rank posts its pointers, copies what it
// needs from the others', and leaves when all have copied.
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "dist/host_communicator.h"

namespace lmhead {
namespace {

/// What a rank posts for one call.
struct Post {
  const char* operation = nullptr;
  const void* send = nullptr;
  std::size_t bytes = 0;
};

class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout)
      : timeout_(timeout), posts_(static_cast<std::size_t>(size)), arrived_(posts_.size(), false) {}

  /// Posts, waits for all ranks, runs `copy(posts)`, and waits until all have copied.
  template <class Copy>
  Status meet(int rank, const Post& post, Copy&& copy) {
    std::unique_lock lock(mutex_);
    if (!broken_.ok()) return broken_;
    const std::int64_t round = round_;
    posts_[static_cast<std::size_t>(rank)] = post;
    arrived_[static_cast<std::size_t>(rank)] = true;
    if (++count_ == size() && posts_agree()) {
      full_round_ = round;
      changed_.notify_all();
    }
    const auto ready = [&] { return full_round_ == round || !broken_.ok(); };
    if (!changed_.wait_for(lock, timeout_, ready))
      fail("ranks " + missing() + " did not reach " + post.operation + " within " + std::to_string(timeout_.count()) +
           " ms");
    // A full round is finished by all even if the group breaks meanwhile: others wait for this rank's copy.
    if (full_round_ != round) return broken_;
    lock.unlock();
    copy(posts_);  // posts stay as they are until every rank has left
    lock.lock();
    if (--count_ == 0) {
      arrived_.assign(arrived_.size(), false);
      ++round_;
      changed_.notify_all();
    }
    // Copies are finite and need no other rank, so this wait needs no deadline.
    changed_.wait(lock, [&] { return round_ != round; });
    return {};
  }

  void break_off(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    // Ranks that are copying finish this call; the next one fails.
    if (broken_.ok()) fail(reason);
  }

 private:
  int size() const { return static_cast<int>(posts_.size()); }

  void fail(const std::string& reason) {
    broken_ = Status(StatusCode::kCommunication, "local communicator: " + reason);
    changed_.notify_all();
  }

  bool posts_agree() {
    for (std::size_t r = 1; r < posts_.size(); ++r) {
      const Post &a = posts_[0], &b = posts_[r];
      if (std::strcmp(a.operation, b.operation) == 0 && a.bytes == b.bytes) continue;
      fail("ranks disagree: rank 0 calls " + std::string(a.operation) + " with " + std::to_string(a.bytes) +
           " bytes a rank, rank " + std::to_string(r) + " calls " + b.operation + " with " + std::to_string(b.bytes));
      return false;
    }
    return true;
  }

  std::string missing() const {
    std::string names;
    for (std::size_t r = 0; r < arrived_.size(); ++r) {
      if (!arrived_[r]) names += (names.empty() ? "" : ", ") + std::to_string(r);
    }
    return names;
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  std::vector<bool> arrived_;
  int count_ = 0;                 ///< ranks inside the current round
  std::int64_t round_ = 0;        ///< calls finished by all
  std::int64_t full_round_ = -1;  ///< last round that all ranks reached
  Status broken_;
};

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
    });
  }

  Status all_to_all(const void* send, void* receive, std::size_t bytes, const char* operation) override {
    return meeting_->meet(rank(), {operation, send, bytes}, [&](const std::vector<Post>& posts) {
      for (std::size_t r = 0; bytes > 0 && r < posts.size(); ++r)
        std::memcpy(static_cast<std::byte*>(receive) + r * bytes,
                    static_cast<const std::byte*>(posts[r].send) + static_cast<std::size_t>(rank()) * bytes, bytes);
    });
  }

 private:
  const std::shared_ptr<Meeting> meeting_;
};

}  // namespace

Result<std::vector<std::unique_ptr<Communicator>>> local_communicators(int size, std::chrono::milliseconds timeout) {
  if (size < 1) return Status(StatusCode::kInvalidArgument, "size: expected >= 1, got " + std::to_string(size));
  const auto meeting = std::make_shared<Meeting>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<LocalCommunicator>(r, size, meeting));
  return ranks;
}

}  // namespace lmhead
