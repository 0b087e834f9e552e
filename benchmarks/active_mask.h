// Masks of active rows, the same for every benchmark.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lmhead::bench {

/// n bytes, 1 where the row is active, about `share` of them; empty for pattern "dense". suffix: the last rows;
/// scattered: uniformly drawn ones; runs: sequences whose first part, the prompt, is inactive, with lengths drawn
/// from the quantiles of a real distribution (shapes/lengths.tsv, gsm8k_train).
std::vector<std::uint8_t> make_mask(std::int64_t n, double share, const std::string& pattern);

}  // namespace lmhead::bench
