#include "pack_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

namespace lmhead::tools {
namespace {

constexpr double kWidth = 960, kHeight = 360, kLeft = 64, kRight = 16, kTop = 48, kBottom = 44;
constexpr std::int64_t kMostBars = 160;  // more would be thinner than 5 pixels

}  // namespace

std::string packing_svg(std::span<const std::int64_t> lengths, std::int64_t capacity, const Bins& bins,
                        const PackingMetrics& metrics, PackingAlgorithm algorithm) {
  const auto count = static_cast<std::int64_t>(bins.size());
  std::int64_t highest = capacity;
  std::vector<std::int64_t> tokens;
  for (const auto& bin : bins) {
    std::int64_t sum = 0;
    for (const std::int64_t index : bin) sum += lengths[static_cast<std::size_t>(index)];
    tokens.push_back(sum);
    highest = std::max(highest, sum);
  }
  const double plot_width = kWidth - kLeft - kRight, plot_height = kHeight - kTop - kBottom;
  const auto y = [&](std::int64_t value) {
    return kTop + plot_height * (1 - static_cast<double>(value) / static_cast<double>(highest));
  };

  std::string svg;
  auto out = std::back_inserter(svg);
  fmt::format_to(out,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
                 "font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n"
                 "<title>Tokens of each bin</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n",
                 kWidth, kHeight);
  fmt::format_to(out,
                 "<text x=\"{}\" y=\"20\" font-size=\"14\" fill=\"#1a1a1a\">{} sequences in {} bins by {}: utilization "
                 "{:.2f} %, lower bound {}, waste {:.2f} %</text>\n",
                 kLeft, metrics.sequences, metrics.bins, to_string(algorithm), 100 * metrics.utilization,
                 metrics.lower_bound, 100 * metrics.waste);
  const double bar = count > 0 ? plot_width / static_cast<double>(std::min(count, kMostBars)) : plot_width;
  if (count <= kMostBars) {
    for (std::int64_t bin = 0; bin < count; ++bin) {
      std::int64_t base = 0;
      const char* const shades[] = {"#2f6db3", "#74a5d8"};
      for (std::size_t i = 0; i < bins[static_cast<std::size_t>(bin)].size(); ++i) {
        const std::int64_t index = bins[static_cast<std::size_t>(bin)][i];
        const std::int64_t length = lengths[static_cast<std::size_t>(index)];
        fmt::format_to(out,
                       "<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\">"
                       "<title>bin {}, sequence {}: {} tokens</title></rect>\n",
                       kLeft + bar * static_cast<double>(bin), y(base + length), 0.9 * bar, y(base) - y(base + length),
                       shades[i % 2], bin, index, length);
        base += length;
      }
    }
  } else {
    for (std::int64_t group = 0; group < kMostBars; ++group) {
      const std::int64_t begin = group * count / kMostBars, end = (group + 1) * count / kMostBars;
      const auto [least, most] = std::minmax_element(tokens.begin() + begin, tokens.begin() + end);
      const double x = kLeft + bar * static_cast<double>(group);
      fmt::format_to(out,
                     "<rect x=\"{0:.2f}\" y=\"{1:.2f}\" width=\"{2:.2f}\" height=\"{3:.2f}\" fill=\"#2f6db3\"/>"
                     "<rect x=\"{0:.2f}\" y=\"{4:.2f}\" width=\"{2:.2f}\" height=\"{5:.2f}\" fill=\"#a9c8e8\">"
                     "<title>bins {6} to {7}: {8} to {9} tokens</title></rect>\n",
                     x, y(*least), bar, y(0) - y(*least), y(*most), y(*least) - y(*most), begin, end - 1, *least,
                     *most);
    }
  }
  fmt::format_to(out,
                 "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.2f}\" y2=\"{2:.2f}\" stroke=\"#b3261e\" "
                 "stroke-dasharray=\"5 3\"/>\n<text x=\"{3}\" y=\"{4:.2f}\" text-anchor=\"end\" fill=\"#b3261e\">{5}"
                 "</text>\n",
                 kLeft, kWidth - kRight, y(capacity), kLeft - 6, y(capacity) + 4, capacity);
  fmt::format_to(out,
                 "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\" stroke=\"#1a1a1a\"/>\n<text x=\"{3}\" y=\"{2}\" "
                 "text-anchor=\"end\" fill=\"#1a1a1a\">0</text>\n",
                 kLeft, kWidth - kRight, kTop + plot_height, kLeft - 6);
  fmt::format_to(out, "<text x=\"{}\" y=\"{}\" fill=\"#1a1a1a\">{}</text>\n", kLeft, kHeight - 16,
                 count <= kMostBars
                     ? "tokens of each bin, one rectangle a sequence, against the capacity"
                     : "fill of consecutive bins: dark up to the emptiest of a group, light up to the fullest");
  svg += "</svg>\n";
  return svg;
}

}  // namespace lmhead::tools
