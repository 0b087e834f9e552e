// Random data and fp64 checks on the device, for the GPU benchmark.
#pragma once

#include <cstdint>
#include <vector>

#include "lmhead/types.h"

namespace lmhead::bench {

/// 16-bit normal random numbers of standard deviation `scale`.
void fill_normal(void* data, DType dtype, std::int64_t count, std::uint32_t seed, float scale);

/// products[i, j] = <a[list[i]], b[j]> in fp64, all j. Rows contiguous, `depth` values each.
std::vector<double> exact_products(const void* a, const std::vector<int>& list, const void* b, std::int64_t b_rows,
                                   std::int64_t depth, DType dtype);

/// out[i, k] = sum_j factors[i, j] b[j, k] in fp64.
std::vector<double> exact_combination(const std::vector<double>& factors, std::int64_t rows, const void* b,
                                      std::int64_t b_rows, std::int64_t depth, DType dtype);

}  // namespace lmhead::bench
