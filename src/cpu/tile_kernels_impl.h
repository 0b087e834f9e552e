// Body of tile_kernels_*.cc. Uses nothing with external linkage: see simd.h.
#pragma once

#include "cpu/simd.h"
#include "cpu/tile_kernels.h"

namespace lmhead {
namespace {

constexpr float kInfinity = __builtin_inff();

/// 2^u. u < -126 gives 0 and NaN gives NaN; u > 127.5 gives +inf. 2^u = 2^n 2^f with n = round(u),
/// |f| <= 1/2: a minimax polynomial 1 + f q(f) (2e-9), exact at integers, times 2^n built in the
/// exponent bits by adding 1.5 * 2^23 + 127.
LMHEAD_INLINE Vec exp2_in_range(Vec u) {  // u in [-126, 128] or NaN
  constexpr float kShift = 0x1.8p23f + 127;
  const Vec shifted = u + kShift, f = u - (shifted - kShift);
  Vec q = splat(0x1.41fbbcp-13f);
  q = fma(q, f, splat(0x1.5f3e52p-10f));
  q = fma(q, f, splat(0x1.3b2d4cp-7f));
  q = fma(q, f, splat(0x1.c6aee8p-5f));
  q = fma(q, f, splat(0x1.ebfbdcp-3f));
  q = fma(q, f, splat(0x1.62e430p-1f));
  return fma(q, f, splat(1.0f)) * from_bits(bits(shifted) << 23);
}
constexpr float kExp2Min = -126, kExp2Max = 128;
LMHEAD_INLINE Vec exp2(Vec u) {
  const Vec value = exp2_in_range(min(splat(kExp2Max), max(splat(kExp2Min), u)));
  return u < kExp2Min ? Vec{} : value;
}

/// tanh x and its slope 1 - tanh^2 x, both to a relative error: an odd polynomial below 0.625, else
/// 1 - 2 E / (1 + E) and 4 E / (1 + E)^2 with E = e^(-2|x|).
struct TanhAndSlope {
  Vec tanh, slope;
};
LMHEAD_INLINE TanhAndSlope tanh_and_slope(Vec x) {
  const BitVec sign = bits(x) & 0x80000000u;
  const Vec magnitude = from_bits(bits(x) & 0x7fffffffu), square = x * x;
  Vec q = splat(-0.005704987f);
  q = fma(q, square, splat(0.020639088f));
  q = fma(q, square, splat(-0.053739715f));
  q = fma(q, square, splat(0.13331442f));
  q = fma(q, square, splat(-0.3333328f));
  const Vec small = fma(q * square, x, x);
  const Vec e = exp2(magnitude * (-2 * kLog2E<float>)), inverse = 1.0f / (1.0f + e);
  const Vec large = from_bits(bits(fma(-2.0f * e, inverse, splat(1.0f))) | sign);
  const auto is_small = magnitude < 0.625f;
  return {is_small ? small : large, is_small ? 1.0f - small * small : 4.0f * e * inverse * inverse};
}

/// Which terms the map of a logit has.
enum class MapKind { kPlain, kBias, kSoftcap, kSoftcapBias };

struct MappedLogit {
  Vec z, slope;  // slope: only with a softcap
};
template <MapKind kKind>
LMHEAD_INLINE MappedLogit map_logit(Vec product, Vec bias, const LogitMap& map) {
  if constexpr (kKind == MapKind::kBias || kKind == MapKind::kSoftcapBias) product += bias;
  const Vec r = product * map.factor;
  if constexpr (kKind == MapKind::kPlain || kKind == MapKind::kBias) return {r, Vec{}};
  const TanhAndSlope t = tanh_and_slope(r);
  return {t.tanh * map.amplitude, t.slope};
}
MapKind kind_of(const LogitMap& map, const float* bias) {
  if (map.softcap) return bias != nullptr ? MapKind::kSoftcapBias : MapKind::kSoftcap;
  return bias != nullptr ? MapKind::kBias : MapKind::kPlain;
}

template <MapKind kKind>
SoftmaxState segment_state_of(float* logits, std::int64_t n, const float* bias, const LogitMap& map,
                              std::int64_t target) {
  constexpr bool kBiased = kKind == MapKind::kBias || kKind == MapKind::kSoftcapBias;
  constexpr bool kInPlace = kKind != MapKind::kPlain;  // costly maps run once
  constexpr std::int64_t kUnroll = 4, kStep = kUnroll * kLanes;
  const std::int64_t whole = n / kLanes * kLanes, rest = n - whole, unrolled = n / kStep * kStep;

  Vec m[kUnroll];
  for (Vec& v : m) v = splat(-kInfinity);
  const auto first_pass = [&](std::int64_t j) __attribute__((always_inline)) {
    const Vec z = map_logit<kKind>(load(logits + j), kBiased ? load(bias + j) : Vec{}, map).z;
    if constexpr (kInPlace) store(logits + j, z);
    return z;
  };
  std::int64_t j = 0;
  for (; j < unrolled; j += kStep)
    for (std::int64_t k = 0; k < kUnroll; ++k) m[k] = max(first_pass(j + k * kLanes), m[k]);  // NaN is left out here
  for (; j < whole; j += kLanes) m[0] = max(first_pass(j), m[0]);
  Vec last = splat(-kInfinity);
  if (rest > 0) {
    const Vec z =
        map_logit<kKind>(load_first(logits + whole, rest), kBiased ? load_first(bias + whole, rest) : Vec{}, map).z;
    if constexpr (kInPlace) store_first(logits + whole, z, rest);
    last = lane_index() < static_cast<std::int32_t>(rest) ? z : last;
    m[1] = max(last, m[1]);
  }
  const float maximum = reduce_max(max(max(m[0], m[1]), max(m[2], m[3])));
  // All -inf (or NaN): any finite reference keeps -inf at mass 0 and NaN a NaN.
  const Vec reference = splat(maximum == -kInfinity ? 0.0f : maximum);

  const auto fold = [&](Vec z, Vec & sum, Vec & weighted) __attribute__((always_inline)) {
    const Vec u = (z - reference) * kLog2E<float>, clamped = max(splat(kExp2Min), u);
    Vec e = exp2_in_range(clamped);
    e = u < kExp2Min ? Vec{} : e;
    sum += e;
    weighted = fma(e, clamped, weighted);
  };
  const auto again = [&](std::int64_t at) __attribute__((always_inline)) {
    return kInPlace ? load(logits + at) : load(logits + at) * map.factor;
  };
  // Short chains of additions: equal logits round every one the same way, which no average removes.
  constexpr std::int64_t kChain = 8 * kStep;
  Vec sum = Vec{}, weighted = Vec{};
  for (j = 0; j < unrolled;) {
    Vec s[kUnroll] = {}, t[kUnroll] = {};
    for (const std::int64_t end = j + kChain < unrolled ? j + kChain : unrolled; j < end; j += kStep)
      for (std::int64_t k = 0; k < kUnroll; ++k) fold(again(j + k * kLanes), s[k], t[k]);
    sum += (s[0] + s[1]) + (s[2] + s[3]);
    weighted += (t[0] + t[1]) + (t[2] + t[3]);
  }
  for (; j < whole; j += kLanes) fold(again(j), sum, weighted);
  if (rest > 0) fold(last, sum, weighted);

  SoftmaxState state;
  state.max = maximum;
  state.sum = reduce_add(sum);
  state.weighted = reduce_add(weighted);
  state.target = kInfinity;
  if (target >= 0 && target < n) state.target = kInPlace ? logits[target] : logits[target] * map.factor;
  return state;
}

SoftmaxState segment_state(float* logits, std::int64_t n, const float* bias, const LogitMap& map, std::int64_t target) {
  switch (kind_of(map, bias)) {
    case MapKind::kPlain: return segment_state_of<MapKind::kPlain>(logits, n, bias, map, target);
    case MapKind::kBias: return segment_state_of<MapKind::kBias>(logits, n, bias, map, target);
    case MapKind::kSoftcap: return segment_state_of<MapKind::kSoftcap>(logits, n, bias, map, target);
    default: return segment_state_of<MapKind::kSoftcapBias>(logits, n, bias, map, target);
  }
}

LMHEAD_INLINE Vec load_as(const void* p, DType type, std::int64_t i) {
  if (type == DType::kFloat32) return load(static_cast<const float*>(p) + i);
  const HalfVec half = load_half(static_cast<const std::uint16_t*>(p) + i);
  return type == DType::kBFloat16 ? from_bf16(half) : from_fp16(half);
}
LMHEAD_INLINE void store_as(void* p, DType type, std::int64_t i, Vec v) {
  if (type == DType::kFloat32) return store(static_cast<float*>(p) + i, v);
  store_half(static_cast<std::uint16_t*>(p) + i, type == DType::kBFloat16 ? to_bf16(v) : to_fp16(v));
}
/// First n < kLanes elements; the other lanes 0.
LMHEAD_INLINE Vec load_first_as(const void* p, DType type, std::int64_t i, std::int64_t n) {
  if (type == DType::kFloat32) return load_first(static_cast<const float*>(p) + i, n);
  std::uint16_t lane[kLanes] = {};
  std::memcpy(lane, static_cast<const std::uint16_t*>(p) + i, static_cast<std::size_t>(n) * 2);
  return load_as(lane, type, 0);
}
LMHEAD_INLINE void store_first_as(void* p, DType type, std::int64_t i, Vec v, std::int64_t n) {
  if (type == DType::kFloat32) return store_first(static_cast<float*>(p) + i, v, n);
  std::uint16_t lane[kLanes];
  store_as(lane, type, 0, v);
  std::memcpy(static_cast<std::uint16_t*>(p) + i, lane, static_cast<std::size_t>(n) * 2);
}

template <MapKind kKind, bool kEntropy, DType kType>
void logit_gradient_of(const float* products, std::int64_t n, const float* bias, const RowGradient& row,
                       std::int64_t target, void* out) {
  constexpr bool kBiased = kKind == MapKind::kBias || kKind == MapKind::kSoftcapBias;
  constexpr bool kSoftcap = kKind == MapKind::kSoftcap || kKind == MapKind::kSoftcapBias;
  const Vec a = splat(row.a), g = splat(row.g), minus_slope = splat(-row.slope);
  // -p (a + g (log p + entropy)) slope, and + a slope in the lane `target`, all before the rounding.
  const auto gradient = [&](Vec product, Vec b, std::int64_t target_lane) __attribute__((always_inline)) {
    const MappedLogit l = map_logit<kKind>(product, b, row.map);
    const Vec log_p = l.z - row.lse, p = exp2(log_p * kLog2E<float>);
    Vec weight = a;
    // p = 0 below 2^-126: the bound keeps 0 * -inf away.
    if constexpr (kEntropy) weight = fma(g, max(splat(-100.0f), log_p) + row.entropy, a);
    Vec dl = minus_slope * p * weight;
    if (target_lane >= 0) dl = lane_index() == static_cast<std::int32_t>(target_lane) ? dl + row.a * row.slope : dl;
    if constexpr (kSoftcap) dl *= l.slope;
    return dl;
  };
  const std::int64_t whole = n / kLanes * kLanes, rest = n - whole;
  for (std::int64_t j = 0; j < whole; j += kLanes)
    store_as(out, kType, j, gradient(load(products + j), kBiased ? load(bias + j) : Vec{}, -1));
  const auto tail = [&](std::int64_t target_lane) __attribute__((always_inline)) {
    const Vec b = kBiased ? load_first(bias + whole, rest) : Vec{};
    store_first_as(out, kType, whole, gradient(load_first(products + whole, rest), b, target_lane), rest);
  };
  if (rest > 0) tail(-1);
  if (target < 0 || target >= n) return;
  const std::int64_t lane = target % kLanes, at = target - lane;  // once more, with the target's term
  if (at == whole) return tail(lane);
  store_as(out, kType, at, gradient(load(products + at), kBiased ? load(bias + at) : Vec{}, lane));
}

template <MapKind kKind, bool kEntropy>
void logit_gradient_as(const float* products, std::int64_t n, const float* bias, const RowGradient& row,
                       std::int64_t target, DType type, void* out) {
  switch (type) {
    case DType::kFloat32:
      return logit_gradient_of<kKind, kEntropy, DType::kFloat32>(products, n, bias, row, target, out);
    case DType::kBFloat16:
      return logit_gradient_of<kKind, kEntropy, DType::kBFloat16>(products, n, bias, row, target, out);
    default: return logit_gradient_of<kKind, kEntropy, DType::kFloat16>(products, n, bias, row, target, out);
  }
}

template <MapKind kKind>
void logit_gradient_kind(const float* products, std::int64_t n, const float* bias, const RowGradient& row,
                         std::int64_t target, DType type, void* out) {
  if (row.g == 0) return logit_gradient_as<kKind, false>(products, n, bias, row, target, type, out);
  return logit_gradient_as<kKind, true>(products, n, bias, row, target, type, out);
}

void logit_gradient(const float* products, std::int64_t n, const float* bias, const RowGradient& row,
                    std::int64_t target, DType type, void* out) {
  switch (kind_of(row.map, bias)) {
    case MapKind::kPlain: return logit_gradient_kind<MapKind::kPlain>(products, n, bias, row, target, type, out);
    case MapKind::kBias: return logit_gradient_kind<MapKind::kBias>(products, n, bias, row, target, type, out);
    case MapKind::kSoftcap: return logit_gradient_kind<MapKind::kSoftcap>(products, n, bias, row, target, type, out);
    default: return logit_gradient_kind<MapKind::kSoftcapBias>(products, n, bias, row, target, type, out);
  }
}

void convert(const void* in, DType from, void* out, DType to, std::int64_t n) {
  const std::int64_t whole = n / kLanes * kLanes, rest = n - whole;
  for (std::int64_t j = 0; j < whole; j += kLanes) store_as(out, to, j, load_as(in, from, j));
  if (rest > 0) store_first_as(out, to, whole, load_first_as(in, from, whole, rest), rest);
}

void add(const float* values, std::int64_t n, float* sums) {
  const std::int64_t whole = n / kLanes * kLanes;
  for (std::int64_t j = 0; j < whole; j += kLanes) store(sums + j, load(sums + j) + load(values + j));
  for (std::int64_t j = whole; j < n; ++j) sums[j] += values[j];
}

void add_column_sums(const void* m, DType type, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                     float* sums) {
  const std::int64_t whole = cols / kLanes * kLanes, rest = cols - whole;
  const auto sum = [&](std::int64_t j, auto&& element) __attribute__((always_inline)) {
    Vec total = Vec{};
    for (std::int64_t i = 0; i < rows; ++i) total += element(i * stride + j);
    return total;
  };
  for (std::int64_t j = 0; j < whole; j += kLanes)
    store(sums + j, load(sums + j) + sum(j, [&](std::int64_t at) { return load_as(m, type, at); }));
  if (rest == 0) return;
  const Vec total = sum(whole, [&](std::int64_t at) { return load_first_as(m, type, at, rest); });
  store_first(sums + whole, load_first(sums + whole, rest) + total, rest);
}

template <class Fn>
LMHEAD_INLINE void map_array(const float* in, float* out, std::int64_t n, Fn&& fn) {
  const std::int64_t whole = n / kLanes * kLanes;
  for (std::int64_t j = 0; j < whole; j += kLanes) store(out + j, fn(load(in + j)));
  if (n > whole) store_first(out + whole, fn(load_first(in + whole, n - whole)), n - whole);
}
void exp2_array(const float* in, float* out, std::int64_t n) {
  map_array(in, out, n, [](Vec v) { return exp2(v); });
}
void tanh_array(const float* in, float* out, std::int64_t n) {
  map_array(in, out, n, [](Vec v) { return tanh_and_slope(v).tanh; });
}

constexpr TileKernels make_tile_kernels(const char* name, bool (*runs_here)()) {
  return {name, runs_here,          segment_state,           logit_gradient, convert,   add_column_sums,
          add,  gemm_own::multiply, gemm_own::kScratchBytes, exp2_array,     tanh_array};
}

}  // namespace
}  // namespace lmhead
