// The ordered list of implementations, and the public calls on top of it.
#include <cstring>
#include <string>
#include <vector>

#include "core/validate.h"

namespace lmhead {
namespace {

thread_local const char* last_backend_name = "";

/// First implementation in the list that the caller allows and that can run the problem. With an
/// explicit name its own reason is the error; with "auto" the reasons of all are.
Result<const Implementation*> choose(const ResolvedProblem& problem, const Execution& execution) {
  const std::string wanted = execution.backend != nullptr ? execution.backend : "auto";
  std::string reasons, names;
  for (const Implementation* candidate : implementations()) {
    names += std::string(names.empty() ? "" : ", ") + candidate->name;
    if (wanted != "auto" && wanted != candidate->name) continue;
    if (candidate->device != execution.device) {
      if (wanted == "auto") continue;
      return Status(StatusCode::kInvalidArgument,
                    "backend: " + wanted + " expected tensors on " +
                        (candidate->device == Device::kCpu ? "the CPU" : "a CUDA device") + ", got tensors on " +
                        (execution.device == Device::kCpu ? "the CPU" : "a CUDA device"));
    }
    Status status = candidate->available();
    if (status.ok()) status = candidate->supports(problem, execution);
    if (status.ok()) return candidate;
    if (wanted != "auto") return Status(status.code(), "backend: " + wanted + " cannot run this: " + status.message());
    reasons += std::string(reasons.empty() ? "" : "; ") + candidate->name + ": " + status.message();
  }
  if (wanted != "auto")
    return Status(reasons.empty() ? StatusCode::kInvalidArgument : StatusCode::kUnsupported,
                  "backend: expected auto, " + names + ", got " + wanted);
  return Status(StatusCode::kUnsupported,
                reasons.empty()
                    ? std::string("backend: this build has none for ") +
                          (execution.device == Device::kCuda ? "CUDA tensors (built without CUDA)" : "CPU tensors")
                    : "backend: none can run this: " + reasons);
}

Status finished(const Implementation* implementation, Status status) {
  if (status.ok()) last_backend_name = implementation->name;
  return status;
}

Status check_workspace(const Implementation* implementation, const ResolvedProblem& problem, Operation operation,
                       const BackwardOutputs& gradients, const Execution& execution) {
  Result<WorkspaceSize> needed = implementation->workspace_size(problem, operation, gradients, execution);
  if (!needed.ok()) return needed.status();
  return validate_workspace(execution, *needed, execution.device == Device::kCpu);
}

Status check_values(const Implementation* implementation, const ResolvedProblem& problem, const Execution& execution) {
  return problem.check ? implementation->check_values(problem, execution) : Status();
}

}  // namespace

std::span<const Implementation* const> implementations() {
  static const Implementation* const kList[] = {
#if LMHEAD_HAS_CUDA
    &kSm90Cuda,
    &kPortableCuda,
#endif
    // kBlockedCpu
    &kReferenceCpu,
  };
  return kList;
}

Result<WorkspaceSize> workspace_size(const Problem& given, Operation operation, const BackwardOutputs& gradients,
                                     const Execution& execution) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  return (*implementation)->workspace_size(*problem, operation, gradients, execution);
}

Status forward_partial(const Problem& given, const Matrix& state, const Execution& execution) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  LMHEAD_RETURN_IF_ERROR(validate_state(*problem, state));
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  LMHEAD_RETURN_IF_ERROR(check_workspace(*implementation, *problem, Operation::kForwardPartial, {}, execution));
  LMHEAD_RETURN_IF_ERROR(check_values(*implementation, *problem, execution));
  return finished(*implementation, (*implementation)->forward_partial(*problem, state, execution));
}

Status combine(const Problem& given, const ConstMatrix& states, const ForwardOutputs& outputs,
               const Execution& execution) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  LMHEAD_RETURN_IF_ERROR(validate_combine(*problem, states, outputs));
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  return finished(*implementation, (*implementation)->combine(*problem, states, outputs, execution));
}

Status forward(const Problem& given, const ForwardOutputs& outputs, const Execution& execution) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  if (problem->v_local != problem->vocab_size)
    return Status(StatusCode::kInvalidArgument, "weight: expected the whole vocabulary [" +
                                                    std::to_string(problem->vocab_size) +
                                                    ", H] (use forward_partial and combine for a shard), got [" +
                                                    std::to_string(problem->v_local) + ", H]");
  LMHEAD_RETURN_IF_ERROR(validate_outputs(*problem, outputs));
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  LMHEAD_RETURN_IF_ERROR(check_workspace(*implementation, *problem, Operation::kForward, {}, execution));
  LMHEAD_RETURN_IF_ERROR(check_values(*implementation, *problem, execution));
  return finished(*implementation, (*implementation)->forward(*problem, outputs, execution));
}

Status backward(const Problem& given, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                const Execution& execution) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  LMHEAD_RETURN_IF_ERROR(validate_backward(*problem, inputs, outputs));
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  LMHEAD_RETURN_IF_ERROR(check_workspace(*implementation, *problem, Operation::kBackward, outputs, execution));
  LMHEAD_RETURN_IF_ERROR(check_values(*implementation, *problem, execution));
  return finished(*implementation, (*implementation)->backward(*problem, inputs, outputs, execution));
}

std::span<const BackendInfo> backends() {
  static const std::vector<BackendInfo> kInfos = [] {
    std::vector<BackendInfo> infos;
    for (const Implementation* i : implementations()) {
      const Status status = i->available();
      infos.push_back({i->name, i->device, status.ok(), status.ok() ? i->describe() : status.message()});
    }
    return infos;
  }();
  return kInfos;
}

const char* last_backend() { return last_backend_name; }

const char* version() { return LMHEAD_VERSION; }

}  // namespace lmhead
