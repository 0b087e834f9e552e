#include "lmhead/layout.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>
#include <string>

#include "core/return_if_error.h"
#include "packing/errors.h"

namespace lmhead {
namespace {

using packing::check_at_least;
using packing::invalid;
using packing::str;

// Alignments stay far below 2^63 for any size that this admits: 2*tp*cp and 128*tp*cp < 2^48, and one is a multiple
// of the other up to a factor of 16.
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;

Status check_options(const LayoutOptions& options) {
  LMHEAD_RETURN_IF_ERROR(check_at_least("tp", options.tp, 1));
  LMHEAD_RETURN_IF_ERROR(check_at_least("cp", options.cp, 1));
  if (options.tp > kMaxRanks / options.cp)
    return invalid("tp * cp", "at most " + str(kMaxRanks), str(options.tp) + " * " + str(options.cp));
  return {};
}

std::int64_t precision_alignment(std::int64_t tp, std::int64_t cp, Precision precision) {
  switch (precision) {
    case Precision::kNone: return 1;
    case Precision::kMxFp8: return 32 * tp * cp;
    case Precision::kFp8: return tp > 1 ? 128 * tp * cp : 16 * cp;
  }
  return 1;
}

// Local row of position `at` in a padded segment of `length` rows, and the rank that holds it.
struct ZigZag {
  std::int64_t cp, chunk;
  ZigZag(std::int64_t length, std::int64_t ranks) : cp(ranks), chunk(ranks == 1 ? length : length / (2 * ranks)) {}

  std::int64_t rank(std::int64_t at) const {
    const std::int64_t c = at / chunk;
    return c < cp ? c : 2 * cp - 1 - c;
  }
  std::int64_t local(std::int64_t at) const { return at % chunk + (at / chunk < cp ? 0 : chunk); }
};

template <class Id>
Status shift(const PackedLayout& layout, const char* input_name, std::span<const Id> input, Id nothing,
             const char* output_name, std::span<Id> output) {
  const std::int64_t total = layout.total();
  if (std::ssize(input) != total)
    return invalid(input_name, "[" + str(total) + "]", "[" + str(std::ssize(input)) + "]");
  if (std::ssize(output) != total)
    return invalid(output_name, "[" + str(total) + "]", "[" + str(std::ssize(output)) + "]");
  for (std::int64_t i = 0; i < layout.num_sequences(); ++i) {
    const std::int64_t begin = layout.cu_seqlens_padded()[i], end = layout.cu_seqlens_padded()[i + 1];
    const std::int64_t predicting = layout.lengths()[i] - 1;
    std::copy_n(input.begin() + begin + 1, predicting, output.begin() + begin);
    std::fill(output.begin() + begin + predicting, output.begin() + end, nothing);
  }
  return {};
}

}  // namespace

const char* to_string(Precision precision) {
  switch (precision) {
    case Precision::kNone: return "none";
    case Precision::kFp8: return "fp8";
    case Precision::kMxFp8: return "mxfp8";
  }
  return "unknown";
}

Result<Precision> precision_from_name(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const Precision precision : {Precision::kNone, Precision::kFp8, Precision::kMxFp8})
    if (lower == to_string(precision)) return precision;
  return invalid("precision", "none, fp8 or mxfp8 (an automatic recipe resolved)", "\"" + std::string(name) + "\"");
}

Result<std::int64_t> sequence_alignment(const LayoutOptions& options) {
  LMHEAD_RETURN_IF_ERROR(check_options(options));
  return options.cp == 1 ? 1 : 2 * options.tp * options.cp;
}

Result<std::int64_t> total_alignment(const LayoutOptions& options) {
  LMHEAD_RETURN_IF_ERROR(check_options(options));
  const std::int64_t layout = options.cp == 1 ? options.tp : 2 * options.tp * options.cp;
  return std::lcm(layout, precision_alignment(options.tp, options.cp, options.precision));
}

Result<std::int64_t> unpacked_alignment(const LayoutOptions& options) {
  LMHEAD_RETURN_IF_ERROR(check_options(options));
  return std::lcm(options.tp, precision_alignment(options.tp, 1, options.precision));
}

