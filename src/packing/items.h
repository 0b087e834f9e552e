// The checked input of a packing: padded lengths, the order in which every algorithm takes them, and bins in the
// making.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "lmhead/packing.h"

namespace lmhead::packing {

/// Items of one padded length, in ascending index: order[begin, end).
struct Group {
  std::int64_t size = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

struct Items {
  std::int64_t capacity = 0;        ///< effective
  std::vector<std::int64_t> size;   ///< [n] padded lengths
  std::vector<std::int64_t> order;  ///< [n] indices by descending size, then ascending index
  std::vector<Group> groups;        ///< runs of equal size in `order`, descending

  std::int64_t count() const { return static_cast<std::int64_t>(size.size()); }
};

/// Checks every argument and sorts.
Result<Items> make_items(std::span<const std::int64_t> lengths, std::int64_t capacity, const PackingOptions& options);

/// Bins as a log of placements: cheap to write, and turned into exactly sized vectors at the end.
class BinLog {
 public:
  explicit BinLog(std::int64_t items) {
    items_.reserve(items);
    bins_.reserve(items);
  }

  std::int64_t open() { return count_++; }
  std::int64_t count() const { return count_; }
  void place(std::int64_t item, std::int64_t bin) {
    items_.push_back(item);
    bins_.push_back(bin);
  }
  Bins finish() const;

 private:
  std::int64_t count_ = 0;
  std::vector<std::int64_t> items_, bins_;
};

/// Bins by remaining room, with "leftmost bin that has room for s" in O(log bins): a tournament tree of maxima.
class FirstFitTree {
 public:
  /// Leftmost bin with at least `size` >= 1 of room, or -1.
  std::int64_t find(std::int64_t size) const;
  void append(std::int64_t room);
  void take(std::int64_t bin, std::int64_t size);
  std::int64_t room(std::int64_t bin) const { return tree_[leaves_ + bin]; }

 private:
  void raise(std::int64_t node);

  std::int64_t leaves_ = 1, count_ = 0;
  std::vector<std::int64_t> tree_ =
      std::vector<std::int64_t>(2, 0);  // node k has children 2k and 2k + 1; the root is 1
};

// The algorithms; each fills an empty log.
void first_fit_decreasing(const Items& items, BinLog& log);
void modified_first_fit_decreasing(const Items& items, BinLog& log);
void best_fit_decreasing(const Items& items, BinLog& log);
void concatenative(const Items& items, BinLog& log);
void balanced(const Items& items, const PackingOptions& options, BinLog& log);

/// First-fit, descending, of the given groups into bins opened from now on.
void first_fit(const Items& items, std::span<const Group> groups, BinLog& log);

/// Martello-Toth L2.
std::int64_t lower_bound(const Items& items);

/// `bins` raised to min_bins and then to a multiple of bin_multiple.
std::int64_t target_bins(std::int64_t bins, const PackingOptions& options);

}  // namespace lmhead::packing
