// Fork and join over index ranges with std::thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace lmhead {

/// Threads a call may use: `requested`, or all of this process's when it is 0.
inline int thread_count(int requested) {
  return requested > 0 ? requested : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Runs fn(begin, end) over contiguous parts of [0, count), at least `grain` indices each, and waits.
/// The caller's thread does the first part. fn must not throw.
template <class Fn>
void parallel_for(int threads, std::int64_t count, std::int64_t grain, Fn&& fn) {
  if (count <= 0) return;
  const std::int64_t parts =
      std::clamp<std::int64_t>(count / std::max<std::int64_t>(grain, 1), 1, thread_count(threads));
  std::vector<std::thread> workers;
  workers.reserve(static_cast<std::size_t>(parts - 1));
  for (std::int64_t k = 1; k < parts; ++k)
    workers.emplace_back([&fn, count, parts, k] { fn(count * k / parts, count * (k + 1) / parts); });
  fn(std::int64_t{0}, count / parts);
  for (std::thread& worker : workers) worker.join();
}

}  // namespace lmhead
