// Host-side utilities shared by the CUDA backends: device properties, error mapping, carving the
// caller's workspace, tensor maps. Nothing here allocates device memory or synchronises.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "core/implementation.h"

namespace lmhead::cuda {

/// kOutOfMemory for an allocation failure, kInternal for everything else; `what` names the step.
Status to_status(cudaError_t error, const char* what);
/// Launch errors of the kernels started so far on this thread (configuration errors, not faults).
inline Status last_launch(const char* what) { return to_status(cudaGetLastError(), what); }

struct DeviceProperties {
  int ordinal = 0;
  int major = 0, minor = 0;
  int multiprocessors = 0;
  std::string name;
};
/// Properties of the thread's current device, read once per device. kUnsupported without a device
/// or driver, with the reason.
Result<const DeviceProperties*> current_device();

/// The stream of a call.
inline cudaStream_t stream_of(const Execution& e) { return static_cast<cudaStream_t>(e.stream); }
/// Argument checks that only the GPU needs: the workspace's alignment, and that no plain host pointer
/// is passed as device memory.
Status check_device_pointers(const ResolvedProblem& r, const Execution& e);

inline constexpr std::size_t kWorkspaceAlignment = 256;
inline constexpr std::size_t kDefaultBudget = std::size_t{512} << 20;
inline std::size_t budget_of(const Execution& e) {
  return e.workspace_budget != 0 ? e.workspace_budget : kDefaultBudget;
}

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }

/// Cuts a workspace into aligned pieces. With a null base it only measures, so that the query and the
/// call run the same code.
class Workspace {
 public:
  explicit Workspace(void* base = nullptr) : base_(static_cast<std::byte*>(base)) {}
  /// `count` elements of T, 256-byte aligned; nullptr for count 0 and when measuring.
  template <class T>
  T* take(std::int64_t count) {
    const std::size_t begin = used_;
    used_ += static_cast<std::size_t>(
        round_up(count * static_cast<std::int64_t>(sizeof(T)), static_cast<std::int64_t>(kWorkspaceAlignment)));
    return base_ == nullptr || count == 0 ? nullptr : reinterpret_cast<T*>(base_ + begin);
  }
  void* take_bytes(std::int64_t bytes) { return take<std::byte>(bytes); }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// Map of a row-major 2-D tensor [rows, cols] of 16-bit elements for the tensor memory accelerator;
/// boxes of box_rows x box_cols, 128-byte swizzle, out-of-bounds elements read as zero.
/// row_stride * 2 must be a multiple of 16 bytes and data 16-byte aligned.
/// Uses the driver's entry point through the runtime, so nothing links to libcuda.
Status encode_tensor_map(CUtensorMap* map, const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                         std::int64_t row_stride, std::uint32_t box_rows, std::uint32_t box_cols);

/// Blocks for a grid-stride loop over `items` at `per_block` a block: enough to fill the device, never
/// beyond the grid limit.
unsigned grid_for(std::int64_t items, std::int64_t per_block);

}  // namespace lmhead::cuda
