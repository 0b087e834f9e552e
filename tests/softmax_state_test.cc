// The merge: identity, exactness in canonical order, associativity within rounding.
#include "core/softmax_state.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "core/vocabulary_order.h"

namespace lmhead {
namespace {

SoftmaxStateT<double> one_column(double z) { return {z, 1.0, 0.0, INFINITY}; }

TEST(SoftmaxState, EmptyIsTheIdentityBitForBit) {
  const SoftmaxState s{3.25f, 1.5f, -0.75f, 2.0f};
  for (const SoftmaxState& m : {merge(s, empty_state()), merge(empty_state(), s)}) {
    EXPECT_EQ(m.max, s.max);
    EXPECT_EQ(m.sum, s.sum);
    EXPECT_EQ(m.weighted, s.weighted);
    EXPECT_EQ(m.target, s.target);
  }
  const SoftmaxState e = merge(empty_state(), empty_state());
  EXPECT_EQ(e.sum, 0.0f);
  EXPECT_EQ(e.target, INFINITY);
}

TEST(SoftmaxState, NaNSurvivesEitherSide) {
  const SoftmaxState bad{NAN, NAN, NAN, INFINITY}, good{1.0f, 1.0f, 0.0f, 1.0f};
  EXPECT_TRUE(std::isnan(finish(merge(bad, good), true).logprob));
  EXPECT_TRUE(std::isnan(finish(merge(good, bad), true).logprob));
  EXPECT_TRUE(std::isnan(finish(merge(good, bad), false).logprob));
}

TEST(SoftmaxState, UniformAndPeaked) {
  SoftmaxStateT<double> flat = empty_state<double>();
  for (int i = 0; i < 1000; ++i) flat = merge(flat, one_column(-120.0));
  EXPECT_NEAR(finish(flat, true).entropy, std::log(1000.0), 1e-12);
  SoftmaxState peaked = merge(SoftmaxState{1000.0f, 1.0f, 0.0f, 1000.0f}, SoftmaxState{-1000.0f, 1.0f, 0.0f, INFINITY});
  EXPECT_EQ(finish(peaked, true).logprob, 0.0f);
  EXPECT_EQ(finish(peaked, true).entropy, 0.0f);
}

TEST(SoftmaxState, AssociativeWithinRoundingOverRandomTrees) {
  std::mt19937 rng(7);
  std::normal_distribution<double> logits(0.0, 8.0);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<double> z(257);
    for (double& v : z) v = logits(rng);
    double max = *std::max_element(z.begin(), z.end()), sum = 0, weighted = 0;
    for (double v : z) {
      sum += std::exp(v - max);
      weighted += std::exp(v - max) * (v - max);
    }
    const double entropy = std::log(sum) - weighted / sum, lse = max + std::log(sum);
    // Random tree in fp32: merge two random members until one is left.
    std::vector<SoftmaxState> parts;
    for (double v : z) parts.push_back({static_cast<float>(v), 1.0f, 0.0f, INFINITY});
    while (parts.size() > 1) {
      const std::size_t i = rng() % parts.size();
      std::swap(parts[i], parts.back());
      const SoftmaxState a = parts.back();
      parts.pop_back();
      const std::size_t j = rng() % parts.size();
      parts[j] = merge(parts[j], a);
    }
    const RowResult<float> r = finish(parts[0], true);
    EXPECT_TRUE(std::abs(r.entropy - entropy) <= 4e-6) << r.entropy << " against " << entropy;
    EXPECT_TRUE(std::abs(r.lse - lse) <= 4e-6) << r.lse << " against " << lse;
  }
}

TEST(VocabularyOrder, TreeOfSubtreesEqualsTheWholeTreeBitForBit) {
  std::mt19937 rng(3);
  std::normal_distribution<float> logits(0.0f, 8.0f);
  SoftmaxState leaves[kOctants];
  for (SoftmaxState& s : leaves) s = {logits(rng), 1.0f + std::abs(logits(rng)), -std::abs(logits(rng)), INFINITY};
  const SoftmaxState whole = merge_tree(leaves, kOctants);
  for (int ranks : {1, 2, 4, 8}) {
    std::vector<SoftmaxState> rank_states;
    for (int r = 0; r < ranks; ++r) {
      // A rank's own tree has all 8 leaves, the others empty.
      SoftmaxState own[kOctants];
      for (int o = 0; o < kOctants; ++o) own[o] = o / (kOctants / ranks) == r ? leaves[o] : empty_state();
      rank_states.push_back(merge_tree(own, kOctants));
    }
    const SoftmaxState m = merge_tree(rank_states.data(), ranks);
    EXPECT_EQ(m.max, whole.max);
    EXPECT_EQ(m.sum, whole.sum) << ranks;
    EXPECT_EQ(m.weighted, whole.weighted) << ranks;
  }
}

TEST(VocabularyOrder, SegmentsCoverAShardOnceOnTheGlobalGrid) {
  for (std::int64_t vocab : {1, 7, 8, 50257, 151936, 131072}) {
    const VocabularyOrder order{vocab};
    for (std::int64_t shards : {1, 2, 3, 8}) {
      std::int64_t covered = 0;
      for (std::int64_t s = 0; s < shards; ++s) {
        const std::int64_t begin = vocab * s / shards, end = vocab * (s + 1) / shards;
        std::int64_t at = begin;
        for_each_segment(order, begin, end, [&](std::int64_t octant, std::int64_t b, std::int64_t e) {
          EXPECT_EQ(b, at);
          EXPECT_LE(e - b, kSegmentColumns);
          EXPECT_EQ(b / order.octant_size(), octant);
          EXPECT_EQ((e - 1) / order.octant_size(), octant);
          const std::int64_t origin = octant * order.octant_size();
          EXPECT_EQ((b - origin) / kSegmentColumns, (e - 1 - origin) / kSegmentColumns);
          at = e;
        });
        EXPECT_EQ(at, end);
        covered += end - begin;
      }
      EXPECT_EQ(covered, vocab);
    }
  }
}

}  // namespace
}  // namespace lmhead