Result<PackedLayout> PackedLayout::make(std::span<const std::int64_t> lengths, const LayoutOptions& options) {
  const Result<std::int64_t> sequence_multiple = sequence_alignment(options);
  if (!sequence_multiple) return sequence_multiple.status();
  const Result<std::int64_t> total_multiple = total_alignment(options);
  if (!total_multiple) return total_multiple.status();

  PackedLayout layout;
  layout.options_ = options;
  layout.lengths_.assign(lengths.begin(), lengths.end());
  layout.padded_lengths_.reserve(lengths.size());
  layout.cu_seqlens_.reserve(lengths.size() + 1);
  layout.cu_seqlens_padded_.reserve(lengths.size() + 1);
  const auto too_long = [] { return invalid("lengths", "a padded total within 64 bits", "a larger one"); };
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 1) return check_at_least(("lengths[" + str(i) + "]").c_str(), lengths[i], 1);
    const std::optional<std::int64_t> padded = packing::round_up(lengths[i], *sequence_multiple);
    std::int64_t end = 0;
    if (!padded || __builtin_add_overflow(layout.cu_seqlens_padded_.back(), *padded, &end)) return too_long();
    layout.padded_lengths_.push_back(*padded);
    layout.cu_seqlens_padded_.push_back(end);
    layout.cu_seqlens_.push_back(layout.cu_seqlens_.back() + lengths[i]);
  }
  if (!lengths.empty()) {
    const std::optional<std::int64_t> total = packing::round_up(layout.total(), *total_multiple);
    if (!total) return too_long();
    layout.padded_lengths_.back() += *total - layout.total();
    layout.cu_seqlens_padded_.back() = *total;
  }
  return layout;
}

Result<PackedLayout> PackedLayout::from_cu_seqlens(std::span<const std::int64_t> cu_seqlens,
                                                   const LayoutOptions& options) {
  if (cu_seqlens.empty() || cu_seqlens.front() != 0)
    return invalid("cu_seqlens", "offsets that start at 0", cu_seqlens.empty() ? "none" : str(cu_seqlens.front()));
  std::vector<std::int64_t> lengths(cu_seqlens.size() - 1);
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (cu_seqlens[i + 1] <= cu_seqlens[i])
      return invalid("cu_seqlens", "strictly rising offsets", str(cu_seqlens[i]) + " then " + str(cu_seqlens[i + 1]));
    lengths[i] = cu_seqlens[i + 1] - cu_seqlens[i];
  }
  return make(lengths, options);
}

std::vector<std::int64_t> PackedLayout::source_rows() const {
  std::vector<std::int64_t> rows(total(), -1);
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const auto first = rows.begin() + cu_seqlens_padded_[i];
    std::iota(first, first + lengths_[i], cu_seqlens_[i]);
  }
  return rows;
}

std::vector<std::int64_t> PackedLayout::global_rows() const {
  std::vector<std::int64_t> rows(num_tokens());
  for (std::int64_t i = 0; i < num_sequences(); ++i)
    std::iota(rows.begin() + cu_seqlens_[i], rows.begin() + cu_seqlens_[i + 1], cu_seqlens_padded_[i]);
  return rows;
}

std::vector<std::int64_t> PackedLayout::target_rows() const {
  std::vector<std::int64_t> rows(total(), -1);
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const auto first = rows.begin() + cu_seqlens_padded_[i];
    std::iota(first, first + lengths_[i] - 1, cu_seqlens_padded_[i] + 1);
  }
  return rows;
}

Result<std::vector<std::int64_t>> PackedLayout::local_rows(std::int64_t cp_rank) const {
  if (cp_rank < 0 || cp_rank >= options_.cp)
    return invalid("cp_rank", "0 <= cp_rank < " + str(options_.cp), str(cp_rank));
  std::vector<std::int64_t> rows;
  rows.reserve(local_total());
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const std::int64_t begin = cu_seqlens_padded_[i], end = cu_seqlens_padded_[i + 1];
    const std::int64_t chunk = ZigZag(end - begin, options_.cp).chunk;
    for (std::int64_t at = begin + cp_rank * chunk, stop = at + chunk; at < stop; ++at) rows.push_back(at);
    if (options_.cp == 1) continue;
    for (std::int64_t at = end - (cp_rank + 1) * chunk, stop = at + chunk; at < stop; ++at) rows.push_back(at);
  }
  return rows;
}

