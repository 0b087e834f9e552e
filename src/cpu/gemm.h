// One-thread matrix products on tiles, for the worker threads of the blocked backend.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/tile_kernels.h"

namespace lmhead {

/// A GEMM library. Each multiply runs on the calling thread alone and is deterministic; for one k, every
/// element of C has the same bits whatever m >= 2 and n >= 2 are.
struct GemmLibrary {
  /// Whether this machine runs it for products rounded to `compute`.
  bool (*supports)(DType compute);
  /// Scratch memory for one thread that suffices for any shape no larger in m, n and k.
  std::size_t (*scratch_bytes)(const GemmShape& largest);
  void (*multiply)(const GemmShape& shape, const void* a, const void* b, float* c, void* scratch,
                   std::size_t scratch_bytes);
  /// Library, version and kernel for `compute`.
  std::string (*describe)(DType compute);
};

#if LMHEAD_HAS_ONEDNN
extern const GemmLibrary kOneDnnGemm;  // gemm_onednn.cc
#endif
extern const GemmLibrary kOwnGemm;  // gemm_own.cc

/// Multiply-adds of all products of this process so far: what a mask saved can be counted, not only timed.
std::atomic<std::int64_t>& multiply_adds();

/// The fastest library for products rounded to `compute`.
const GemmLibrary& gemm_library(DType compute);

/// Makes the libraries run on the current thread alone while it lives.
class SingleThreaded {
 public:
  SingleThreaded();
  ~SingleThreaded();
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace lmhead
