// Packing: which sequences share a packed row ("bin"), decided from their lengths alone.
//
// A bin's footprint is what it occupies: every length rounded up to sequence_multiple, their sum rounded up to
// total_multiple (A_s and A_t of lmhead/layout.h). No footprint exceeds the capacity. Equivalently the sum of padded
// lengths s stays within C = capacity - capacity mod total_multiple, the effective capacity.
//
// Everything is deterministic. Items are ordered by padded length, then by smaller index. Cost: O(n log n) time and
// O(n) memory for n lengths, whatever they are.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "lmhead/status.h"

namespace lmhead {

/// How bins are chosen.
enum class PackingAlgorithm : std::uint8_t {
  /// "ffd", first_fit_decreasing: longest first, each into the first bin with room.
  kFirstFitDecreasing,
  /// "mffd", modified_first_fit_decreasing (Johnson and Garey 1985, bound 71/60 OPT + 1). Classes: large s > C/2,
  /// medium s > C/3, small s > C/6, tiny. (1) a bin for each large item, descending; (2) over these bins forward: the
  /// largest medium that fits, at most one; (3) backward over bins without a medium: if the two smallest smalls fit
  /// together, the smallest and the largest other small that still fits; (4) forward: repeatedly the largest remaining
  /// item that fits; (5) what is left by first-fit decreasing into new bins.
  kModifiedFirstFitDecreasing,
  /// "bfd", best_fit_decreasing: longest first, each into the fullest bin with room (the first of equals).
  kBestFitDecreasing,
  /// "concatenative": in the given order, a new bin when the next one does not fit.
  kConcatenative,
  /// "balanced": longest first onto the least loaded of a fixed number of bins, the smallest number tried for which
  /// every bin stays within the capacity; min_bins and bin_multiple enter that number.
  kBalanced,
};

/// The short name of an algorithm.
const char* to_string(PackingAlgorithm algorithm);
/// The inverse; long names too, case ignored. kInvalidArgument "Unknown packing algorithm ..." otherwise.
Result<PackingAlgorithm> packing_algorithm_from_name(std::string_view name);

struct PackingOptions {
  PackingAlgorithm algorithm = PackingAlgorithm::kModifiedFirstFitDecreasing;
  /// At least this many bins, and a multiple of bin_multiple (data-parallel ranks). Further bins take one sequence each
  /// from the end of a donor; donors by (count, index) descending, each drained to one before the next.
  std::int64_t min_bins = 0;
  std::int64_t bin_multiple = 1;
  std::int64_t sequence_multiple = 1;  ///< each sequence's padding
  std::int64_t total_multiple = 1;     ///< each bin's padding
  /// Further bins stay empty and nothing is moved. Without it fewer sequences than bins are an error.
  bool allow_empty = false;
  /// A sequence whose own footprint exceeds the capacity gets a bin of its own instead of an error.
  bool allow_oversize = false;
};

/// Original indices of each bin, in placement order.
using Bins = std::vector<std::vector<std::int64_t>>;

/// Packs `lengths` into bins of `capacity` tokens; every index appears once.
///
/// kInvalidArgument for a length or capacity <= 0, min_bins < 0, a multiple < 1, a sequence beyond the capacity
/// (without allow_oversize) and "Cannot create N bins with only M sequences" (without allow_empty).
Result<Bins> pack(std::span<const std::int64_t> lengths, std::int64_t capacity, const PackingOptions& options = {});

/// Martello and Toth's lower bound L2 on the number of bins of any packing of these padded lengths: the maximum over K
/// of the bound that counts items above C - K apart, pairs nothing with items above C/2 and spreads those of at least K
/// over the rest. Sequences beyond the capacity count one bin each. min_bins and bin_multiple do not enter.
/// kInvalidArgument as for pack(), except for the number of bins.
Result<std::int64_t> packing_lower_bound(std::span<const std::int64_t> lengths, std::int64_t capacity,
                                         const PackingOptions& options = {});

/// How full the bins are. Bin utilization is its real tokens / capacity.
struct PackingMetrics {
  std::int64_t sequences = 0;
  std::int64_t bins = 0;
  std::int64_t empty_bins = 0;
  std::int64_t lower_bound = 0;  ///< L2
  std::int64_t tokens = 0;       ///< real tokens
  std::int64_t footprint = 0;    ///< tokens with all padding of the layout
  double utilization = 0;        ///< tokens / (bins * capacity); 0 without bins
  double waste = 0;              ///< bins / lower_bound - 1; 0 without sequences
  double balance = 1;            ///< 1 - (sample standard deviation / mean) of the bins' utilization
};

/// Metrics of a packing; `bins` must hold every index of `lengths` once (kInvalidArgument).
Result<PackingMetrics> packing_metrics(std::span<const std::int64_t> lengths, std::int64_t capacity, const Bins& bins,
                                       const PackingOptions& options = {});

}  // namespace lmhead
