#include "cuda/launch.h"

#include "core/return_if_error.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

namespace lmhead::cuda {
namespace {

/// Grid-stride kernels take the rest in further rounds; far below the 2^31 - 1 of gridDim.x.
constexpr std::int64_t kMaxGridBlocks = std::int64_t{1} << 20;
}  // namespace

Status to_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  return {error == cudaErrorMemoryAllocation ? StatusCode::kOutOfMemory : StatusCode::kInternal,
          std::string(what) + ": " + cudaGetErrorString(error)};
}

Result<const DeviceProperties*> current_device() {
  int ordinal = 0;
  if (const cudaError_t error = cudaGetDevice(&ordinal); error != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // not an error of a later launch
    return Status(StatusCode::kUnsupported, std::string("no usable CUDA device (") + cudaGetErrorString(error) + ")");
  }
  static std::mutex mutex;
  static auto* known = new std::map<int, std::unique_ptr<DeviceProperties>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<DeviceProperties>& entry = (*known)[ordinal];
  if (entry == nullptr) {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return Status(StatusCode::kUnsupported, std::string("no usable CUDA device (") + cudaGetErrorString(error) + ")");
    }
    entry = std::make_unique<DeviceProperties>(
        DeviceProperties{ordinal, properties.major, properties.minor, properties.multiProcessorCount, properties.name});
  }
  return static_cast<const DeviceProperties*>(entry.get());
}

Status check_device_pointers(const ResolvedProblem& r, const Execution& e) {
  const auto check = [](const char* name, const void* data) -> Status {
    if (data == nullptr) return {};
    cudaPointerAttributes attributes{};
    LMHEAD_RETURN_IF_ERROR(to_status(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes"));
    if (attributes.type != cudaMemoryTypeUnregistered) return {};
    return {StatusCode::kInvalidArgument, std::string(name) + ": expected device memory, got a host pointer"};
  };
  LMHEAD_RETURN_IF_ERROR(check("hidden", r.given.hidden.data));
  LMHEAD_RETURN_IF_ERROR(check("weight", r.given.weight.data));
  LMHEAD_RETURN_IF_ERROR(check("targets", r.given.targets.data));
  const auto check_aligned = [&](const char* name, const void* data) -> Status {
    LMHEAD_RETURN_IF_ERROR(check(name, data));
    const auto remainder = reinterpret_cast<std::uintptr_t>(data) % kWorkspaceAlignment;
    if (remainder == 0) return {};
    return {StatusCode::kInvalidArgument,
            std::string(name) + ": expected a 256-byte aligned address, got remainder " + std::to_string(remainder)};
  };
  LMHEAD_RETURN_IF_ERROR(check_aligned("workspace", e.workspace));
  return e.cache_bytes > 0 ? check_aligned("cache", e.cache) : Status();
}

Status encode_tensor_map(CUtensorMap* map, const void* data, DType dtype, std::int64_t rows, std::int64_t cols,
                         std::int64_t row_stride, std::uint32_t box_rows, std::uint32_t box_cols) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  if (encode == nullptr)
    return {StatusCode::kUnsupported,
            "cuTensorMapEncodeTiled: expected a driver of CUDA 12.0 or later, got an older one"};
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride) * 2};
  const cuuint32_t box[2] = {box_cols, box_rows}, element_strides[2] = {1, 1};
  const CUresult result =
      encode(map, dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
             const_cast<void*>(data), sizes, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {StatusCode::kInternal, "cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)) +
                                     " for [" + std::to_string(rows) + ", " + std::to_string(cols) +
                                     "] with row stride " + std::to_string(row_stride)};
}

unsigned grid_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>(std::clamp<std::int64_t>(ceil_div(items, per_block), 1, kMaxGridBlocks));
}

}  // namespace lmhead::cuda
