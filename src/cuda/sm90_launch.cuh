// Launches of the persistent kernels: one block a multiprocessor, work dealt to them.
#pragma once

#include <algorithm>
#include <type_traits>

#include "core/return_if_error.h"
#include "cuda/launch.h"
#include "cuda/sm90_tile.cuh"

namespace lmhead::cuda::sm90 {

/// Runs `kernel` with a dynamic shared memory of S on one block a multiprocessor, fewer if there are fewer items.
template <class S, class Work>
Status launch_persistent(void (*kernel)(Work), const Work& work, std::int64_t items, int multiprocessors,
                         cudaStream_t stream, const char* name) {
  constexpr int kBytes = static_cast<int>(shared_bytes<S>());
  LMHEAD_RETURN_IF_ERROR(to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
                                   "cudaFuncSetAttribute"));
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(items, multiprocessors));
  kernel<<<blocks, kThreads, kBytes, stream>>>(work);
  return last_launch(name);
}

/// launch(entropy, general) with both as constants, so that an unused option is compiled out.
template <class F>
Status with_flags(bool entropy, bool general, F&& launch) {
  if (general)
    return entropy ? launch(std::true_type(), std::true_type()) : launch(std::false_type(), std::true_type());
  return entropy ? launch(std::true_type(), std::false_type()) : launch(std::false_type(), std::false_type());
}

}  // namespace lmhead::cuda::sm90
