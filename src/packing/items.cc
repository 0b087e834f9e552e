#include "packing/items.h"

#include <limits>
#include <string>

#include "core/return_if_error.h"
#include "packing/errors.h"

namespace lmhead::packing {
namespace {

// Indices by descending size, ties by ascending index: a stable radix sort, 16 bits a pass, over as many passes as the
// largest size needs (one for contexts below 64Ki tokens).
std::vector<std::int64_t> descending_order(const std::vector<std::int64_t>& size) {
  constexpr std::int64_t kDigits = 1 << 16;
  std::vector<std::int64_t> order(size.size()), next(size.size());
  std::iota(order.begin(), order.end(), 0);
  const std::int64_t largest = size.empty() ? 0 : *std::max_element(size.begin(), size.end());
  if (std::ssize(size) < kDigits / 16) {  // a pass would cost more than the whole comparison sort
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) { return size[a] > size[b]; });
    return order;
  }
  for (int shift = 0; shift < 63 && (largest >> shift) > 0; shift += 16) {
    std::vector<std::int64_t> position(kDigits, 0);
    const auto digit = [&](std::int64_t item) { return kDigits - 1 - ((size[item] >> shift) & (kDigits - 1)); };
    for (const std::int64_t item : order) ++position[digit(item)];
    std::exclusive_scan(position.begin(), position.end(), position.begin(), std::int64_t{0});
    for (const std::int64_t item : order) next[position[digit(item)]++] = item;
    order.swap(next);
  }
  return order;
}

}  // namespace

Result<Items> make_items(std::span<const std::int64_t> lengths, std::int64_t capacity, const PackingOptions& options) {
  LMHEAD_RETURN_IF_ERROR(check_at_least("capacity", capacity, 1));
  LMHEAD_RETURN_IF_ERROR(check_at_least("min_bins", options.min_bins, 0));
  LMHEAD_RETURN_IF_ERROR(check_at_least("bin_multiple", options.bin_multiple, 1));
  LMHEAD_RETURN_IF_ERROR(check_at_least("sequence_multiple", options.sequence_multiple, 1));
  LMHEAD_RETURN_IF_ERROR(check_at_least("total_multiple", options.total_multiple, 1));

  Items items;
  items.capacity = capacity - capacity % options.total_multiple;
  items.size.resize(lengths.size());
  std::int64_t footprints = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const auto name = [&] { return "lengths[" + str(static_cast<std::int64_t>(i)) + "]"; };
    if (lengths[i] < 1) return invalid(name(), "an integer >= 1", str(lengths[i]));
    const std::optional<std::int64_t> padded = round_up(lengths[i], options.sequence_multiple);
    const std::optional<std::int64_t> footprint = padded ? round_up(*padded, options.total_multiple) : padded;
    if (!footprint || __builtin_add_overflow(footprints, *footprint, &footprints))
      return invalid("lengths", "footprints whose sum is within 64 bits", "a larger one at " + name());
    if (*padded > items.capacity && !options.allow_oversize)
      return invalid(name(), "a footprint <= capacity " + str(capacity) + " (or allow_oversize)",
                     "length " + str(lengths[i]) + " with footprint " + str(*footprint));
    items.size[i] = *padded;
  }
  items.order = descending_order(items.size);
  for (std::int64_t at = 0; at < items.count(); ++at) {
    const std::int64_t size = items.size[items.order[at]];
    if (items.groups.empty() || items.groups.back().size != size) items.groups.push_back({size, at, at});
    items.groups.back().end = at + 1;
  }
  return items;
}

Bins BinLog::finish() const {
  std::vector<std::int64_t> counts(count_, 0);
  for (const std::int64_t bin : bins_) ++counts[bin];
  Bins bins(count_);
  for (std::int64_t bin = 0; bin < count_; ++bin) bins[bin].reserve(counts[bin]);
  for (std::size_t i = 0; i < items_.size(); ++i) bins[bins_[i]].push_back(items_[i]);
  return bins;
}

std::int64_t FirstFitTree::find(std::int64_t size) const {
  if (tree_[1] < size) return -1;
  std::int64_t node = 1;
  while (node < leaves_) node = 2 * node + (tree_[2 * node] < size ? 1 : 0);
  return node - leaves_;
}

void FirstFitTree::append(std::int64_t room) {
  if (count_ == leaves_) {
    std::vector<std::int64_t> leaves(tree_.begin() + leaves_, tree_.end());
    leaves_ *= 2;
    tree_.assign(2 * leaves_, 0);
    std::copy(leaves.begin(), leaves.end(), tree_.begin() + leaves_);
    for (std::int64_t node = leaves_ - 1; node > 0; --node)
      tree_[node] = std::max(tree_[2 * node], tree_[2 * node + 1]);
  }
  tree_[leaves_ + count_] = room;
  raise(leaves_ + count_++);
}

void FirstFitTree::take(std::int64_t bin, std::int64_t size) {
  tree_[leaves_ + bin] -= size;
  raise(leaves_ + bin);
}

// Brings the maxima above a changed leaf up to date; stops where nothing changes any more.
void FirstFitTree::raise(std::int64_t node) {
  for (node /= 2; node > 0; node /= 2) {
    const std::int64_t most = std::max(tree_[2 * node], tree_[2 * node + 1]);
    if (tree_[node] == most) break;
    tree_[node] = most;
  }
}

}  // namespace lmhead::packing
