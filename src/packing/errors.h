// Messages of the packing and layout code, in the library's one pattern.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "lmhead/status.h"

namespace lmhead::packing {

inline std::string str(std::int64_t value) { return std::to_string(value); }

inline Status invalid(const std::string& argument, const std::string& expected, const std::string& got) {
  return {StatusCode::kInvalidArgument, argument + ": expected " + expected + ", got " + got};
}

inline Status check_at_least(const char* argument, std::int64_t value, std::int64_t least) {
  if (value < least) return invalid(argument, "an integer >= " + str(least), str(value));
  return {};
}

/// value rounded up to a multiple, absent beyond 64 bits. value >= 0, multiple >= 1.
inline std::optional<std::int64_t> round_up(std::int64_t value, std::int64_t multiple) {
  const std::int64_t rest = value % multiple;
  if (rest == 0) return value;
  if (value > std::numeric_limits<std::int64_t>::max() - (multiple - rest)) return std::nullopt;
  return value + (multiple - rest);
}

}  // namespace lmhead::packing
