// The loops over one tile that are compiled once per instruction set: the online softmax pass, the
// logit gradients, conversions, and the plain GEMM. Pick with tile_kernels().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/softmax_state.h"
#include "lmhead/types.h"

namespace lmhead {

/// From a product <x, w> to a logit z in nats:
///   without softcap  z = factor (product + bias),                  factor = scale / T
///   with softcap     z = amplitude tanh(factor (product + bias)),  factor = scale / softcap, amplitude = softcap / T
struct LogitMap {
  float factor = 1;
  float amplitude = 0;
  bool softcap = false;
};

/// One row of backward: upstream a and g, the forward's results, and slope = scale / T.
struct RowGradient {
  LogitMap map;
  float lse, entropy, a, g, slope;
};

/// Max relative error of the 2^x used below, for x in [-126, 127.5): measured over every fp32 value of an
/// octave in tests/online_softmax_test.cc. Smaller x give 0, larger ones +inf, NaN gives NaN.
inline constexpr double kExp2MaxRelativeError = 0x1p-23;
/// Max relative error of the tanh used by the softcap.
inline constexpr double kTanhMaxRelativeError = 0x1p-22;

/// Operands of the plain GEMM: C [m, n] = A [m, k] B [k, n], or += with `accumulate`. Element (i, p) of A
/// is a[i * lda + p], or a[p * lda + i] when trans_a; likewise B. Types: fp32, bf16, fp16.
struct GemmShape {
  std::int64_t m, n, k;
  DType a_type, b_type;
  bool trans_a, trans_b;
  std::int64_t lda, ldb, ldc;
  bool accumulate;
  bool narrow_output = false;  ///< C is of a_type, rounded once; see GemmLibrary::narrow_output
};

struct TileKernels {
  const char* name;  ///< "AVX-512", "AVX2", "baseline"
  bool (*runs_here)();

  /// State of logits[0, n): maps products to logits (in place where there is a bias or a softcap), and
  /// folds them. bias [n] may be null; target is a column in [0, n) or any other number for none.
  /// Logits of -inf hold no mass; NaN and +inf make the sum NaN.
  SoftmaxState (*segment_state)(float* logits, std::int64_t n, const float* bias, const LogitMap& map,
                                std::int64_t target);

  /// dl for products [0, n), rounded once to `rounded_to` (fp32, bf16 or fp16), stored in that type.
  void (*logit_gradient)(const float* products, std::int64_t n, const float* bias, const RowGradient& row,
                         std::int64_t target, DType rounded_to, void* out);

  /// n elements of type `from`, rounded to `to`.
  void (*convert)(const void* in, DType from, void* out, DType to, std::int64_t n);
  /// sums[j] += the sum over `rows` rows of m[:, j].
  void (*add_column_sums)(const void* m, DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                          float* sums);
  /// sums[j] += values[j].
  void (*add)(const float* values, std::int64_t n, float* sums);

  void (*gemm)(const GemmShape& shape, const void* a, const void* b, float* c, void* scratch);
  std::size_t gemm_scratch_bytes;

  /// The two functions above, for tests: out[i] = 2^in[i], tanh(in[i]).
  void (*exp2)(const float* in, float* out, std::int64_t n);
  void (*tanh)(const float* in, float* out, std::int64_t n);
};

/// Every compiled set, widest first; the last one runs anywhere.
std::span<const TileKernels* const> all_tile_kernels();
/// The widest that this machine runs.
const TileKernels& tile_kernels();

}  // namespace lmhead
