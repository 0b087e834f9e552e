// Where ranks that are threads of one process meet: each posts its pointers, copies what it needs from the
// others', and leaves when all have copied.
#pragma once

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "dist/timeout.h"
#include "lmhead/communicator.h"

namespace lmhead {

/// What a rank posts for one call.
struct Post {
  const char* operation = nullptr;
  const void* send = nullptr;
  std::size_t bytes = 0;
  int device = 0;  ///< ordinal of the CUDA device that `send` is on
};

class Meeting {
 public:
  Meeting(int size, std::chrono::milliseconds timeout)
      : timeout_(bounded_timeout(timeout)), posts_(static_cast<std::size_t>(size)), arrived_(posts_.size(), false) {}

  int size() const { return static_cast<int>(posts_.size()); }

  /// Posts, waits for all ranks, runs `copy(posts)`, which returns a Status, and waits until all have copied. A rank
  /// whose copy fails breaks the group for the next call.
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
    Status copied = copy(posts_);  // posts stay as they are until every rank has left
    lock.lock();
    if (!copied.ok() && broken_.ok()) fail("rank " + std::to_string(rank) + ": " + copied.message());
    if (--count_ == 0) {
      arrived_.assign(arrived_.size(), false);
      ++round_;
      changed_.notify_all();
    }
    // Copies are finite and need no other rank, so this wait needs no deadline.
    changed_.wait(lock, [&] { return round_ != round; });
    return copied;
  }

  void break_off(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    // Ranks that are copying finish this call; the next one fails.
    if (broken_.ok()) fail(reason);
  }

 private:
  void fail(const std::string& reason) {
    broken_ = Status(StatusCode::kCommunication, "local communicator: " + reason);
    changed_.notify_all();
  }

  bool posts_agree() {
    for (std::size_t r = 1; r < posts_.size(); ++r) {
      const Post &a = posts_[0], &b = posts_[r];
      if (a.device != b.device) {
        fail("expected all ranks on one CUDA device, got " + std::to_string(a.device) + " on rank 0 and " +
             std::to_string(b.device) + " on rank " + std::to_string(r));
        return false;
      }
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

/// Ranks on the CUDA device that is current in each rank's thread. src/dist/local_cuda.cc; builds with CUDA only.
std::vector<std::unique_ptr<Communicator>> local_cuda_communicators(int size, std::chrono::milliseconds timeout);

}  // namespace lmhead
