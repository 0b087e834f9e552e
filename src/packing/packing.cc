#include "lmhead/packing.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "packing/errors.h"
#include "packing/items.h"

namespace lmhead {

using packing::invalid;
using packing::Items;
using packing::str;

namespace {

constexpr std::int64_t kMaxBins = std::int64_t{1} << 31;

struct AlgorithmName {
  PackingAlgorithm algorithm;
  const char* name;
  const char* long_name;
};
constexpr AlgorithmName kAlgorithms[] = {
    {PackingAlgorithm::kFirstFitDecreasing, "ffd", "first_fit_decreasing"},
    {PackingAlgorithm::kModifiedFirstFitDecreasing, "mffd", "modified_first_fit_decreasing"},
    {PackingAlgorithm::kBestFitDecreasing, "bfd", "best_fit_decreasing"},
    {PackingAlgorithm::kConcatenative, "concatenative", "concatenative"},
    {PackingAlgorithm::kBalanced, "balanced", "balanced"},
};

// Raises the number of bins to `target` by moving one sequence into each new bin.
void split_donors(Bins& bins, std::int64_t target) {
  std::vector<std::int64_t> donors(bins.size());
  std::iota(donors.begin(), donors.end(), 0);
  std::sort(donors.begin(), donors.end(), [&](std::int64_t a, std::int64_t b) {
    return std::pair(bins[a].size(), a) > std::pair(bins[b].size(), b);
  });
  auto donor = donors.begin();
  while (std::ssize(bins) < target) {
    while (bins[*donor].size() == 1) ++donor;  // target <= sequences: one with more exists
    const std::int64_t item = bins[*donor].back();
    bins[*donor].pop_back();
    bins.push_back({item});
  }
}

}  // namespace

const char* to_string(PackingAlgorithm algorithm) {
  for (const AlgorithmName& entry : kAlgorithms)
    if (entry.algorithm == algorithm) return entry.name;
  return "unknown";
}

Result<PackingAlgorithm> packing_algorithm_from_name(std::string_view name) {
  std::string lower(name);
  std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const AlgorithmName& entry : kAlgorithms)
    if (lower == entry.name || lower == entry.long_name) return entry.algorithm;
  return Status{StatusCode::kInvalidArgument,
                "Unknown packing algorithm: expected ffd, mffd, bfd, concatenative or balanced, got \"" +
                    std::string(name) + "\""};
}

std::int64_t packing::target_bins(std::int64_t bins, const PackingOptions& options) {
  return packing::round_up(std::max(bins, options.min_bins), options.bin_multiple)
      .value_or(std::numeric_limits<std::int64_t>::max());
}

Result<Bins> pack(std::span<const std::int64_t> lengths, std::int64_t capacity, const PackingOptions& options) {
  const Result<Items> items = packing::make_items(lengths, capacity, options);
  if (!items) return items.status();

  packing::BinLog log(items->count());
  switch (options.algorithm) {
    case PackingAlgorithm::kFirstFitDecreasing: packing::first_fit_decreasing(*items, log); break;
    case PackingAlgorithm::kModifiedFirstFitDecreasing: packing::modified_first_fit_decreasing(*items, log); break;
    case PackingAlgorithm::kBestFitDecreasing: packing::best_fit_decreasing(*items, log); break;
    case PackingAlgorithm::kConcatenative: packing::concatenative(*items, log); break;
    case PackingAlgorithm::kBalanced: packing::balanced(*items, options, log); break;
  }
  const std::int64_t target = packing::target_bins(log.count(), options);
  if (target > kMaxBins) return invalid("min_bins and bin_multiple", "at most " + str(kMaxBins) + " bins", str(target));
  if (target > items->count() && !options.allow_empty)
    return Status{StatusCode::kInvalidArgument, "Cannot create " + str(target) + " bins with only " +
                                                    str(items->count()) +
                                                    " sequences: lower min_bins or bin_multiple, or set allow_empty"};
  Bins bins = log.finish();
  if (options.allow_empty)
    bins.resize(target);
  else
    split_donors(bins, target);
  return bins;
}

Result<std::int64_t> packing_lower_bound(std::span<const std::int64_t> lengths, std::int64_t capacity,
                                         const PackingOptions& options) {
  const Result<Items> items = packing::make_items(lengths, capacity, options);
  if (!items) return items.status();
  return packing::lower_bound(*items);
}

