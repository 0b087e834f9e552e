// The GEMM that is always there, and the choice between the libraries.
#include "cpu/gemm.h"

#if LMHEAD_HAS_ONEDNN
#include <omp.h>
#endif

namespace lmhead {

const GemmLibrary kOwnGemm = {
    .supports = [](DType) { return true; },
    .narrow_output = [](const GemmShape&) { return false; },
    .stride_changes_bits = [](std::int64_t, std::int64_t) { return false; },
    .scratch_bytes = [](const GemmShape&) { return tile_kernels().gemm_scratch_bytes; },
    .multiply =
        [](const GemmShape& shape, const void* a, const void* b, void* c, void* scratch, std::size_t) {
          multiply_adds().fetch_add(shape.m * shape.n * shape.k, std::memory_order_relaxed);
          tile_kernels().gemm(shape, a, b, static_cast<float*>(c), scratch);
        },
    .describe = [](DType) { return std::string("own blocked loop, ") + tile_kernels().name; },
};

std::atomic<std::int64_t>& multiply_adds() {
  static std::atomic<std::int64_t> count{0};
  return count;
}

const GemmLibrary& gemm_library(DType compute) {
#if LMHEAD_HAS_ONEDNN
  if (kOneDnnGemm.supports(compute)) return kOneDnnGemm;
#endif
  (void)compute;
  return kOwnGemm;
}

const GemmLibrary& invariant_gemm(DType compute, std::int64_t cols) {
  return cols > kNarrow ? gemm_library(compute) : kOwnGemm;
}

#if LMHEAD_HAS_ONEDNN
// oneDNN asks OpenMP for the thread count of the calling thread, and a new std::thread starts with all.
SingleThreaded::SingleThreaded() : previous_(omp_get_max_threads()) { omp_set_num_threads(1); }
SingleThreaded::~SingleThreaded() { omp_set_num_threads(previous_); }
#else
SingleThreaded::SingleThreaded() = default;
SingleThreaded::~SingleThreaded() = default;
#endif

}  // namespace lmhead
