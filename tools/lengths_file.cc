#include "lengths_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string_view>

#include "commands.h"

namespace lmhead::tools {
namespace {

// The lines of a text file with their numbers; throws bad input for a file that cannot be read.
class Lines {
 public:
  explicit Lines(const std::string& path) : name_(path == "-" ? "stdin" : path) {
    if (path == "-") return;
    file_.open(path);
    if (!file_ || std::filesystem::is_directory(path)) throw bad_input(fmt::format("{}: cannot be read", path));
  }
  bool next(std::string& line) {
    std::istream& in = file_.is_open() ? static_cast<std::istream&>(file_) : std::cin;
    while (std::getline(in, line)) {
      ++number_;
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (line.find_first_not_of(" \t") != std::string::npos) return true;
    }
    if (in.bad() || (!file_.is_open() && std::ferror(stdin) != 0)) throw failed(fmt::format("{}: read error", name_));
    return false;
  }
  CommandError wrong(const std::string& expected, const std::string& got) const {
    return bad_input(fmt::format("{}:{}: expected {}, got {}", name_, number_, expected, got));
  }

 private:
  std::string name_;
  std::ifstream file_;
  std::int64_t number_ = 0;
};

std::vector<std::string> fields(const std::string& line) {
  std::vector<std::string> list;
  for (std::size_t begin = 0; begin <= line.size();) {
    const std::size_t end = std::min(line.find('\t', begin), line.size());
    list.push_back(line.substr(begin, end - begin));
    begin = end + 1;
  }
  return list;
}

template <class Number>
Number parse(const Lines& lines, std::string_view text, const char* what) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) throw lines.wrong(what, fmt::format("\"{}\"", text));
  return number;
}

// Index of a header's column; throws when there is none.
std::size_t column(const Lines& lines, const std::vector<std::string>& header, const std::string& name) {
  const auto at = std::find(header.begin(), header.end(), name);
  if (at == header.end())
    throw lines.wrong(fmt::format("a column \"{}\"", name), fmt::format("{}", fmt::join(header, ", ")));
  return static_cast<std::size_t>(at - header.begin());
}

bool ends_with(const std::string& path, std::string_view suffix) { return std::string_view(path).ends_with(suffix); }

}  // namespace

std::vector<std::int64_t> read_lengths(const std::string& path) {
  constexpr const char* kInteger = "an integer length";
  if (path != "-" && !ends_with(path, ".txt") && !ends_with(path, ".tsv") && !ends_with(path, ".jsonl"))
    throw bad_input(fmt::format("LENGTHS: expected a .txt, .tsv or .jsonl file, or - for stdin, got {}", path));
  Lines lines(path);
  std::vector<std::int64_t> lengths;
  std::string line;
  if (ends_with(path, ".tsv")) {
    if (!lines.next(line)) throw lines.wrong("a header with a column \"length\"", "an empty file");
    const std::vector<std::string> header = fields(line);
    const std::size_t at = column(lines, header, "length");
    while (lines.next(line)) {
      const std::vector<std::string> row = fields(line);
      if (row.size() != header.size())
        throw lines.wrong(fmt::format("{} fields", header.size()), fmt::format("{}", row.size()));
      lengths.push_back(parse<std::int64_t>(lines, row[at], kInteger));
    }
  } else if (ends_with(path, ".jsonl")) {
    while (lines.next(line)) {
      const nlohmann::json object = nlohmann::json::parse(line, nullptr, false);
      const nlohmann::json length = object.is_object() ? object.value("length", nlohmann::json()) : nlohmann::json();
      constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
      if (!length.is_number_integer() || (length.is_number_unsigned() && length.get<std::uint64_t>() > kMost))
        throw lines.wrong("an object with an integer \"length\"", line.size() > 60 ? line.substr(0, 60) + "..." : line);
      lengths.push_back(length.get<std::int64_t>());
    }
  } else {
    while (lines.next(line)) lengths.push_back(parse<std::int64_t>(lines, line, kInteger));
  }
  return lengths;
}

std::vector<std::int64_t> draw_lengths(const std::string& table, const std::string& set, std::int64_t count,
                                       std::uint64_t seed) {
  if (count < 1) throw bad_input(fmt::format("--count: expected an integer >= 1, got {}", count));
  Lines lines(table);
  std::string line;
  std::vector<std::string> header, names;
  std::vector<std::pair<double, double>> quantiles;  // (probability, length)
  while (lines.next(line)) {
    if (line.front() == '#') continue;
    const std::vector<std::string> row = fields(line);
    if (header.empty()) {
      header = row;
      for (const char* name : {"set", "min", "max"}) column(lines, header, name);
      continue;
    }
    if (row.size() != header.size())
      throw lines.wrong(fmt::format("{} fields", header.size()), fmt::format("{}", row.size()));
    names.push_back(row[column(lines, header, "set")]);
    if (names.back() != set) continue;
    for (std::size_t i = 0; i < header.size(); ++i) {
      const std::string& name = header[i];
      const bool percent = name.size() > 1 && name[0] == 'p' && std::isdigit(static_cast<unsigned char>(name[1]));
      if (!percent && name != "min" && name != "max") continue;
      const double at = percent ? parse<double>(lines, name.substr(1), "a percentile") / 100 : name == "min" ? 0 : 1;
      quantiles.emplace_back(at, parse<double>(lines, row[i], "a number"));
    }
    std::sort(quantiles.begin(), quantiles.end());
    for (std::size_t i = 1; i < quantiles.size(); ++i)
      if (!(quantiles[i - 1].first < quantiles[i].first && quantiles[i - 1].second <= quantiles[i].second))
        throw lines.wrong("quantiles that rise from 0 to 1", "others");
  }
  if (quantiles.empty())
    throw bad_input(fmt::format("--set: expected one of {} in {}, got {}", fmt::join(names, ", "), table, set));

  std::mt19937_64 random(seed);
  std::vector<std::int64_t> lengths(static_cast<std::size_t>(count));
  for (std::int64_t& length : lengths) {
    const double u = static_cast<double>(random() >> 11) * 0x1p-53;  // std distributions differ between libraries
    const auto right = std::upper_bound(quantiles.begin() + 1, quantiles.end() - 1, std::pair(u, 0.0),
                                        [](const auto& a, const auto& b) { return a.first < b.first; });
    const auto [p0, l0] = right[-1];
    const auto [p1, l1] = *right;
    length = std::max<std::int64_t>(1, std::llround(l0 + (l1 - l0) * (u - p0) / (p1 - p0)));
  }
  return lengths;
}

}  // namespace lmhead::tools
