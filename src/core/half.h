// Host conversions between fp32 and the two 16-bit floating types, round to nearest even.
#pragma once

#include <bit>
#include <cstdint>

namespace lmhead {

inline float bf16_to_float(std::uint16_t bits) { return std::bit_cast<float>(std::uint32_t{bits} << 16); }

inline std::uint16_t float_to_bf16(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value);
  if ((x & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>(x >> 16 | 0x40u);  // quiet NaN
  return static_cast<std::uint16_t>((x + 0x7fffu + (x >> 16 & 1u)) >> 16);
}

inline float fp16_to_float(std::uint16_t bits) {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16, exponent = bits >> 10 & 0x1fu,
                      mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112u) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // subnormal, exact
  return sign ? -magnitude : magnitude;
}

inline std::uint16_t float_to_fp16(float value) {
  const std::uint32_t x = std::bit_cast<std::uint32_t>(value), magnitude = x & 0x7fffffffu;
  const std::uint16_t sign = static_cast<std::uint16_t>(x >> 16 & 0x8000u);
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {                        // below the smallest normal: add so that fp32 rounds at 2^-24
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u);
  }
  return sign | static_cast<std::uint16_t>((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
}

}  // namespace lmhead
