// A picture of a packing.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lmhead/packing.h"

namespace lmhead::tools {

/// SVG of how full each bin is: one bar a bin with its sequences, or, for many bins, the fill of groups of bins.
std::string packing_svg(std::span<const std::int64_t> lengths, std::int64_t capacity, const Bins& bins,
                        const PackingMetrics& metrics, PackingAlgorithm algorithm);

}  // namespace lmhead::tools
