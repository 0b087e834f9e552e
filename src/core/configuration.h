// How a backend's compiled configurations reach a call.
#pragma once

#include <cstdint>
#include <span>

#include "core/tuning_cache.h"

namespace lmhead {

struct Implementation;
struct ResolvedProblem;

/// One way to run an operation: a number that its backend gives a meaning. Bits of results do not depend on it.
struct Configuration {
  const char* name;
  std::int64_t value;
};

/// The configuration that the caller named, or the tuned one, or the default; nullptr where the backend has none.
Result<const Configuration*> choose_configuration(const Implementation& implementation, const ResolvedProblem& problem,
                                                  Operation operation, const Execution& execution);

/// The key of a problem's choice.
TuningKey tuning_key(const ResolvedProblem& problem, Operation operation);

/// Makes a choice known to this process's later calls.
void adopt_tuning(const TuningSource& source, const TuningTable& table);

}  // namespace lmhead
