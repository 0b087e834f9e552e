// Sequence lengths for `lmhead pack`: from a file, standard input, or drawn from a table of quantiles.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lmhead::tools {

/// Lengths of `path`: one a line (.txt, or - for standard input), a column `length` (.tsv), or a field `length` of each
/// line's object (.jsonl). Blank lines are skipped. Throws bad input with file and line.
std::vector<std::int64_t> read_lengths(const std::string& path);

/// `count` lengths of the row `set` of a table with the columns set, min, p<percent>..., max (shapes/lengths.tsv), by
/// inverting its piecewise linear distribution function. The same seed gives the same lengths on every machine.
std::vector<std::int64_t> draw_lengths(const std::string& table, const std::string& set, std::int64_t count,
                                       std::uint64_t seed);

}  // namespace lmhead::tools
