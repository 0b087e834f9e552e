#include "core/return_if_error.h"
#include "lmhead/layout.h"
#include "packing/errors.h"

namespace lmhead {

using packing::check_at_least;
using packing::invalid;
using packing::str;

namespace {
std::string text(const Span& span) { return "[" + str(span.begin) + ", " + str(span.end) + ")"; }
}  // namespace

Result<std::vector<Span>> active_spans(std::span<const std::uint8_t> active, std::int64_t max_gap) {
  LMHEAD_RETURN_IF_ERROR(check_at_least("max_gap", max_gap, 0));
  std::vector<Span> spans;
  for (std::int64_t row = 0; row < std::ssize(active); ++row) {
    if (active[row] == 0) continue;
    if (spans.empty() || row - spans.back().end > max_gap) spans.push_back({row, row});
    spans.back().end = row + 1;
  }
  return spans;
}

Result<std::vector<Span>> active_spans(const PackedLayout& layout, std::span<const std::uint8_t> active,
                                       std::int64_t cp_rank, std::int64_t max_gap) {
  if (std::ssize(active) != layout.total())
    return invalid("active", "[" + str(layout.total()) + "]", "[" + str(std::ssize(active)) + "]");
  Result<std::vector<std::int64_t>> rows = layout.local_rows(cp_rank);
  if (!rows) return rows.status();
  std::vector<std::uint8_t> local(rows->size());
  for (std::size_t i = 0; i < local.size(); ++i) local[i] = active[(*rows)[i]];
  return active_spans(local, max_gap);
}

Status check_active_spans(std::span<const Span> spans, std::int64_t rows,
                          std::optional<std::span<const std::uint8_t>> active) {
  if (!active) {
    if (spans.empty()) return {};
    return invalid("active_spans", "an active mask beside the spans", "spans without a mask");
  }
  LMHEAD_RETURN_IF_ERROR(check_at_least("rows", rows, 0));
  if (std::ssize(*active) != rows)
    return invalid("active", "[" + str(rows) + "]", "[" + str(std::ssize(*active)) + "]");
  std::int64_t covered = 0;  // every active row below this one lies in a span
  const auto first_active = [&](std::int64_t from, std::int64_t to) {
    while (from < to && (*active)[from] == 0) ++from;
    return from;
  };
  const auto missing = [](std::int64_t row) {
    return invalid("active_spans", "spans that cover every active row", "none over row " + str(row));
  };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    if (span.begin < 0 || span.end > rows || span.begin >= span.end)
      return invalid("active_spans", "non-empty spans inside [0, " + str(rows) + ")", text(span));
    if (i > 0 && span.begin < spans[i - 1].end)
      return invalid("active_spans", "sorted spans that do not overlap", text(spans[i - 1]) + " then " + text(span));
    if (const std::int64_t row = first_active(covered, span.begin); row < span.begin) return missing(row);
    covered = span.end;
  }
  if (const std::int64_t row = first_active(covered, rows); row < rows) return missing(row);
  return {};
}

}  // namespace lmhead
