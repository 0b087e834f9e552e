// The checks and the choice of a backend, for code that runs several steps of one call (src/dist).
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "core/validate.h"

namespace lmhead {

/// A checked problem and the backend that will run it.
struct Call {
  ResolvedProblem problem;
  const Implementation* implementation;

  /// In checked mode, reads targets and temperatures; Ok otherwise.
  Status check_values(const Execution& execution) const;
  /// Records the backend for last_backend() when `status` is ok, and returns `status`.
  Status finished(Status status) const;
};

/// validate() and the choice of a backend and its configuration. Reads no tensor value.
Result<Call> plan_call(const Problem& problem, const Execution& execution, Operation operation);

/// Runs the body of a public call. Allocations below may throw; the caller gets a Status instead, and
/// nothing is retried on another path.
template <class Fn>
auto guarded(const char* call, Fn&& fn) -> decltype(fn()) {
  const auto out_of_memory = [call] {
    return Status(StatusCode::kOutOfMemory,
                  std::string("memory: expected enough for ") + call + ", got an allocation that failed");
  };
  try {
    return fn();
  } catch (const std::bad_alloc&) {
    return out_of_memory();
  } catch (const std::length_error&) {
    return out_of_memory();
  } catch (const std::exception& error) {
    return Status(StatusCode::kInternal, std::string(call) + ": " + error.what());
  }
}

}  // namespace lmhead
