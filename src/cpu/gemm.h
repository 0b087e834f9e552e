// One-thread matrix products on tiles, for the worker threads of the blocked backend.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "cpu/tile_kernels.h"

namespace lmhead {

/// A GEMM library. Each multiply runs on the calling thread alone and is deterministic. For one k, an element
/// of C has the same bits for every m >= 2 and n > kNarrow; the own loop has no such limits.
struct GemmLibrary {
  /// Whether this machine runs it for products rounded to `compute`.
  bool (*supports)(DType compute);
  /// Whether it multiplies `shape` into a C of the operands' 16-bit type, without an fp32 copy.
  bool (*narrow_output)(const GemmShape& shape);
  /// Whether bits of products of depth k depend on the row strides of A and B, here `stride`; stride k always has
  /// the same bits.
  bool (*stride_changes_bits)(std::int64_t k, std::int64_t stride);
  /// Scratch memory for one thread that suffices for any shape no larger in m, n and k.
  std::size_t (*scratch_bytes)(const GemmShape& largest);
  void (*multiply)(const GemmShape& shape, const void* a, const void* b, void* c, void* scratch,
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

/// oneDNN's AMX products with m n <= 256 run another kernel, with other bits.
inline constexpr std::int64_t kNarrow = 128;

/// The fastest library for products rounded to `compute`.
const GemmLibrary& gemm_library(DType compute);
/// The same for products of `cols` columns whose bits must not depend on the number of rows.
const GemmLibrary& invariant_gemm(DType compute, std::int64_t cols);

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
