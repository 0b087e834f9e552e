// The ordered list of implementations, and the public calls on top of it.
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/return_if_error.h"

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

Status keeps_cache(const Implementation& implementation, std::size_t bytes) {
  if (implementation.cache_size != nullptr) return {};
  return {StatusCode::kUnsupported, std::string("cache_bytes: expected 0 on backend ") + implementation.name +
                                        ", which keeps nothing for the backward, got " + std::to_string(bytes)};
}

/// The caller's cache is one that this backend can fill or read.
Status check_cache(const ResolvedProblem& problem, const Implementation& implementation, const Execution& execution) {
  LMHEAD_RETURN_IF_ERROR(keeps_cache(implementation, execution.cache_bytes));
  if (problem.given.inference_only)
    return {StatusCode::kInvalidArgument,
            "cache_bytes: expected 0 with inference_only, got " + std::to_string(execution.cache_bytes)};
  return validate_cache(execution);
}

Status check_workspace(const Call& call, Operation operation, const BackwardOutputs& gradients,
                       const Execution& execution) {
  Result<WorkspaceSize> needed = call.implementation->workspace_size(call.problem, operation, gradients, execution);
  if (!needed.ok()) return needed.status();
  return validate_workspace(execution, *needed, execution.device == Device::kCpu);
}

}  // namespace

Status Call::check_values(const Execution& execution) const {
  return problem.check ? implementation->check_values(problem, execution) : Status();
}

Status Call::finished(Status status) const {
  if (status.ok()) last_backend_name = implementation->name;
  return status;
}

Result<Call> plan_call(const Problem& given, const Execution& execution, Operation operation) {
  Result<ResolvedProblem> problem = validate(given, execution);
  if (!problem.ok()) return problem.status();
  Result<const Implementation*> implementation = choose(*problem, execution);
  if (!implementation.ok()) return implementation.status();
  if (execution.cache_bytes > 0) LMHEAD_RETURN_IF_ERROR(check_cache(*problem, **implementation, execution));
  Result<const Configuration*> configuration = choose_configuration(**implementation, *problem, operation, execution);
  if (!configuration.ok()) return configuration.status();
  problem->configuration = *configuration;
  return Call{*problem, *implementation};
}

Result<std::size_t> cache_size(const Problem& problem, std::size_t budget, const Execution& execution) {
  return guarded("cache_size", [&]() -> Result<std::size_t> {
    Result<Call> call = plan_call(problem, execution, Operation::kForward);
    if (!call.ok()) return call.status();
    if (budget == 0) return std::size_t{0};
    LMHEAD_RETURN_IF_ERROR(keeps_cache(*call->implementation, budget));
    return call->implementation->cache_size(call->problem, budget);
  });
}

std::span<const Implementation* const> implementations() {
  static const Implementation* const kList[] = {
#if LMHEAD_HAS_CUDA
    &kSm90Cuda,
    &kPortableCuda,
#endif
    &kBlockedCpu,
    &kReferenceCpu,
  };
  return kList;
}

Result<WorkspaceSize> workspace_size(const Problem& problem, Operation operation, const BackwardOutputs& gradients,
                                     const Execution& execution) {
  return guarded("workspace_size", [&]() -> Result<WorkspaceSize> {
    Result<Call> call = plan_call(problem, execution, operation);
    if (!call.ok()) return call.status();
    return call->implementation->workspace_size(call->problem, operation, gradients, execution);
  });
}

Status forward_partial(const Problem& problem, const Matrix& state, const Execution& execution) {
  return guarded("forward_partial", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kForwardPartial);
    if (!call.ok()) return call.status();
    LMHEAD_RETURN_IF_ERROR(validate_state(call->problem, state));
    LMHEAD_RETURN_IF_ERROR(check_workspace(*call, Operation::kForwardPartial, {}, execution));
    LMHEAD_RETURN_IF_ERROR(call->check_values(execution));
    return call->finished(call->implementation->forward_partial(call->problem, state, execution));
  });
}

Status combine(const Problem& problem, const ConstMatrix& states, const ForwardOutputs& outputs,
               const Execution& execution) {
  return guarded("combine", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kForwardPartial);
    if (!call.ok()) return call.status();
    LMHEAD_RETURN_IF_ERROR(validate_combine(call->problem, states, outputs));
    return call->finished(call->implementation->combine(call->problem, states, outputs, execution));
  });
}

Status forward(const Problem& problem, const ForwardOutputs& outputs, const Execution& execution) {
  return guarded("forward", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kForward);
    if (!call.ok()) return call.status();
    const ResolvedProblem& r = call->problem;
    if (r.v_local != r.vocab_size)
      return Status(StatusCode::kInvalidArgument, "weight: expected the whole vocabulary [" +
                                                      std::to_string(r.vocab_size) +
                                                      ", H] (use forward_partial and combine for a shard), got [" +
                                                      std::to_string(r.v_local) + ", H]");
    LMHEAD_RETURN_IF_ERROR(validate_outputs(r, outputs));
    LMHEAD_RETURN_IF_ERROR(check_workspace(*call, Operation::kForward, {}, execution));
    LMHEAD_RETURN_IF_ERROR(call->check_values(execution));
    return call->finished(call->implementation->forward(r, outputs, execution));
  });
}

Status backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                const Execution& execution) {
  return guarded("backward", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kBackward);
    if (!call.ok()) return call.status();
    LMHEAD_RETURN_IF_ERROR(validate_backward(call->problem, inputs, outputs));
    LMHEAD_RETURN_IF_ERROR(check_workspace(*call, Operation::kBackward, outputs, execution));
    LMHEAD_RETURN_IF_ERROR(call->check_values(execution));
    return call->finished(call->implementation->backward(call->problem, inputs, outputs, execution));
  });
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