std::vector<std::int64_t> PackedLayout::gathered_rows() const {
  std::vector<std::int64_t> rows(total());
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const std::int64_t begin = cu_seqlens_padded_[i];
    const ZigZag zigzag(padded_lengths_[i], options_.cp);
    for (std::int64_t at = 0; at < padded_lengths_[i]; ++at)
      rows[begin + at] = zigzag.rank(at) * local_total() + begin / options_.cp + zigzag.local(at);
  }
  return rows;
}

Result<std::vector<std::int64_t>> PackedLayout::batch_rows(std::span<const BatchPosition> positions, std::int64_t rows,
                                                           std::int64_t width) const {
  LMHEAD_RETURN_IF_ERROR(check_at_least("rows", rows, 0));
  LMHEAD_RETURN_IF_ERROR(check_at_least("width", width, 0));
  std::int64_t cells = 0;
  if (__builtin_mul_overflow(rows, width, &cells)) return invalid("rows * width", "within 64 bits", "more");
  if (std::ssize(positions) != num_sequences())
    return invalid("positions", "[" + str(num_sequences()) + "]", "[" + str(std::ssize(positions)) + "]");
  std::vector<std::int64_t> map(cells, -1);
  for (std::int64_t i = 0; i < num_sequences(); ++i) {
    const auto [row, column] = positions[i];
    const std::string name = "positions[" + str(i) + "]";
    const std::string got = "row " + str(row) + ", column " + str(column) + ", length " + str(lengths_[i]);
    if (row < 0 || row >= rows || column < 0 || lengths_[i] > width || column > width - lengths_[i])
      return invalid(name, "a sequence inside [" + str(rows) + ", " + str(width) + "]", got);
    const auto first = map.begin() + row * width + column;
    if (std::any_of(first, first + lengths_[i], [](std::int64_t taken) { return taken >= 0; }))
      return invalid(name, "cells of no other sequence", got);
    std::iota(first, first + lengths_[i], cu_seqlens_padded_[i]);
  }
  return map;
}

Result<std::vector<std::int64_t>> PackedLayout::prediction_rows(std::span<const BatchPosition> positions,
                                                                std::int64_t rows, std::int64_t width) const {
  LMHEAD_RETURN_IF_ERROR(check_at_least("width", width, 1));
  Result<std::vector<std::int64_t>> cells = batch_rows(positions, rows, width);
  if (!cells) return cells;
  // A sequence's last token sits in a cell but predicts nothing.
  for (std::int64_t i = 0; i < num_sequences(); ++i)
    (*cells)[positions[i].row * width + positions[i].column + lengths_[i] - 1] = -1;
  std::vector<std::int64_t> map(rows * (width - 1));
  for (std::int64_t b = 0; b < rows; ++b)
    std::copy_n(cells->begin() + b * width, width - 1, map.begin() + b * (width - 1));
  return map;
}

Status PackedLayout::shift_targets(std::span<const std::int64_t> input_ids, std::int64_t ignore_index,
                                   std::span<std::int64_t> targets) const {
  return shift(*this, "input_ids", input_ids, ignore_index, "targets", targets);
}

Status PackedLayout::shift_targets(std::span<const std::int32_t> input_ids, std::int32_t ignore_index,
                                   std::span<std::int32_t> targets) const {
  return shift(*this, "input_ids", input_ids, ignore_index, "targets", targets);
}

Status PackedLayout::shift_mask(std::span<const std::uint8_t> token_mask, std::span<std::uint8_t> row_mask) const {
  return shift(*this, "token_mask", token_mask, std::uint8_t{0}, "row_mask", row_mask);
}

}  // namespace lmhead
