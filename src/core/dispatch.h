// The checks and the choice of a backend, for code that runs several steps of one call (src/dist).
#pragma once

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

/// validate() and the choice of a backend. Reads no tensor value.
Result<Call> plan_call(const Problem& problem, const Execution& execution);

}  // namespace lmhead
