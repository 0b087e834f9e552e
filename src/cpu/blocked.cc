// The "cpu" backend: tiles of logits that stay in a core's L2 cache between the product that makes them
// and the one pass that folds or differentiates them.
#include "cpu/blocked.h"

#include "core/tune_device.h"
#include "core/validate.h"

namespace lmhead {
namespace {

std::string describe() {
  const GemmLibrary& bf16 = gemm_library(DType::kBFloat16);
  std::string text =
      std::string("softmax pass ") + tile_kernels().name + "; bf16 GEMM: " + bf16.describe(DType::kBFloat16);
  const GemmLibrary& fp32 = gemm_library(DType::kFloat32);
  if (&fp32 != &bf16) text += "; fp32 and fp16 GEMM: " + fp32.describe(DType::kFloat32);
  return text;
}

Result<const TuningSource*> tuning_source() {
  static const TuningSource kSource{"cpu", host_model() + ", " + std::to_string(thread_count(0)) + " threads", "none",
                                    describe(), version()};
  return &kSource;
}

Status supports(const ResolvedProblem& r, const Execution&) {
  if (r.result != DType::kFloat64) return {};
  return {StatusCode::kUnsupported, "dtype: expected float32, bfloat16 or float16, got float64 (backend reference)"};
}

Result<WorkspaceSize> workspace_size(const ResolvedProblem& r, Operation operation, const BackwardOutputs& out,
                                     const Execution& e) {
  return operation == Operation::kBackward ? blocked_backward_workspace(r, out, e) : blocked_forward_workspace(r, e);
}

}  // namespace

const Implementation kBlockedCpu = {
    .name = "cpu",
    .device = Device::kCpu,
    .available = [] { return Status(); },
    .describe = describe,
    .supports = supports,
    .workspace_size = workspace_size,
    .check_values = [](const ResolvedProblem& r, const Execution&) { return check_host_values(r); },
    .forward_partial = blocked_forward_partial,
    .combine = combine_host,
    .forward = blocked_forward,
    .backward = blocked_backward,
    .configurations = blocked_configurations,
    .tuning_source = tuning_source,
};

}  // namespace lmhead
