#include <utility>

#include "packing/items.h"

namespace lmhead::packing {
namespace {

// The items not yet placed. Items of one size are interchangeable but for their index, so a group hands out its
// smallest index first, and a union-find over groups skips those that are used up.
class Pool {
 public:
  explicit Pool(const Items& items) : items_(items), groups_(items.groups), next_(items.groups.size() + 1) {
    std::iota(next_.begin(), next_.end(), 0);
  }

  std::int64_t groups() const { return static_cast<std::int64_t>(groups_.size()); }
  std::int64_t size(std::int64_t group) const { return groups_[group].size; }
  std::int64_t left(std::int64_t group) const { return groups_[group].end - groups_[group].begin; }
  const std::vector<Group>& remaining() const { return groups_; }

  /// First group from `group` on that has items; groups() if there is none.
  std::int64_t find(std::int64_t group) {
    std::int64_t root = group;
    while (next_[root] != root) root = next_[root];
    while (next_[group] != root) group = std::exchange(next_[group], root);
    return root;
  }
  /// First group, of any fill, whose size is at most `room`.
  std::int64_t first_at_most(std::int64_t room) const {
    const auto too_long = [room](const Group& group) { return group.size > room; };
    return std::partition_point(groups_.begin(), groups_.end(), too_long) - groups_.begin();
  }
  std::int64_t take(std::int64_t group) {
    const std::int64_t item = items_.order[groups_[group].begin++];
    if (left(group) == 0) next_[group] = group + 1;
    return item;
  }

 private:
  const Items& items_;
  std::vector<Group> groups_;
  std::vector<std::int64_t> next_;
};

}  // namespace

void modified_first_fit_decreasing(const Items& items, BinLog& log) {
  Pool pool(items);
  // Classes are ranges of groups: k s > C exactly when s > floor(C / k).
  const std::int64_t medium = pool.first_at_most(items.capacity / 2);
  const std::int64_t small = pool.first_at_most(items.capacity / 3);
  const std::int64_t tiny = pool.first_at_most(items.capacity / 6);

  std::vector<std::int64_t> room;
  const auto place = [&](std::int64_t group, std::int64_t bin) {
    log.place(pool.take(group), bin);
    room[bin] -= pool.size(group);
  };

  // 1: a bin for each large item.
  for (std::int64_t group = 0; group < medium; ++group)
    while (pool.left(group) > 0) {
      room.push_back(items.capacity);
      place(group, log.open());
    }
  const std::int64_t bins = log.count();

  // 2: the largest medium that fits.
  std::vector<bool> has_medium(bins, false);
  for (std::int64_t bin = 0; bin < bins; ++bin) {
    const std::int64_t group = pool.find(std::max(medium, pool.first_at_most(room[bin])));
    if (group >= small) continue;
    place(group, bin);
    has_medium[bin] = true;
  }

  // 3: two smalls. `smallest` and `second` only move towards larger groups, so the search is linear in all.
  std::int64_t smallest = tiny - 1;
  for (std::int64_t bin = bins - 1; bin >= 0; --bin) {
    if (has_medium[bin]) continue;
    while (smallest >= small && pool.left(smallest) == 0) --smallest;
    std::int64_t second = smallest;
    if (smallest >= small && pool.left(smallest) == 1) {
      do --second;
      while (second >= small && pool.left(second) == 0);
    }
    if (second < small || pool.size(smallest) + pool.size(second) > room[bin]) break;  // later bins have less room
    place(smallest, bin);
    place(pool.find(std::max(small, pool.first_at_most(room[bin]))), bin);
  }

  // 4: whatever fits, largest first.
  for (std::int64_t bin = 0; bin < bins; ++bin)
    for (std::int64_t group; (group = pool.find(std::max(medium, pool.first_at_most(room[bin])))) < pool.groups();)
      while (pool.left(group) > 0 && pool.size(group) <= room[bin]) place(group, bin);

  // 5: the rest.
  first_fit(items, pool.remaining(), log);
}

}  // namespace lmhead::packing
