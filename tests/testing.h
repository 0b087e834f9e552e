// What the test programs share: one gtest parameter a backend, and the list of what each must run.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "testing/check.h"

namespace lmhead {
/// gtest prints parameters by this.
inline void PrintTo(const BackendInfo& backend, std::ostream* out) { *out << backend.name; }
}  // namespace lmhead

namespace lmhead::testing {

/// Backends that this machine can run.
inline std::vector<BackendInfo> available_backends() {
  std::vector<BackendInfo> available;
  for (const BackendInfo& backend : backends())
    if (backend.available) available.push_back(backend);
  return available;
}

/// A backend that is not in this list may answer kUnsupported; the others must run.
inline bool must_run(const BackendInfo& backend, const TestProblem& problem) {
  if (backend.name == "reference") return true;
  if (problem.result() == DType::kFloat64) return false;
  if (backend.name == "sm90")  // one 16-bit type, rows of a multiple of 16 bytes
    return problem.compute() != DType::kFloat32 && problem.spec.hidden == problem.compute() &&
           problem.spec.weight == problem.compute() && problem.spec.h % 8 == 0 && problem.spec.pad % 8 == 0;
  return true;
}

/// Bitwise batch invariance is promised by every backend but this one.
inline bool is_batch_invariant(const BackendInfo& backend) { return backend.name != "cuda_portable"; }

class BackendTest : public ::testing::TestWithParam<BackendInfo> {
 protected:
  const BackendInfo& backend() const { return GetParam(); }
  Arena& memory() const { return arena(backend().device); }

  /// Runs; unsupported is a failure unless the backend may refuse this problem.
  Outcome run(const TestProblem& problem, const RunOptions& options = {}) const {
    Outcome outcome = testing::run(backend(), problem, options);
    if (refused(outcome, problem)) return outcome;
    EXPECT_TRUE(outcome.ok()) << outcome.message() << " [" << problem.spec.name() << "]";
    return outcome;
  }
  static bool refused_status(const Status& status) { return status.code() == StatusCode::kUnsupported; }
  bool refused(const Outcome& outcome, const TestProblem& problem) const {
    return refused_status(outcome.status) && !must_run(backend(), problem);
  }
  /// Runs and checks the promise.
  void expect_exact(const TestProblem& problem, const RunOptions& options = {}) const {
    const Outcome outcome = run(problem, options);
    if (!outcome.ok()) return;
    const Report report = check(problem, options, outcome, memory());
    EXPECT_TRUE(report.ok()) << report.failure;
  }
  void expect_exact(const Case& spec, const RunOptions& options = {}) const {
    expect_exact(TestProblem(spec), options);
  }
};

inline std::string backend_name(const ::testing::TestParamInfo<BackendInfo>& info) { return info.param.name; }

#define LMHEAD_TEST_EVERY_BACKEND(suite) \
  INSTANTIATE_TEST_SUITE_P(Backends, suite, ::testing::ValuesIn(testing::available_backends()), testing::backend_name)

}  // namespace lmhead::testing
