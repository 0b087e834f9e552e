// Plain GEMM of one thread, in fp32 arithmetic on fp32, bf16 or fp16 operands. Included by
// tile_kernels_*.cc. Panels of B [kDepth, kPanel] and A [kDepth, kTileRows] are packed to fp32, then a
// register tile of kTileRows x 2 vectors runs over the depth. Every element of C is one chain of fused
// multiply-adds per kDepth, so its bits depend on its row of A, its column of B and k alone.
#pragma once

#include "cpu/simd.h"
#include "cpu/tile_kernels.h"

namespace lmhead {
namespace {
namespace gemm_own {

#if defined(__AVX512F__)
constexpr std::int64_t kTileRows = 12;  // 24 accumulators of 32 registers
#elif defined(__AVX2__)
constexpr std::int64_t kTileRows = 6;  // 12 of 16
#else
constexpr std::int64_t kTileRows = 3;
#endif
constexpr std::int64_t kTileCols = std::int64_t{2} * kLanes;
constexpr std::int64_t kDepth = 256;
constexpr std::int64_t kBlockRows = kTileRows * (kLanes == 16 ? 10 : 20);  // A block: about 120 KiB
constexpr std::int64_t kBlockCols = 512;                                   // B block: 512 KiB, half an L2
constexpr std::size_t kScratchBytes =
    static_cast<std::size_t>(kDepth * (kBlockRows + kBlockCols)) * sizeof(float) + 64 + kLanes * sizeof(float);

/// kLanes consecutive elements from i, or the first n of them.
LMHEAD_INLINE Vec elements(const void* p, DType type, std::int64_t i, std::int64_t n) {
  if (type == DType::kFloat32) {
    const float* at = static_cast<const float*>(p) + i;
    return n >= kLanes ? load(at) : load_first(at, n);
  }
  const std::uint16_t* at = static_cast<const std::uint16_t*>(p) + i;
  std::uint16_t lane[kLanes] = {};
  if (n < kLanes) {
    std::memcpy(lane, at, static_cast<std::size_t>(n) * 2);
    at = lane;
  }
  const HalfVec half = load_half(at);
  return type == DType::kBFloat16 ? from_bf16(half) : from_fp16(half);
}

LMHEAD_INLINE std::int64_t at_most(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

/// Packs `count` rows (or columns) of one operand, `depth` deep, into panels [depth][kWidth], zero-padded.
/// Element (i, p) is at i * across + p * along; one of the two strides is 1. Stores are whole
/// vectors in the panel's order: what one has too many the next one overwrites, and the last one's lie beyond the
/// panels.
template <std::int64_t kWidth>
void pack(const void* src, DType type, std::int64_t across, std::int64_t along, std::int64_t count, std::int64_t depth,
          float* out) {
  if (across == 1) {
    for (std::int64_t first = 0; first < count; first += kWidth)
      for (std::int64_t p = 0; p < depth; ++p)
        for (std::int64_t i = 0; i < kWidth; i += kLanes) {
          const std::int64_t n = at_most(kLanes, count - first - i);
          store(out + first * depth + p * kWidth + i, n > 0 ? elements(src, type, first + i + p * along, n) : Vec{});
        }
    return;
  }
  for (std::int64_t first = 0; first < count; first += kWidth)
    for (std::int64_t i = 0; i < kWidth; i += kLanes) {
      const std::int64_t n = at_most(kLanes, count - first - i);
      for (std::int64_t p = 0; p < depth; p += kLanes) {
        const std::int64_t deep = at_most(kLanes, depth - p);
        Vec lanes[kLanes];
        for (std::int64_t k = 0; k < kLanes; ++k)
          lanes[k] = k < n ? elements(src, type, (first + i + k) * across + p, deep) : Vec{};
        transpose(lanes);
        for (std::int64_t q = 0; q < deep; ++q) store(out + first * depth + (p + q) * kWidth + i, lanes[q]);
      }
    }
}

/// c [rows, cols] (+)= panel_a^T panel_b over `depth`.
LMHEAD_INLINE void multiply_tile(const float* panel_a, const float* panel_b, std::int64_t depth, float* c,
                                 std::int64_t ldc, std::int64_t rows, std::int64_t cols, bool add) {
  Vec acc[kTileRows][2] = {};
  for (std::int64_t i = 0; i < rows; ++i)  // C comes from memory while the depth is run through
    for (std::int64_t v = 0; v < kTileCols; v += kLanes) __builtin_prefetch(c + i * ldc + v, 1);
  for (std::int64_t p = 0; p < depth; ++p) {
    const Vec b0 = load(panel_b + p * kTileCols), b1 = load(panel_b + p * kTileCols + kLanes);
    for (std::int64_t i = 0; i < kTileRows; ++i) {
      const Vec a = splat(panel_a[p * kTileRows + i]);
      acc[i][0] = fma(a, b0, acc[i][0]);
      acc[i][1] = fma(a, b1, acc[i][1]);
    }
  }
  if (rows == kTileRows && cols == kTileCols) {
    for (std::int64_t i = 0; i < kTileRows; ++i)
      for (std::int64_t v = 0; v < 2; ++v) {
        float* at = c + i * ldc + v * kLanes;
        store(at, add ? load(at) + acc[i][v] : acc[i][v]);
      }
    return;
  }
  float edge[kTileRows][kTileCols];
  for (std::int64_t i = 0; i < kTileRows; ++i)
    for (std::int64_t v = 0; v < 2; ++v) store(edge[i] + v * kLanes, acc[i][v]);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < cols; ++j) c[i * ldc + j] = add ? c[i * ldc + j] + edge[i][j] : edge[i][j];
}

LMHEAD_INLINE const void* offset(const void* p, DType type, std::int64_t elements) {
  return static_cast<const char*>(p) + elements * (type == DType::kFloat32 ? 4 : 2);
}

void multiply(const GemmShape& s, const void* a, const void* b, float* c, void* scratch) {
  float* block_b = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
  float* block_a = block_b + kDepth * kBlockCols;
  const std::int64_t a_across = s.trans_a ? 1 : s.lda, a_along = s.trans_a ? s.lda : 1;
  const std::int64_t b_across = s.trans_b ? s.ldb : 1, b_along = s.trans_b ? 1 : s.ldb;
  // Equal blocks: A is packed once for each, which a narrow last one would not be worth.
  const std::int64_t blocks = (s.n + kBlockCols - 1) / kBlockCols;
  const std::int64_t block_cols = (s.n + blocks * kTileCols - 1) / (blocks * kTileCols) * kTileCols;
  for (std::int64_t j = 0; j < s.n; j += block_cols) {
    const std::int64_t cols = at_most(block_cols, s.n - j);
    for (std::int64_t p = 0; p < s.k; p += kDepth) {
      const std::int64_t depth = at_most(kDepth, s.k - p);
      pack<kTileCols>(offset(b, s.b_type, j * b_across + p * b_along), s.b_type, b_across, b_along, cols, depth,
                      block_b);
      for (std::int64_t i = 0; i < s.m; i += kBlockRows) {
        const std::int64_t rows = at_most(kBlockRows, s.m - i);
        pack<kTileRows>(offset(a, s.a_type, i * a_across + p * a_along), s.a_type, a_across, a_along, rows, depth,
                        block_a);
        for (std::int64_t jj = 0; jj < cols; jj += kTileCols)
          for (std::int64_t ii = 0; ii < rows; ii += kTileRows)
            multiply_tile(block_a + ii * depth, block_b + jj * depth, depth, c + (i + ii) * s.ldc + j + jj, s.ldc,
                          at_most(kTileRows, rows - ii), at_most(kTileCols, cols - jj), s.accumulate || p > 0);
      }
    }
  }
}

}  // namespace gemm_own
}  // namespace
}  // namespace lmhead
