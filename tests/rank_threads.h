// Ranks as threads, for tests of sharded calls.
#pragma once

#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "lmhead/communicator.h"

namespace lmhead::testing {

/// Runs fn(communicator) on `ranks` threads, each with its end of one local group, and returns each one's status.
/// A rank's end is destroyed as soon as its function returns.
inline std::vector<Status> run_ranks(int ranks, const std::function<Status(Communicator&)>& fn,
                                     std::chrono::milliseconds timeout = std::chrono::seconds(30),
                                     Device device = Device::kCpu) {
  auto group = local_communicators(ranks, timeout, device);
  std::vector<Status> statuses(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < statuses.size(); ++r)
    threads.emplace_back([&fn, &status = statuses[r], end = std::move((*group)[r])]() mutable {
      status = fn(*end);
      end.reset();
    });
  for (std::thread& thread : threads) thread.join();
  return statuses;
}

}  // namespace lmhead::testing
