// Every check of the public calls, and every message, once.
#pragma once

#include "core/implementation.h"

namespace lmhead {

/// Shapes, dtypes, options of a problem; no tensor value is read.
Result<ResolvedProblem> validate(const Problem& problem, const Execution& execution);
/// Checked mode on host memory: targets in range, temperatures > 0 that have a finite reciprocal.
Status check_host_values(const ResolvedProblem& problem);
/// The errors of checked mode, for backends that find the row themselves.
Status bad_target_id(const ResolvedProblem& problem, std::int64_t id, std::int64_t row);
Status bad_temperature(double value, std::int64_t row);
Status validate_state(const ResolvedProblem& problem, const Matrix& state);
Status validate_combine(const ResolvedProblem& problem, const ConstMatrix& states, const ForwardOutputs& outputs);
Status validate_outputs(const ResolvedProblem& problem, const ForwardOutputs& outputs);
Status validate_backward(const ResolvedProblem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs);
/// The caller's workspace against what the call needs. nullptr is fine where `may_allocate`.
Status validate_workspace(const Execution& execution, const WorkspaceSize& needed, bool may_allocate);
/// The caller's cache of more than 0 bytes.
Status validate_cache(const Execution& execution);

/// Shape, dtype and memory of an [N, K] operand.
Status validate_rows_matrix(const char* name, const ConstMatrix& m, std::int64_t rows, std::int64_t k, DType dtype);

}  // namespace lmhead
