// Checks and choice of the candidate-set calls.
#include "core/support.h"

#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/element.h"
#include "core/return_if_error.h"

namespace lmhead {
namespace {

std::string str(std::int64_t v) { return std::to_string(v); }

Result<ResolvedSupport> resolve(const SupportProblem& p, const Execution& execution) {
  Result<ResolvedProblem> head = validate(p.head, execution);
  if (!head.ok()) return head.status();
  const ConstMatrix& ids = p.support_ids;
  LMHEAD_RETURN_IF_ERROR(validate_ids("support_ids", ids, head->n, false));
  if (p.head.out_of_vocab != OutOfVocab::kError)
    return Status(StatusCode::kInvalidArgument,
                  "out_of_vocab: expected \"error\" with candidate sets, got \"zero\": a sampled id is always scored");
  return ResolvedSupport{*head, ids, ids.cols, "support_ids"};
}

Status check_outputs(const ResolvedSupport& r, const SupportOutputs& out) {
  LMHEAD_RETURN_IF_ERROR(validate_outputs(r.head, {out.logprob, out.entropy, out.lse}));
  return validate_output("valid", out.valid, r.head.n, DType::kBool);
}

/// The whole path of every call: resolve, choose, own checks, workspace, values, run.
template <class Check, class Run>
Status call(const char* name, const SupportProblem& given, const Execution& execution, bool read_values,
            const Operation* operation, const BackwardOutputs& gradients, Check&& check, Run&& run) {
  return guarded(name, [&]() -> Status {
    Result<ResolvedSupport> r = resolve(given, execution);
    if (!r.ok()) return r.status();
    LMHEAD_RETURN_IF_ERROR(check(*r));
    Result<const SupportImplementation*> implementation = choose_support(execution);
    if (!implementation.ok()) return implementation.status();
    if (operation != nullptr) {
      Result<WorkspaceSize> needed = (*implementation)->workspace_size(*r, *operation, gradients, execution);
      if (!needed.ok()) return needed.status();
      LMHEAD_RETURN_IF_ERROR(validate_workspace(execution, *needed, execution.device == Device::kCpu));
    }
    if (read_values && r->head.check) LMHEAD_RETURN_IF_ERROR((*implementation)->check_values(*r, execution));
    return run(**implementation, *r);
  });
}

constexpr Operation kPartial = Operation::kForwardPartial, kWhole = Operation::kForward,
                    kGradient = Operation::kBackward;

}  // namespace

Result<const SupportImplementation*> choose_support(const Execution& execution) {
  static const SupportImplementation* const kList[] = {
#if LMHEAD_HAS_CUDA
    &kSupportCuda,
#endif
    &kSupportCpu,
  };
  const std::string wanted = execution.backend != nullptr ? execution.backend : "auto";
  std::string names;
  for (const SupportImplementation* candidate : kList) {
    names += std::string(names.empty() ? "" : ", ") + candidate->name;
    if (candidate->device != execution.device || (wanted != "auto" && wanted != candidate->name)) continue;
    LMHEAD_RETURN_IF_ERROR(candidate->available());
    return candidate;
  }
  return Status(StatusCode::kInvalidArgument,
                "backend: candidate sets expected auto or one of " + names + " for tensors on " +
                    (execution.device == Device::kCpu ? "the CPU" : "a CUDA device") + ", got " + wanted);
}

Status bad_support_id(const ResolvedSupport& r, std::int64_t id, std::int64_t row, std::int64_t column) {
  return {StatusCode::kInvalidArgument, std::string(r.ids_name) + ": expected ids in [0, " + str(r.head.valid_vocab) +
                                            ") or -1 as padding, got " + str(id) + " at row " + str(row) + ", column " +
                                            str(column)};
}

Status check_host_support_values(const ResolvedSupport& r) {
  LMHEAD_RETURN_IF_ERROR(check_host_values(r.head));
  const Problem& p = r.head.given;
  for (std::int64_t i = 0; i < r.head.n; ++i) {
    if ((!p.active.absent() && load_int(p.active, i) <= 0) || load_int(p.targets, i) == p.ignore_index) continue;
    for (std::int64_t k = 0; k < r.k; ++k) {
      const std::int64_t id = load_int(r.ids.data, r.ids.dtype, i * r.ids.row_stride + k);
      if (id < -1 || id >= r.head.valid_vocab) return bad_support_id(r, id, i, k);
    }
  }
  return {};
}

Result<WorkspaceSize> support_workspace_size(const SupportProblem& given, Operation operation,
                                             const BackwardOutputs& gradients, const Execution& execution) {
  return guarded("support_workspace_size", [&]() -> Result<WorkspaceSize> {
    Result<ResolvedSupport> r = resolve(given, execution);
    if (!r.ok()) return r.status();
    Result<const SupportImplementation*> implementation = choose_support(execution);
    if (!implementation.ok()) return implementation.status();
    return (*implementation)->workspace_size(*r, operation, gradients, execution);
  });
}

Status support_forward_partial(const SupportProblem& given, const Matrix& state, const Execution& execution) {
  return call(
      "support_forward_partial", given, execution, true, &kPartial, {},
      [&](const ResolvedSupport& r) { return validate_state(r.head, state); },
      [&](const SupportImplementation& i, const ResolvedSupport& r) { return i.forward_partial(r, state, execution); });
}

Status support_combine(const SupportProblem& given, const ConstMatrix& states, const SupportOutputs& outputs,
                       const Execution& execution) {
  return call(
      "support_combine", given, execution, false, nullptr, {},
      [&](const ResolvedSupport& r) {
        LMHEAD_RETURN_IF_ERROR(validate_combine(r.head, states, {}));
        return check_outputs(r, outputs);
      },
      [&](const SupportImplementation& i, const ResolvedSupport& r) {
        return i.combine(r, states, outputs, execution);
      });
}

Status support_forward(const SupportProblem& given, const SupportOutputs& outputs, const Execution& execution) {
  return call(
      "support_forward", given, execution, true, &kWhole, {},
      [&](const ResolvedSupport& r) {
        if (r.head.v_local != r.head.vocab_size)
          return Status(StatusCode::kInvalidArgument,
                        "weight: expected the whole vocabulary [" + str(r.head.vocab_size) +
                            ", H] (use support_forward_partial and support_combine for a shard), got [" +
                            str(r.head.v_local) + ", H]");
        return check_outputs(r, outputs);
      },
      [&](const SupportImplementation& i, const ResolvedSupport& r) {
        // States: 16 bytes a row, from the workspace or (CPU only) the heap.
        const std::size_t bytes = static_cast<std::size_t>(r.head.n * kStateWidth) * size_of(r.head.result);
        std::vector<std::byte> own(execution.workspace == nullptr ? bytes : 0);
        Matrix state{execution.workspace == nullptr ? own.data() : execution.workspace, r.head.n, kStateWidth,
                     kStateWidth, r.head.result};
        LMHEAD_RETURN_IF_ERROR(i.forward_partial(r, state, execution));
        return i.combine(r, {state.data, state.rows, state.cols, state.row_stride, state.dtype}, outputs, execution);
      });
}

Status support_backward(const SupportProblem& given, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                        const Execution& execution) {
  return call(
      "support_backward", given, execution, true, &kGradient, outputs,
      [&](const ResolvedSupport& r) { return validate_backward(r.head, inputs, outputs); },
      [&](const SupportImplementation& i, const ResolvedSupport& r) {
        return i.backward(r, inputs, outputs, execution);
      });
}

}  // namespace lmhead
