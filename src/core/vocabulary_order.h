// Canonical order of the vocabulary: which columns are folded together, and in which order.
//
// The global vocabulary is cut into 8 equal octants when 8 divides vocab_size, else it is one octant;
// each octant into segments of kSegmentColumns from its own start, the last one ragged. Segments of
// an octant are folded in order, octants (and ranks) are merged pairwise as a tree. A rank of 1, 2, 4
// or 8 equal shards holds a subtree, so every rank count gives the same bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/softmax_state.h"

namespace lmhead {

inline constexpr std::int64_t kOctants = 8;
inline constexpr std::int64_t kSegmentColumns = 1024;

struct VocabularyOrder {
  std::int64_t vocab_size;

  LMHEAD_HD std::int64_t octants() const { return vocab_size % kOctants == 0 && vocab_size > 0 ? kOctants : 1; }
  LMHEAD_HD std::int64_t octant_size() const { return vocab_size / octants(); }
};

/// Calls fn(octant, begin, end) with global columns for each non-empty part of an octant that lies in
/// the global range [begin, end), in order.
template <class Fn>
void for_each_octant(VocabularyOrder order, std::int64_t begin, std::int64_t end, Fn&& fn) {
  const std::int64_t size = order.octant_size();
  for (std::int64_t o = 0; o < order.octants(); ++o) {
    const std::int64_t b = std::max(begin, o * size), e = std::min(end, (o + 1) * size);
    if (b < e) fn(o, b, e);
  }
}

/// Calls fn(octant, begin, end) for each segment part in [begin, end), in canonical order. Segment
/// borders are multiples of kSegmentColumns from the octant's start, wherever a shard begins.
template <class Fn>
void for_each_segment(VocabularyOrder order, std::int64_t begin, std::int64_t end, Fn&& fn) {
  for_each_octant(order, begin, end, [&](std::int64_t o, std::int64_t b, std::int64_t e) {
    const std::int64_t origin = o * order.octant_size();
    while (b < e) {
      const std::int64_t next = std::min(e, origin + ((b - origin) / kSegmentColumns + 1) * kSegmentColumns);
      fn(o, b, next);
      b = next;
    }
  });
}

/// Pairwise tree over `count` >= 1 states `stride` apart: the left subtree holds the largest power of
/// two below count. Octants use it inside a rank, combine() over ranks. T: the type it merges in.
template <class From, class T = From>
LMHEAD_HD SoftmaxStateT<T> merge_tree(const SoftmaxStateT<From>* states, std::int64_t count, std::int64_t stride = 1) {
  // Binary counter: level k holds a finished subtree of 2^k leaves. 2^40 states are 16 TiB.
  SoftmaxStateT<T> level[40];
  std::uint64_t held = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    SoftmaxStateT<T> s = state_as<T>(states[i * stride]);
    int k = 0;
    for (; held >> k & 1; ++k) s = merge(level[k], s);
    level[k] = s;
    held = (held >> k | 1) << k;
  }
  int k = 0;
  while (!(held >> k & 1)) ++k;
  SoftmaxStateT<T> s = level[k];
  for (++k; held >> k; ++k) {
    if (held >> k & 1) s = merge(level[k], s);
  }
  return s;
}

}  // namespace lmhead
