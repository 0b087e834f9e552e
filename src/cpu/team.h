// A fixed set of threads that walk through phases together.
#pragma once

#include <atomic>
#include <barrier>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu/gemm.h"

namespace lmhead {

/// Threads of one call. Every member calls the same sequence of for_each; the items of one are handed
/// out in order to whoever is free, and all are done when it returns.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), barrier_(threads, Reset{&next_}) {}

  int threads() const { return threads_; }

  /// Runs body(member) on every thread, the caller's included, and waits. Rethrows the first exception.
  template <class Body>
  void run(Body&& body) {
    const auto member = [&](int index) {
      const SingleThreaded single;
      body(index);
    };
    std::vector<std::thread> others;
    others.reserve(static_cast<std::size_t>(threads_ - 1));
    try {
      for (int k = 1; k < threads_; ++k) others.emplace_back(member, k);
    } catch (const std::system_error&) {  // no more threads: the items are shared by those there are
      for (auto k = static_cast<int>(others.size()) + 1; k < threads_; ++k) barrier_.arrive_and_drop();
    }
    member(0);
    for (std::thread& thread : others) thread.join();
    if (error_) std::rethrow_exception(error_);
  }

  /// item(i) for i in [0, count), then waits for the other members. After an exception in any member
  /// the items left are skipped, but the phases still go by, so that nobody waits for ever.
  template <class Item>
  void for_each(std::int64_t count, Item&& item) {
    for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
      if (failed_.load(std::memory_order_relaxed)) continue;
      try {
        item(i);
      } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
        failed_ = true;
      }
    }
    barrier_.arrive_and_wait();
  }

 private:
  struct Reset {
    std::atomic<std::int64_t>* next;
    void operator()() noexcept { next->store(0, std::memory_order_relaxed); }
  };

  const int threads_;
  std::atomic<std::int64_t> next_{0};
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
  std::barrier<Reset> barrier_;
};

}  // namespace lmhead
