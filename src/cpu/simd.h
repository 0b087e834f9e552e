// The vector type of one instruction set. Included by tile_kernels_impl.h only, in a translation unit
// whose compile flags choose the set; everything has internal linkage, so nothing compiled for a wider
// set can be picked up by code that must run without it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lmhead {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef std::int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef std::uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));

#define LMHEAD_INLINE inline __attribute__((always_inline))

LMHEAD_INLINE Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LMHEAD_INLINE void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
LMHEAD_INLINE Vec splat(float x) { return x - Vec{}; }
LMHEAD_INLINE IntVec lane_index() {
  IntVec v;
  for (int k = 0; k < kLanes; ++k) v[k] = k;
  return v;
}
LMHEAD_INLINE BitVec bits(Vec v) { return reinterpret_cast<BitVec>(v); }
LMHEAD_INLINE Vec from_bits(BitVec v) { return reinterpret_cast<Vec>(v); }

/// a * b + c, fused where the set has it.
LMHEAD_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
/// a > b ? a : b, so b where either is NaN.
LMHEAD_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}
/// a < b ? a : b, so b where either is NaN.
LMHEAD_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

LMHEAD_INLINE float reduce_max(Vec v) {
  float lane[kLanes];
  store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lane[k] = lane[k] > lane[k + half] ? lane[k] : lane[k + half];
  return lane[0];
}
/// Pairwise, in a fixed order.
LMHEAD_INLINE float reduce_add(Vec v) {
  float lane[kLanes];
  store(lane, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lane[k] += lane[k + half];
  return lane[0];
}

/// First n < kLanes floats, the other lanes 0.
LMHEAD_INLINE Vec load_first(const float* p, std::int64_t n) {
#if defined(__AVX512F__)
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
#elif defined(__AVX2__)
  return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(lane_index() < static_cast<std::int32_t>(n)));
#else
  float lane[kLanes] = {};
  std::memcpy(lane, p, static_cast<std::size_t>(n) * sizeof(float));
  return load(lane);
#endif
}
LMHEAD_INLINE void store_first(float* p, Vec v, std::int64_t n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(p, reinterpret_cast<__m256i>(lane_index() < static_cast<std::int32_t>(n)), v);
#else
  float lane[kLanes];
  store(lane, v);
  std::memcpy(p, lane, static_cast<std::size_t>(n) * sizeof(float));
#endif
}

/// The first halves of a and b, lane by lane in turn, and the second ones.
#if defined(__AVX512F__)
LMHEAD_INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high) {
  low = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  high = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
#else
LMHEAD_INLINE void interleave(Vec a, Vec b, Vec& low, Vec& high) {
  low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
#endif

/// rows[q] becomes the q-th lanes of all rows.
LMHEAD_INLINE void transpose(Vec (&rows)[kLanes]) {
  // Rounds of interleaving row k with row k + kLanes / 2.
  for (int round = 1; round < kLanes; round *= 2) {
    Vec mixed[kLanes];
    for (int k = 0; k < kLanes / 2; ++k) interleave(rows[k], rows[k + kLanes / 2], mixed[2 * k], mixed[2 * k + 1]);
    for (int k = 0; k < kLanes; ++k) rows[k] = mixed[k];
  }
}

LMHEAD_INLINE HalfVec load_half(const std::uint16_t* p) {
  HalfVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LMHEAD_INLINE void store_half(std::uint16_t* p, HalfVec v) { std::memcpy(p, &v, sizeof v); }

LMHEAD_INLINE Vec from_bf16(HalfVec v) { return from_bits(__builtin_convertvector(v, BitVec) << 16); }
/// Round to nearest even; NaN stays NaN.
LMHEAD_INLINE HalfVec to_bf16(Vec v) {
  const BitVec x = bits(v);
  const BitVec rounded = (x + 0x7fffu + (x >> 16 & 1u)) >> 16, nan = x >> 16 | 0x40u;
  return __builtin_convertvector(v == v ? rounded : nan, HalfVec);
}

#if defined(__AVX512F__)
LMHEAD_INLINE Vec from_fp16(HalfVec v) { return _mm512_cvtph_ps(reinterpret_cast<__m256i>(v)); }
LMHEAD_INLINE HalfVec to_fp16(Vec v) {
  return reinterpret_cast<HalfVec>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
LMHEAD_INLINE Vec from_fp16(HalfVec v) { return _mm256_cvtph_ps(reinterpret_cast<__m128i>(v)); }
LMHEAD_INLINE HalfVec to_fp16(Vec v) {
  return reinterpret_cast<HalfVec>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
#else
/// fp16 by integer and fp32 arithmetic; subnormals through an exact addition at 2^-24.
LMHEAD_INLINE Vec from_fp16(HalfVec v) {
  const BitVec x = __builtin_convertvector(v, BitVec), sign = (x & 0x8000u) << 16, magnitude = x & 0x7fffu;
  const BitVec normal = (magnitude << 13) + (112u << 23);
  const BitVec special = magnitude << 13 | 0x7f800000u;  // inf, NaN
  const Vec subnormal = __builtin_convertvector(reinterpret_cast<IntVec>(magnitude), Vec) * 0x1p-24f;
  const BitVec finite = magnitude < 0x400u ? bits(subnormal) : normal;
  return from_bits((magnitude >= 0x7c00u ? special : finite) | sign);
}
LMHEAD_INLINE HalfVec to_fp16(Vec v) {
  const BitVec x = bits(v), sign = x >> 16 & 0x8000u, magnitude = x & 0x7fffffffu;
  const BitVec normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const BitVec subnormal = bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  BitVec r = magnitude < 0x38800000u ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? BitVec{} + 0x7c00u : r;
  r = magnitude > 0x7f800000u ? BitVec{} + 0x7e00u : r;
  return __builtin_convertvector(r | sign, HalfVec);
}
#endif

}  // namespace
}  // namespace lmhead
