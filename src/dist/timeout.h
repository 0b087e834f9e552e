// The deadlines of a group, kept where sums of times do not overflow.
#pragma once

#include <algorithm>
#include <chrono>

namespace lmhead {

/// `given`, at most a year: "never" is often written as the largest number, which added to any time is in the past.
inline std::chrono::milliseconds bounded_timeout(std::chrono::milliseconds given) {
  return std::min<std::chrono::milliseconds>(given, std::chrono::hours(24 * 365));
}

}  // namespace lmhead
