// Checks and choice of the selected-id calls.
#include <algorithm>

#include "core/dispatch.h"
#include "core/return_if_error.h"
#include "core/support.h"

namespace lmhead {
namespace {

Result<ResolvedSupport> resolve(const SelectedProblem& p, const Execution& execution) {
  Result<ResolvedProblem> head = validate(p.head, execution);
  if (!head.ok()) return head.status();
  LMHEAD_RETURN_IF_ERROR(validate_ids("ids", p.ids, head->n, true));
  return ResolvedSupport{*head, p.ids, p.ids.cols, "ids"};
}

}  // namespace

Result<WorkspaceSize> selected_workspace_size(const SelectedProblem& given, const Execution& execution) {
  return guarded("selected_workspace_size", [&]() -> Result<WorkspaceSize> {
    Result<ResolvedSupport> r = resolve(given, execution);
    if (!r.ok()) return r.status();
    Result<const SupportImplementation*> implementation = choose_support(execution);
    if (!implementation.ok()) return implementation.status();
    return (*implementation)->workspace_size(*r, Operation::kForwardPartial, {}, execution);
  });
}

Status selected_logits(const SelectedProblem& given, const Matrix& logits, const Execution& execution) {
  return guarded("selected_logits", [&]() -> Status {
    Result<ResolvedSupport> r = resolve(given, execution);
    if (!r.ok()) return r.status();
    LMHEAD_RETURN_IF_ERROR(validate_matrix("logits", as_const(logits), r->head.n, r->k, r->head.result));
    Result<const SupportImplementation*> implementation = choose_support(execution);
    if (!implementation.ok()) return implementation.status();
    Result<WorkspaceSize> needed = (*implementation)->workspace_size(*r, Operation::kForwardPartial, {}, execution);
    if (!needed.ok()) return needed.status();
    LMHEAD_RETURN_IF_ERROR(validate_workspace(execution, *needed, execution.device == Device::kCpu));
    if (r->head.check) LMHEAD_RETURN_IF_ERROR((*implementation)->check_values(*r, execution));
    return (*implementation)->selected_logits(*r, logits, execution);
  });
}

Status selected_combine(const SelectedProblem& given, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const Matrix& selected, const Execution& execution) {
  return guarded("selected_combine", [&]() -> Status {
    Result<ResolvedSupport> r = resolve(given, execution);
    if (!r.ok()) return r.status();
    const std::int64_t n = r->head.n, shards = n > 0 ? std::max<std::int64_t>(1, logits.rows / n) : 1;
    LMHEAD_RETURN_IF_ERROR(validate_matrix("logits", logits, n > 0 ? shards * n : logits.rows, r->k, r->head.result));
    LMHEAD_RETURN_IF_ERROR(validate_matrix("selected", as_const(selected), n, r->k, r->head.result));
    LMHEAD_RETURN_IF_ERROR(validate_vector("lse", lse, n, r->head.result));
    LMHEAD_RETURN_IF_ERROR(validate_vector("logprob", logprob, n, r->head.result));
    Result<const SupportImplementation*> implementation = choose_support(execution);
    if (!implementation.ok()) return implementation.status();
    return (*implementation)->selected_combine(*r, logits, lse, logprob, selected, execution);
  });
}

}  // namespace lmhead
