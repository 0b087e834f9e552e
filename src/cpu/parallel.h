// Fork and join over index ranges with std::thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>

#include "cpu/team.h"

namespace lmhead {

/// Threads a call may use: `requested`, or all of this process's when it is 0.
inline int thread_count(int requested) {
  return requested > 0 ? requested : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Runs fn(begin, end) over contiguous parts of [0, count), at least `grain` indices each, and waits. Rethrows the
/// first exception of fn.
template <class Fn>
void parallel_for(int threads, std::int64_t count, std::int64_t grain, Fn&& fn) {
  if (count <= 0) return;
  const std::int64_t parts =
      std::clamp<std::int64_t>(count / std::max<std::int64_t>(grain, 1), 1, thread_count(threads));
  Team team(static_cast<int>(parts));
  team.run([&](int) { team.for_each(parts, [&](std::int64_t k) { fn(count * k / parts, count * (k + 1) / parts); }); });
}

}  // namespace lmhead
