// Checks and choice of the selected-id calls.
#include <string>

#include "core/element.h"
#include "core/support.h"
#include "core/validate.h"

namespace lmhead {
namespace {

std::string str(std::int64_t v) { return std::to_string(v); }

Result<ResolvedSupport> resolve(const SelectedProblem& p, const Execution& execution) {
  Result<ResolvedProblem> head = validate(p.head, execution);
  if (!head.ok()) return head.status();
  if (p.ids.dtype != DType::kInt32 && p.ids.dtype != DType::kInt64)
    return Status(StatusCode::kTypeMismatch,
                  std::string("ids: expected int32 or int64, got ") + to_string(p.ids.dtype));
  LMHEAD_RETURN_IF_ERROR(check_ids("ids", p.ids, head->n));
  return ResolvedSupport{*head, p.ids, p.ids.cols, "ids"};
}

ConstMatrix as_const(const Matrix& m) { return {m.data, m.rows, m.cols, m.row_stride, m.dtype}; }

}  // namespace

Status validate_rows_matrix(const char* name, const ConstMatrix& m, std::int64_t rows, std::int64_t k, DType dtype) {
  const std::string argument(name);
  if (m.rows != rows || m.cols != k)
    return {StatusCode::kInvalidArgument, argument + ": expected [" + str(rows) + ", " + str(k) + "], got [" +
                                              str(m.rows) + ", " + str(m.cols) + "]"};
  if (m.dtype != dtype)
    return {StatusCode::kTypeMismatch, argument + ": expected " + to_string(dtype) + ", got " + to_string(m.dtype)};
  if (m.rows > 1 && m.row_stride < m.cols)
    return {StatusCode::kInvalidArgument,
            argument + ": expected row stride >= " + str(m.cols) + ", got " + str(m.row_stride)};
  if (m.data == nullptr && m.rows > 0 && m.cols > 0)
    return {StatusCode::kInvalidArgument, argument + ": expected data, got a null pointer"};
  return {};
}

Result<WorkspaceSize> selected_workspace_size(const SelectedProblem& given, const Execution& execution) {
  Result<ResolvedSupport> r = resolve(given, execution);
  if (!r.ok()) return r.status();
  Result<const SupportImplementation*> implementation = choose_support(execution);
  if (!implementation.ok()) return implementation.status();
  return (*implementation)->workspace_size(*r, Operation::kForwardPartial, {}, execution);
}

Status selected_logits(const SelectedProblem& given, const Matrix& logits, const Execution& execution) {
  Result<ResolvedSupport> r = resolve(given, execution);
  if (!r.ok()) return r.status();
  LMHEAD_RETURN_IF_ERROR(validate_rows_matrix("logits", as_const(logits), r->head.n, r->k, r->head.result));
  Result<const SupportImplementation*> implementation = choose_support(execution);
  if (!implementation.ok()) return implementation.status();
  Result<WorkspaceSize> needed = (*implementation)->workspace_size(*r, Operation::kForwardPartial, {}, execution);
  if (!needed.ok()) return needed.status();
  LMHEAD_RETURN_IF_ERROR(validate_workspace(execution, *needed, execution.device == Device::kCpu));
  if (r->head.check) LMHEAD_RETURN_IF_ERROR((*implementation)->check_values(*r, execution));
  return (*implementation)->selected_logits(*r, logits, execution);
}

Status selected_combine(const SelectedProblem& given, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const Matrix& selected, const Execution& execution) {
  Result<ResolvedSupport> r = resolve(given, execution);
  if (!r.ok()) return r.status();
  const std::int64_t n = r->head.n, shards = n > 0 ? std::max<std::int64_t>(1, logits.rows / n) : 1;
  LMHEAD_RETURN_IF_ERROR(
      validate_rows_matrix("logits", logits, n > 0 ? shards * n : logits.rows, r->k, r->head.result));
  LMHEAD_RETURN_IF_ERROR(validate_rows_matrix("selected", as_const(selected), n, r->k, r->head.result));
  for (const auto& [name, v] : {std::pair{"lse", lse}, std::pair{"logprob", logprob}}) {
    if (v.size != n || (v.data == nullptr && n > 0))
      return {StatusCode::kInvalidArgument,
              std::string(name) + ": expected [" + str(n) + "], got [" + str(v.size) + "]"};
    if (v.dtype != r->head.result)
      return {StatusCode::kTypeMismatch,
              std::string(name) + ": expected " + to_string(r->head.result) + ", got " + to_string(v.dtype)};
  }
  Result<const SupportImplementation*> implementation = choose_support(execution);
  if (!implementation.ok()) return implementation.status();
  return (*implementation)->selected_combine(*r, logits, lse, logprob, selected, execution);
}

}  // namespace lmhead
