// Host threads for the arithmetic of the tests themselves.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace lmhead::testing {

/// fn(begin, end) over parts of [0, count), on all host threads when `work` (operations in all) is
/// worth a thread. Results must not depend on the parts.
template <class Fn>
void parallel_ranges(std::int64_t count, std::int64_t work, const Fn& fn) {
  const auto most = static_cast<std::int64_t>(std::max(1u, std::thread::hardware_concurrency()));
  const std::int64_t threads = work < 20000000 ? 1 : std::min(most, count);
  if (threads <= 1) return fn(std::int64_t{0}, count);
  std::vector<std::thread> pool;
  for (std::int64_t t = 0; t < threads; ++t)
    pool.emplace_back([&, t] { fn(count * t / threads, count * (t + 1) / threads); });
  for (std::thread& thread : pool) thread.join();
}

}  // namespace lmhead::testing
