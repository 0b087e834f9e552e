// Checks of single command-line values. The message says what was expected and what was got.
#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <string>

namespace lmhead::tools {

/// An integer of 64 bits: CLI11 turns larger ones into the nearest, and negative unsigned ones into huge ones.
inline CLI::Validator integer_that_fits(bool is_unsigned) {
  const auto check = [is_unsigned](const std::string& text) {
    errno = 0;
    static_cast<void>(is_unsigned ? std::strtoull(text.c_str(), nullptr, 0)
                                  : static_cast<unsigned long long>(std::strtoll(text.c_str(), nullptr, 0)));
    if (errno == ERANGE) return "expected an integer within 64 bits, got " + text;
    if (is_unsigned && text.starts_with('-')) return "expected an integer >= 0, got " + text;
    return std::string();
  };
  return {check, ""};
}

/// An integer in [least, most].
inline CLI::Validator integer_from(std::int64_t least, std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
  const auto check = [least, most](const std::string& text) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error == std::errc{} && end == text.data() + text.size() && value >= least && value <= most)
      return std::string();
    return fmt::format("expected an integer in [{}, {}], got {}", least, most, text);
  };
  return {check, least > 0 ? "POSITIVE" : "NONNEGATIVE"};
}
inline CLI::Validator positive_int() { return integer_from(1, std::numeric_limits<int>::max()); }
inline CLI::Validator non_negative_int() { return integer_from(0, std::numeric_limits<int>::max()); }

/// A finite number in [least, most], or in (least, most] with `open`. CLI11's ranges let NaN pass.
inline CLI::Validator number_from(double least, double most, const char* name, bool open = false) {
  const auto check = [=](const std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && (open ? value > least : value >= least) && value <= most)
      return std::string();
    return fmt::format("expected a number in {}{}, {}], got {}", open ? '(' : '[', least, most, text);
  };
  return {check, name};
}

/// A finite number that `allowed` takes; `expected` says which ones those are.
inline CLI::Validator finite_number(const char* expected, bool (*allowed)(double)) {
  const auto check = [=](const std::string& text) {
    double value = 0;
    if (CLI::detail::lexical_cast(text, value) && std::isfinite(value) && allowed(value)) return std::string();
    return fmt::format("expected {}, got {}", expected, text);
  };
  return {check, ""};
}

/// "" would be taken for the option left out, as `--out "$UNSET"` gives it.
inline CLI::Validator not_empty() {
  return {[](const std::string& text) { return std::string(text.empty() ? "expected a value, got nothing" : ""); }, ""};
}

}  // namespace lmhead::tools
