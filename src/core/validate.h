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
/// On the CPU, its address alone; null is fine.
Status validate_workspace_address(const Execution& execution);
/// The caller's cache of more than 0 bytes.
Status validate_cache(const Execution& execution);

inline ConstMatrix as_const(const Matrix& m) { return {m.data, m.rows, m.cols, m.row_stride, m.dtype}; }

// Single operands, for calls that have more than a problem's. Memory: a pointer where there are elements, aligned to
// them, and strides that keep every address within 64 bits.

/// Sizes and memory.
Status validate_matrix(const char* name, const ConstMatrix& m);
/// These and shape and dtype.
Status validate_matrix(const char* name, const ConstMatrix& m, std::int64_t rows, std::int64_t cols, DType dtype);
/// [N, K] int32 (or int64) ids.
Status validate_ids(const char* name, const ConstMatrix& ids, std::int64_t n, bool int64_too);
Status validate_vector(const char* name, const ConstVector& v, std::int64_t size);
Status validate_vector(const char* name, const ConstVector& v, std::int64_t size, DType dtype);
/// An output that may be absent.
Status validate_output(const char* name, const Vector& v, std::int64_t size, DType dtype);

}  // namespace lmhead
