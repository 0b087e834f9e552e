// First-fit decreasing, best-fit decreasing, and the packings that keep the given order or balance the load.
#include <queue>
#include <set>
#include <utility>

#include "packing/items.h"

namespace lmhead::packing {

void first_fit(const Items& items, std::span<const Group> groups, BinLog& log) {
  FirstFitTree tree;
  const std::int64_t first_bin = log.count();
  for (const Group& group : groups) {
    // Bins left of the one found have no room for this size, so a whole run goes where its first item goes.
    for (std::int64_t at = group.begin; at < group.end;) {
      std::int64_t bin = tree.find(group.size);
      if (bin < 0) {
        bin = log.open() - first_bin;
        tree.append(items.capacity);
      }
      const std::int64_t fitting = std::max<std::int64_t>(tree.room(bin) / group.size, 1);  // oversize: one
      const std::int64_t run = std::min(fitting, group.end - at);
      for (const std::int64_t stop = at + run; at < stop; ++at) log.place(items.order[at], first_bin + bin);
      tree.take(bin, run * group.size);
    }
  }
}

void first_fit_decreasing(const Items& items, BinLog& log) { first_fit(items, items.groups, log); }

void best_fit_decreasing(const Items& items, BinLog& log) {
  std::set<std::pair<std::int64_t, std::int64_t>> bins;  // (room, bin)
  for (const std::int64_t item : items.order) {
    const std::int64_t size = items.size[item];
    const auto fullest = bins.lower_bound({size, 0});
    std::pair<std::int64_t, std::int64_t> bin{items.capacity, log.count()};
    if (fullest == bins.end()) {
      log.open();
    } else {
      bin = *fullest;
      bins.erase(fullest);
    }
    log.place(item, bin.second);
    bins.insert({bin.first - size, bin.second});
  }
}

void concatenative(const Items& items, BinLog& log) {
  std::int64_t room = 0;
  for (std::int64_t item = 0; item < items.count(); ++item) {
    if (log.count() == 0 || items.size[item] > room) {
      log.open();
      room = items.capacity;
    }
    log.place(item, log.count() - 1);
    room -= items.size[item];
  }
}

namespace {

// Longest first onto the least loaded of `bins` bins, the first of equals. False as soon as a bin would overflow:
// if the least loaded one has no room, none has. Writes the bin of each position of items.order from `first` on.
bool spread(const Items& items, std::int64_t first, std::int64_t bins, std::vector<std::int64_t>& bin_of) {
  using Load = std::pair<std::int64_t, std::int64_t>;  // (load, bin)
  std::vector<Load> loads(bins);
  for (std::int64_t bin = 0; bin < bins; ++bin) loads[bin].second = bin;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> least(std::greater<>{}, std::move(loads));
  for (std::int64_t at = first; at < items.count(); ++at) {
    auto [load, bin] = least.top();
    const std::int64_t size = items.size[items.order[at]];
    if (size > items.capacity - load) return false;
    least.pop();
    least.push({load + size, bin});
    bin_of[at] = bin;
  }
  return true;
}

}  // namespace

void balanced(const Items& items, const PackingOptions& options, BinLog& log) {
  // Oversize sequences come first in the order and get bins of their own.
  std::int64_t first = 0;
  while (first < items.count() && items.size[items.order[first]] > items.capacity) ++first;
  for (std::int64_t at = 0; at < first; ++at) log.place(items.order[at], log.open());

  // Fewer bins than the bound never work and one a sequence always does. Between them: gallop up, then bisect, in
  // steps that keep the total a multiple, since bins split off afterwards would spoil the balance.
  const std::int64_t rest = items.count() - first;
  const std::int64_t fewest = std::min(target_bins(lower_bound(items), options) - first, rest);
  const auto bins_at = [&](std::int64_t step) {
    return step == 0 ? fewest : std::min(fewest + step * options.bin_multiple, rest);
  };
  std::vector<std::int64_t> bin_of(items.count());
  const auto works = [&](std::int64_t step) { return spread(items, first, bins_at(step), bin_of); };
  std::int64_t low = -1, high = 0;
  while (!works(high)) {
    low = high;
    high = 2 * high + 1;
  }
  while (high - low > 1) {
    const std::int64_t middle = low + (high - low) / 2;
    (works(middle) ? high : low) = middle;
  }
  works(high);
  for (std::int64_t bin = bins_at(high); bin > 0; --bin) log.open();
  for (std::int64_t at = first; at < items.count(); ++at) log.place(items.order[at], first + bin_of[at]);
}

}  // namespace lmhead::packing