std::int64_t packing::lower_bound(const Items& items) {
  // Groups run from long to short. For each K that is a size <= C/2 (and K = 0): J1 = sizes > C - K, J2 = the other
  // sizes > C/2, J3 = sizes in [K, C/2]. Items of J1 and J2 need a bin each; J3 fills the room of J2's bins first.
  using Wide = __int128;
  const std::int64_t capacity = items.capacity;
  const std::vector<Group>& groups = items.groups;
  const std::int64_t count = std::ssize(groups);
  std::int64_t oversize = 0, half = 0;
  while (oversize < count && groups[oversize].size > capacity) ++oversize;
  half = oversize;
  Wide large_sum = 0;  // J1 and J2 together
  for (; half < count && groups[half].size > capacity - groups[half].size; ++half)
    large_sum += Wide{groups[half].size} * (groups[half].end - groups[half].begin);
  const std::int64_t alone = oversize == count ? items.count() : groups[oversize].begin;
  const std::int64_t large = (half == count ? items.count() : groups[half].begin) - alone;

  std::int64_t first = half - 1;  // last group of J1 or the one before J2
  Wide small_sum = 0, alone_sum = large_sum;
  std::int64_t best = large;
  for (std::int64_t group = half; group < count; ++group) {
    // As K falls, J1 shrinks: groups from long to short stay in it only while size > C - K.
    small_sum += Wide{groups[group].size} * (groups[group].end - groups[group].begin);
    while (first >= oversize && groups[first].size <= capacity - groups[group].size) {
      alone_sum -= Wide{groups[first].size} * (groups[first].end - groups[first].begin);
      --first;
    }
    const std::int64_t in_j1 = first < oversize ? 0 : groups[first].end - alone;
    const Wide room = Wide{large - in_j1} * capacity - (large_sum - alone_sum);
    const Wide excess = small_sum - room;
    const std::int64_t more = excess > 0 ? static_cast<std::int64_t>((excess + capacity - 1) / capacity) : 0;
    best = std::max(best, large + more);
  }
  // K = 0 keeps J1 empty and counts everything: the volume bound.
  if (capacity > 0) best = std::max(best, static_cast<std::int64_t>((large_sum + small_sum + capacity - 1) / capacity));
  return alone + best;
}

Result<PackingMetrics> packing_metrics(std::span<const std::int64_t> lengths, std::int64_t capacity, const Bins& bins,
                                       const PackingOptions& options) {
  const Result<Items> items = packing::make_items(lengths, capacity, options);
  if (!items) return items.status();
  PackingMetrics metrics;
  metrics.sequences = items->count();
  metrics.bins = std::ssize(bins);
  metrics.lower_bound = packing::lower_bound(*items);
  std::vector<bool> seen(lengths.size(), false);
  std::vector<double> load;
  for (const std::vector<std::int64_t>& bin : bins) {
    std::int64_t tokens = 0, padded = 0;
    for (const std::int64_t index : bin) {
      if (index < 0 || index >= items->count() || seen[index])
        return invalid("bins", "every index in [0, " + str(items->count()) + ") once", "index " + str(index));
      seen[index] = true;
      tokens += lengths[index];
      padded += items->size[index];
    }
    metrics.empty_bins += bin.empty();
    metrics.tokens += tokens;
    metrics.footprint += packing::round_up(padded, options.total_multiple).value_or(padded);
    load.push_back(static_cast<double>(tokens) / static_cast<double>(capacity));
  }
  if (const auto missing = std::find(seen.begin(), seen.end(), false); missing != seen.end())
    return invalid("bins", "every index in [0, " + str(items->count()) + ") once",
                   "none with index " + str(missing - seen.begin()));

  if (metrics.lower_bound > 0)
    metrics.waste = static_cast<double>(metrics.bins) / static_cast<double>(metrics.lower_bound) - 1;
  if (load.empty()) return metrics;
  const double count = static_cast<double>(load.size());
  metrics.utilization = std::accumulate(load.begin(), load.end(), 0.0) / count;
  if (load.size() > 1 && metrics.utilization > 0) {
    double squares = 0;
    for (const double u : load) squares += (u - metrics.utilization) * (u - metrics.utilization);
    metrics.balance = 1 - std::sqrt(squares / (count - 1)) / metrics.utilization;
  }
  return metrics;
}

}  // namespace lmhead
