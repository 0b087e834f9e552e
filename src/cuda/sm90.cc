// The sm90 backend (H100, H200): which problems it takes, and its entry among the implementations.
// The road from here to the instructions: docs/kernels.md.
//
// One stream, no allocation, no synchronisation. How many rows are active is known to the device alone:
// every kernel is queued for the most there can be, reads the count, and returns at once without work.
#include <string>

#include "core/return_if_error.h"
#include "core/tune_device.h"
#include "cuda/launch.h"
#include "cuda/rows.h"
#include "cuda/sm90_cache.h"
#include "cuda/sm90_plan.h"

namespace lmhead::cuda::sm90 {
namespace {

constexpr std::int64_t kLimit = (std::int64_t{1} << 31) - 2 * kTileColumns;

Status unsupported(const std::string& why) { return {StatusCode::kUnsupported, why}; }

/// Configurations differ in the order in which tiles are dealt, which no result depends on: how many row blocks
/// share weight tiles in L2, in per cent of the default.
constexpr Configuration kConfigurations[] = {
    {kDefaultConfiguration, 100}, {"l2_half", 50}, {"l2_double", 200}, {"l2_quadruple", 400}};

Status check_tensor(const char* name, const ConstMatrix& m) {
  if (m.rows == 0) return {};
  if (reinterpret_cast<std::uintptr_t>(m.data) % 16 != 0)
    return unsupported(std::string(name) + ": expected a 16-byte aligned address");
  if (m.rows > 1 && m.row_stride % 8 != 0)
    return unsupported(std::string(name) + ": expected a row stride that is a multiple of 8 (16 bytes), got " +
                       std::to_string(m.row_stride));
  return {};
}

Status available() {
  Result<const DeviceProperties*> device = current_device();
  if (!device.ok()) return device.status();
  if ((*device)->major != 9)
    return unsupported("expected a Hopper GPU (compute capability 9.0), got " + (*device)->name + " (" +
                       std::to_string((*device)->major) + "." + std::to_string((*device)->minor) + ")");
  return {};
}

std::string describe() {
  Result<const DeviceProperties*> device = current_device();
  return (*device)->name + ", " + std::to_string((*device)->multiprocessors) + " multiprocessors, wgmma and TMA";
}

Status supports(const ResolvedProblem& r, const Execution&) {
  const Problem& p = r.given;
  if (r.compute != DType::kBFloat16 && r.compute != DType::kFloat16)
    return unsupported(std::string("expected bfloat16 or float16 products, got ") + to_string(r.compute));
  if (p.hidden.dtype != r.compute || p.weight.dtype != r.compute)
    return unsupported(std::string("expected hidden and weight both ") + to_string(r.compute) + ", got " +
                       to_string(p.hidden.dtype) + " and " + to_string(p.weight.dtype));
  if (r.h % 8 != 0) return unsupported("expected H that is a multiple of 8 (16 bytes), got " + std::to_string(r.h));
  if (r.n > kLimit || r.vocab_size > kLimit || r.h > kLimit)
    return unsupported("expected N, H and the vocabulary below 2^31");
  LMHEAD_RETURN_IF_ERROR(check_tensor("hidden", p.hidden));
  return check_tensor("weight", p.weight);
}

Result<WorkspaceSize> workspace_size(const ResolvedProblem& r, Operation operation, const BackwardOutputs& out,
                                     const Execution& e) {
  if (r.n == 0) return WorkspaceSize{};
  if (operation == Operation::kBackward) return backward_workspace(r, out, e);
  Result<std::size_t> bytes = forward_workspace(r, e);
  if (!bytes.ok()) return bytes.status();
  return WorkspaceSize{*bytes, 0};
}

std::size_t cache_size(const ResolvedProblem& r, std::size_t budget) {
  return CacheLayout::make(r, nullptr, budget).bytes;
}

}  // namespace
}  // namespace lmhead::cuda::sm90

namespace lmhead {

const Implementation kSm90Cuda = {
    .name = "sm90",
    .device = Device::kCuda,
    .available = cuda::sm90::available,
    .describe = cuda::sm90::describe,
    .supports = cuda::sm90::supports,
    .workspace_size = cuda::sm90::workspace_size,
    .check_values = cuda::check_values,
    .forward_partial =
        [](const ResolvedProblem& r, const Matrix& state, const Execution& e) {
          return cuda::sm90::run_forward(r, {}, static_cast<SoftmaxState*>(state.data), e);
        },
    .combine = cuda::combine,
    .forward = [](const ResolvedProblem& r, const ForwardOutputs& o,
                  const Execution& e) { return cuda::sm90::run_forward(r, o, nullptr, e); },
    .backward = cuda::sm90::run_backward,
    .cache_size = cuda::sm90::cache_size,
    .configurations = [](Operation) { return std::span<const Configuration>(cuda::sm90::kConfigurations); },
    .tuning_source = [] { return cuda::tuning_source("sm90"); },
};

}  // namespace lmhead
