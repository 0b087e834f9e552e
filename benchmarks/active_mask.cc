#include "active_mask.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "length_table.h"  // written by CMake from shapes/lengths.tsv

namespace lmhead::bench {
namespace {

/// One row of quantiles of shapes/lengths.tsv as (probability, length) pairs.
std::vector<std::pair<double, double>> length_quantiles(const std::string& set) {
  std::istringstream table(kLengthTable);
  std::vector<double> probability;
  for (std::string line; std::getline(table, line);) {
    std::istringstream row(line);
    std::string cell_text;
    std::vector<std::string> cells;
    while (std::getline(row, cell_text, '\t')) cells.push_back(cell_text);
    if (cells.size() < 4) continue;
    if (cells[0] == "set") {
      for (std::size_t k = 3; k < cells.size(); ++k)
        probability.push_back(cells[k] == "min" ? 0 : cells[k] == "max" ? 1 : std::stod(cells[k].substr(1)) / 100);
    } else if (cells[0] == set) {
      std::vector<std::pair<double, double>> quantiles;
      for (std::size_t k = 3; k < cells.size(); ++k) quantiles.emplace_back(probability[k - 3], std::stod(cells[k]));
      return quantiles;
    }
  }
  throw std::runtime_error("shapes/lengths.tsv: expected a row " + set);
}

std::int64_t draw_length(const std::vector<std::pair<double, double>>& quantiles, double u) {
  std::size_t k = 1;
  while (k + 1 < quantiles.size() && quantiles[k].first < u) ++k;
  const auto [p0, l0] = quantiles[k - 1];
  const auto [p1, l1] = quantiles[k];
  return std::max<std::int64_t>(1, std::llround(l0 + (l1 - l0) * (u - p0) / (p1 - p0)));
}

}  // namespace

std::vector<std::uint8_t> make_mask(std::int64_t n, double share, const std::string& pattern) {
  if (pattern == "dense") return {};
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(n));
  const std::int64_t active = std::llround(share * static_cast<double>(n));
  std::mt19937_64 random(7);
  if (pattern == "suffix") {
    std::fill(mask.end() - active, mask.end(), std::uint8_t{1});
  } else if (pattern == "scattered") {
    std::fill(mask.begin(), mask.begin() + active, std::uint8_t{1});
    std::shuffle(mask.begin(), mask.end(), random);
  } else {
    const auto quantiles = length_quantiles("gsm8k_train");
    std::uniform_real_distribution<double> uniform(0, 1);
    for (std::int64_t begin = 0; begin < n;) {
      const std::int64_t length = std::min(n - begin, draw_length(quantiles, uniform(random)));
      const std::int64_t prompt = std::llround((1 - share) * static_cast<double>(length));
      std::fill(mask.begin() + begin + prompt, mask.begin() + begin + length, std::uint8_t{1});
      begin += length;
    }
  }
  return mask;
}

}  // namespace lmhead::bench
