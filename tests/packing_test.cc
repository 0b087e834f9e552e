// Packing: published values, every algorithm against its plain definition, bounds, bin counts and errors.
#include "lmhead/packing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace lmhead {
namespace {

using Ints = std::vector<std::int64_t>;
using enum PackingAlgorithm;
constexpr PackingAlgorithm kAll[] = {kFirstFitDecreasing, kModifiedFirstFitDecreasing, kBestFitDecreasing,
                                     kConcatenative, kBalanced};

PackingOptions with(PackingAlgorithm algorithm) {
  PackingOptions options;
  options.algorithm = algorithm;
  return options;
}

Bins packed(const Ints& lengths, std::int64_t capacity, const PackingOptions& options = {}) {
  Result<Bins> bins = pack(lengths, capacity, options);
  EXPECT_TRUE(bins.ok()) << bins.status().to_string();
  return bins.ok() ? *bins : Bins{};
}

std::string error(const Ints& lengths, std::int64_t capacity, const PackingOptions& options = {}) {
  const Status status = pack(lengths, capacity, options).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Every index once, and every footprint within the capacity unless it is one oversize sequence alone.
void expect_valid(const Ints& lengths, std::int64_t capacity, const PackingOptions& options, const Bins& bins) {
  std::vector<int> seen(lengths.size(), 0);
  for (const Ints& bin : bins) {
    std::int64_t sum = 0;
    for (const std::int64_t index : bin) {
      ASSERT_TRUE(index >= 0 && index < std::ssize(lengths));
      ++seen[index];
      sum += round_up(lengths[index], options.sequence_multiple);
    }
    if (!options.allow_empty) {
      EXPECT_FALSE(bin.empty());
    }
    if (!(options.allow_oversize && bin.size() == 1)) {
      EXPECT_LE(round_up(sum, options.total_multiple), capacity);
    }
  }
  for (const int times : seen) EXPECT_EQ(times, 1);
  EXPECT_GE(std::ssize(bins), options.min_bins);
  EXPECT_EQ(std::ssize(bins) % options.bin_multiple, 0);
}

// The plain definitions, quadratic and without any clever structure.
struct Plain {
  std::int64_t capacity;
  Ints size, order;
  Bins bins;
  Ints room;
  std::vector<bool> used;

  Plain(const Ints& lengths, std::int64_t full, const PackingOptions& options)
      : capacity(full - full % options.total_multiple), order(lengths.size()), used(lengths.size(), false) {
    for (const std::int64_t length : lengths) size.push_back(round_up(length, options.sequence_multiple));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return size[a] > size[b]; });
  }
  void open() {
    bins.emplace_back();
    room.push_back(capacity);
  }
  void place(std::int64_t item, std::size_t bin) {
    bins[bin].push_back(item);
    room[bin] -= size[item];
    used[item] = true;
  }
  void first_fit(std::size_t from) {
    for (const std::int64_t item : order) {
      if (used[item]) continue;
      std::size_t bin = from;
      while (bin < bins.size() && room[bin] < size[item]) ++bin;
      if (bin == bins.size()) open();
      place(item, bin);
    }
  }
  void best_fit() {
    for (const std::int64_t item : order) {
      std::size_t best = bins.size();
      for (std::size_t bin = 0; bin < bins.size(); ++bin)
        if (room[bin] >= size[item] && (best == bins.size() || room[bin] < room[best])) best = bin;
      if (best == bins.size()) open();
      place(item, best);
    }
  }
  // First unused item, in order, of a class and of at most `limit` tokens; -1 if there is none.
  std::int64_t largest(const std::function<bool(std::int64_t)>& in_class, std::int64_t limit) {
    for (const std::int64_t item : order)
      if (!used[item] && in_class(size[item]) && size[item] <= limit) return item;
    return -1;
  }
  void modified() {
    const auto large = [&](std::int64_t s) { return 2 * s > capacity; };
    const auto medium = [&](std::int64_t s) { return 3 * s > capacity && !large(s); };
    const auto small = [&](std::int64_t s) { return 6 * s > capacity && 3 * s <= capacity; };
    const auto any = [](std::int64_t) { return true; };
    for (const std::int64_t item : order)
      if (large(size[item])) {
        open();
        place(item, bins.size() - 1);
      }
    const std::size_t larges = bins.size();
    std::vector<bool> has_medium(larges, false);
    for (std::size_t bin = 0; bin < larges; ++bin)
      if (const std::int64_t item = largest(medium, room[bin]); item >= 0) {
        place(item, bin);
        has_medium[bin] = true;
      }
    for (std::size_t bin = larges; bin-- > 0;) {
      if (has_medium[bin]) continue;
      Ints smalls;  // ascending length, then ascending index
      for (std::int64_t item = 0; item < std::ssize(size); ++item)
        if (!used[item] && small(size[item])) smalls.push_back(item);
      std::stable_sort(smalls.begin(), smalls.end(), [&](auto a, auto b) { return size[a] < size[b]; });
      if (smalls.size() < 2 || size[smalls[0]] + size[smalls[1]] > room[bin]) continue;
      place(smalls[0], bin);
      place(largest(small, room[bin]), bin);
    }
    for (std::size_t bin = 0; bin < larges; ++bin)
      for (std::int64_t item; (item = largest(any, room[bin])) >= 0;) place(item, bin);
    first_fit(larges);
  }
};

TEST(Packing, PublishedValues) {
  EXPECT_EQ(packed({60, 55, 45, 40, 30, 25, 20, 10, 5}, 100), (Bins{{0, 3}, {1, 2}, {4, 5, 6, 7, 8}}));
  EXPECT_EQ(packed({14, 91, 25, 37, 33, 22, 34, 99, 30}, 100), (Bins{{7}, {1}, {3, 6, 2}, {4, 8, 5, 0}}));
  EXPECT_EQ(packed({6, 6, 3, 3, 1, 1}, 10), (Bins{{0, 2, 4}, {1, 3, 5}}));
  PackingOptions sequence, total;
  sequence.sequence_multiple = 8;
  total.total_multiple = 16;
  EXPECT_EQ(packed({9, 7}, 16, sequence), (Bins{{0}, {1}}));
  EXPECT_EQ(packed({9, 7}, 16, total), (Bins{{0, 1}}));
  total.total_multiple = 8;
  EXPECT_EQ(packed({17, 7}, 31, total), (Bins{{0, 1}}));
  EXPECT_EQ(packed({17, 8}, 31, total), (Bins{{0}, {1}}));
}

TEST(Packing, SmallPackingsByHand) {
  const Ints lengths{30, 70, 30, 40, 20, 10};
  EXPECT_EQ(packed(lengths, 100, with(kFirstFitDecreasing)), (Bins{{1, 0}, {3, 2, 4, 5}}));
  EXPECT_EQ(packed(lengths, 100, with(kConcatenative)), (Bins{{0, 1}, {2, 3, 4, 5}}));
  EXPECT_EQ(packed({50, 60, 35, 40}, 100, with(kBestFitDecreasing)), (Bins{{1, 3}, {0, 2}}));
  EXPECT_EQ(packed({60, 55, 40, 5}, 100, with(kBestFitDecreasing)), (Bins{{0, 2}, {1, 3}}));
  EXPECT_EQ(packed({60, 50, 45, 40, 5}, 100, with(kBestFitDecreasing)), (Bins{{0, 3}, {1, 2, 4}}));
  EXPECT_EQ(packed({9, 7, 6, 5, 4}, 18, with(kBalanced)), (Bins{{0, 3}, {1, 2, 4}}));
  for (const PackingAlgorithm algorithm : kAll) EXPECT_EQ(packed({}, 100, with(algorithm)), Bins{});
}

TEST(Packing, EqualsThePlainDefinitionOnRandomLengths) {
  std::mt19937_64 random(7);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int round = 0; round < 4000; ++round) {
    PackingOptions options;
    options.sequence_multiple = draw(0, 1) ? 1 : draw(1, 9);
    options.total_multiple = draw(0, 1) ? 1 : draw(1, 9);
    options.allow_oversize = draw(0, 1) == 1;
    const std::int64_t capacity = draw(10, round % 2 ? 60 : 4000);
    const std::int64_t effective = capacity - capacity % options.total_multiple;
    const std::int64_t longest = effective - effective % options.sequence_multiple;
    const std::int64_t low = draw(1, longest), high = options.allow_oversize ? draw(low, 2 * capacity) : longest;
    Ints lengths(draw(0, 90));
    for (std::int64_t& length : lengths) length = draw(draw(0, 2) ? low : 1, high);
    SCOPED_TRACE("round " + std::to_string(round) + " capacity " + std::to_string(capacity));

    Plain ffd(lengths, capacity, options), mffd(lengths, capacity, options), bfd(lengths, capacity, options);
    ffd.first_fit(0);
    mffd.modified();
    bfd.best_fit();
    options.algorithm = kFirstFitDecreasing;
    ASSERT_EQ(packed(lengths, capacity, options), ffd.bins);
    options.algorithm = kModifiedFirstFitDecreasing;
    ASSERT_EQ(packed(lengths, capacity, options), mffd.bins);
    options.algorithm = kBestFitDecreasing;
    ASSERT_EQ(packed(lengths, capacity, options), bfd.bins);
    const std::int64_t bound = *packing_lower_bound(lengths, capacity, options);
    for (const PackingAlgorithm algorithm : kAll) {
      options.algorithm = algorithm;
      const Bins bins = packed(lengths, capacity, options);
      expect_valid(lengths, capacity, options, bins);
      EXPECT_LE(bound, std::ssize(bins));
    }
  }
}

TEST(Packing, LargeInputTakesTheSamePathAsASmallOne) {
  // Enough items for the radix sort, with sizes above one 16-bit digit.
  std::mt19937_64 random(11);
  for (const std::int64_t capacity : {2048, 1 << 20}) {
    Ints lengths(6000);
    for (std::int64_t& length : lengths) length = std::uniform_int_distribution<std::int64_t>(1, capacity)(random);
    Plain ffd(lengths, capacity, {}), mffd(lengths, capacity, {});
    ffd.first_fit(0);
    mffd.modified();
    EXPECT_EQ(packed(lengths, capacity, with(kFirstFitDecreasing)), ffd.bins);
    EXPECT_EQ(packed(lengths, capacity), mffd.bins);
  }
}

TEST(Packing, AdversarialLengths) {
  // Johnson's family where first-fit decreasing needs 11/9 of the optimum: 6 of C/2+e, 6 of C/4+2e, 6 of C/4+e,
  // 12 of C/4-2e fill 9 bins.
  Ints johnson;
  for (const std::int64_t size : {510, 270, 260}) johnson.insert(johnson.end(), 6, size);
  johnson.insert(johnson.end(), 12, 230);
  EXPECT_EQ(packed(johnson, 1000, with(kFirstFitDecreasing)).size(), 11u);
  EXPECT_EQ(packed(johnson, 1000).size(), 10u) << "phase 3 makes six full bins of 510, 230 and 260";
  const std::vector<Ints> cases = {Ints(1000, 1),  Ints(1000, 100), Ints(1000, 51), Ints(1000, 50),
                                   Ints(1000, 34), Ints(1000, 33),  Ints(1000, 17), Ints(1000, 16)};
  for (const Ints& equal : cases)
    for (const PackingAlgorithm algorithm : kAll) {
      const std::int64_t a_bin = 100 / equal[0];
      EXPECT_EQ(std::ssize(packed(equal, 100, with(algorithm))), (1000 + a_bin - 1) / a_bin) << equal[0];
      EXPECT_EQ(*packing_lower_bound(equal, 100), equal[0] > 50 ? 1000 : (1000 * equal[0] + 99) / 100);
    }
  Ints ramp(2000);
  std::iota(ramp.begin(), ramp.end(), 1);
  for (const PackingAlgorithm algorithm : kAll) {
    expect_valid(ramp, 2000, with(algorithm), packed(ramp, 2000, with(algorithm)));
    std::reverse(ramp.begin(), ramp.end());
  }
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  for (const PackingAlgorithm algorithm : kAll) {
    EXPECT_EQ(packed({most - 1, 1}, most, with(algorithm)).size(), 1u);
    PackingOptions oversize = with(algorithm);
    oversize.allow_oversize = true;
    EXPECT_EQ(packed({most - 5, 1, 3}, 2, oversize).size(), 3u) << "nothing joins an oversize sequence";
  }
}

TEST(Packing, BinCounts) {
  PackingOptions options;
  options.min_bins = 3;
  EXPECT_EQ(packed({10, 10, 10}, 100, options), (Bins{{0}, {2}, {1}}));
  options = {};
  options.bin_multiple = 4;
  EXPECT_EQ(packed({40, 30, 20, 10, 5}, 100, options).size(), 4u);
  options.min_bins = 3;
  EXPECT_EQ(packed({10, 20, 30, 40}, 100, options).size(), 4u);
  // Donors by (count, index) descending, each drained to one before the next: bins [0, 1] and [2, 3] first.
  options = with(kConcatenative);
  options.min_bins = 4;
  EXPECT_EQ(packed({50, 50, 50, 50}, 100, options), (Bins{{0}, {2}, {3}, {1}}));
  options.min_bins = 5;
  EXPECT_EQ(packed({30, 30, 30, 60, 40}, 100, options), (Bins{{0}, {3}, {2}, {1}, {4}}));
  options.min_bins = 3;
  EXPECT_EQ(packed({30, 30, 30, 60, 40}, 100, options), (Bins{{0, 1}, {3, 4}, {2}}));
  // A fixed number of bins is balanced over all of them.
  options = with(kBalanced);
  options.min_bins = 3;
  options.bin_multiple = 2;
  EXPECT_EQ(packed({10, 10, 10, 10}, 100, options), (Bins{{0}, {1}, {2}, {3}}));
  EXPECT_EQ(packed({8, 7, 6, 5, 4, 3, 2, 1}, 100, options), (Bins{{0, 7}, {1, 6}, {2, 5}, {3, 4}}));
}

TEST(Packing, EmptyAndOversizeBins) {
  PackingOptions options;
  options.min_bins = 3;
  options.allow_empty = true;
  EXPECT_EQ(packed({10, 10, 10}, 100, options), (Bins{{0, 1, 2}, {}, {}})) << "nothing is moved";
  EXPECT_EQ(packed({}, 100, options), (Bins{{}, {}, {}}));
  options = {};
  options.allow_oversize = true;
  for (const PackingAlgorithm algorithm : kAll) {
    options.algorithm = algorithm;
    const Bins bins = packed({101, 5, 300, 95}, 100, options);
    EXPECT_EQ(bins.size(), algorithm == kConcatenative ? 4u : 3u);
    EXPECT_EQ(std::count(bins.begin(), bins.end(), Ints{0}), 1);
    EXPECT_EQ(std::count(bins.begin(), bins.end(), Ints{2}), 1);
    EXPECT_EQ(*packing_lower_bound(Ints{101, 5, 300, 95}, 100, options), 3);
  }
  options.total_multiple = 128;  // no bin can hold anything: each sequence is oversize
  EXPECT_EQ(packed({5, 6}, 100, options).size(), 2u);
}

TEST(Packing, NamesIgnoreCase) {
  EXPECT_EQ(*packing_algorithm_from_name("MFFD"), kModifiedFirstFitDecreasing);
  EXPECT_EQ(*packing_algorithm_from_name("Modified_First_Fit_Decreasing"), kModifiedFirstFitDecreasing);
  EXPECT_EQ(*packing_algorithm_from_name("FIRST_FIT_DECREASING"), kFirstFitDecreasing);
  EXPECT_EQ(*packing_algorithm_from_name("best_fit_decreasing"), kBestFitDecreasing);
  for (const PackingAlgorithm algorithm : kAll)
    EXPECT_EQ(*packing_algorithm_from_name(to_string(algorithm)), algorithm);
  const Status status = packing_algorithm_from_name("magic").status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "Unknown packing algorithm: expected ffd, mffd, bfd, concatenative or balanced, got \"magic\"");
}

TEST(Packing, Errors) {
  const auto set = [](auto member, std::int64_t value) {
    PackingOptions options;
    options.*member = value;
    return options;
  };
  EXPECT_EQ(error({1, 0}, 10), "lengths[1]: expected an integer >= 1, got 0");
  EXPECT_EQ(error({-3}, 10), "lengths[0]: expected an integer >= 1, got -3");
  EXPECT_EQ(error({}, 0), "capacity: expected an integer >= 1, got 0");
  EXPECT_EQ(error({1}, -8), "capacity: expected an integer >= 1, got -8");
  EXPECT_EQ(error({}, 10, set(&PackingOptions::min_bins, -1)), "min_bins: expected an integer >= 0, got -1");
  EXPECT_EQ(error({}, 10, set(&PackingOptions::bin_multiple, 0)), "bin_multiple: expected an integer >= 1, got 0");
  EXPECT_EQ(error({}, 10, set(&PackingOptions::sequence_multiple, 0)),
            "sequence_multiple: expected an integer >= 1, got 0");
  EXPECT_EQ(error({}, 10, set(&PackingOptions::total_multiple, -2)),
            "total_multiple: expected an integer >= 1, got -2");
  EXPECT_EQ(error({4, 11}, 10),
            "lengths[1]: expected a footprint <= capacity 10 (or allow_oversize), got length 11 with footprint 11");
  EXPECT_EQ(error({10}, 10, set(&PackingOptions::sequence_multiple, 8)),
            "lengths[0]: expected a footprint <= capacity 10 (or allow_oversize), got length 10 with footprint 16");
  EXPECT_EQ(error({10}, 15, set(&PackingOptions::total_multiple, 16)),
            "lengths[0]: expected a footprint <= capacity 15 (or allow_oversize), got length 10 with footprint 16");
  for (const PackingAlgorithm algorithm : kAll) {
    PackingOptions options = with(algorithm);
    options.bin_multiple = 4;
    EXPECT_EQ(error({10, 10, 10}, 100, options),
              "Cannot create 4 bins with only 3 sequences: lower min_bins or bin_multiple, or set allow_empty");
  }
  EXPECT_EQ(error({}, 100, set(&PackingOptions::min_bins, 2)),
            "Cannot create 2 bins with only 0 sequences: lower min_bins or bin_multiple, or set allow_empty");
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(error({1}, 10, set(&PackingOptions::min_bins, most)),
            "min_bins and bin_multiple: expected at most 2147483648 bins, got 9223372036854775807");
  EXPECT_EQ(error({most, most}, most),
            "lengths: expected footprints whose sum is within 64 bits, got a larger one at "
            "lengths[1]");
  EXPECT_FALSE(packing_lower_bound(Ints{0}, 10).ok());
}

// The optimum by exhaustive search; for few items only.
std::int64_t optimum(const Ints& lengths, std::int64_t capacity) {
  std::int64_t best = std::ssize(lengths);
  Ints loads;
  const std::function<void(std::size_t)> search = [&](std::size_t at) {
    if (std::ssize(loads) >= best) return;
    if (at == lengths.size()) {
      best = std::ssize(loads);
      return;
    }
    for (std::size_t bin = 0; bin < loads.size(); ++bin)
      if (loads[bin] + lengths[at] <= capacity) {
        loads[bin] += lengths[at];
        search(at + 1);
        loads[bin] -= lengths[at];
      }
    loads.push_back(lengths[at]);
    search(at + 1);
    loads.pop_back();
  };
  search(0);
  return best;
}

TEST(LowerBound, IsMartelloAndTothsL2AndNeverAboveTheOptimum) {
  EXPECT_EQ(*packing_lower_bound(Ints{51, 51, 51}, 100), 3);
  EXPECT_EQ(*packing_lower_bound(Ints{70, 60, 50, 40, 33, 33, 33, 11, 7, 3}, 100), 4) << "volume 340";
  EXPECT_EQ(*packing_lower_bound(Ints{80, 70, 60, 35, 35}, 100), 4) << "K = 35 sets 80 and 70 apart";
  EXPECT_EQ(*packing_lower_bound(Ints{}, 100), 0);
  std::mt19937_64 random(3);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  int better_than_volume = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::int64_t capacity = draw(5, 40);
    Ints lengths(draw(1, 8));
    for (std::int64_t& length : lengths) length = draw(1, capacity);
    std::int64_t plain = 0;  // the formula, for every K
    for (std::int64_t k = 0; 2 * k <= capacity; ++k) {
      std::int64_t bins = 0, room = 0, small = 0;
      for (const std::int64_t s : lengths) {
        if (2 * s > capacity) ++bins;
        if (2 * s > capacity && s <= capacity - k) room += capacity - s;
        if (2 * s <= capacity && s >= k) small += s;
      }
      plain = std::max(plain, bins + std::max<std::int64_t>(0, (small - room + capacity - 1) / capacity));
    }
    const std::int64_t bound = *packing_lower_bound(lengths, capacity);
    const std::int64_t volume = std::accumulate(lengths.begin(), lengths.end(), capacity - 1) / capacity;
    ASSERT_EQ(bound, plain);
    EXPECT_LE(bound, optimum(lengths, capacity));
    better_than_volume += bound > volume;
  }
  EXPECT_GT(better_than_volume, 200) << "else the test has no teeth";
}

TEST(Metrics, ByHand) {
  PackingOptions options;
  options.sequence_multiple = 8;
  options.total_multiple = 16;
  const Ints lengths{60, 20, 30};
  const PackingMetrics m = *packing_metrics(lengths, 100, {{0, 1}, {2}, {}}, options);
  EXPECT_EQ(m.sequences, 3);
  EXPECT_EQ(m.bins, 3);
  EXPECT_EQ(m.empty_bins, 1);
  EXPECT_EQ(m.tokens, 110);
  EXPECT_EQ(m.footprint, 96 + 32) << "64 + 24 and 32, in steps of 16";
  EXPECT_EQ(m.lower_bound, 2);
  EXPECT_DOUBLE_EQ(m.utilization, 110.0 / 300);
  EXPECT_DOUBLE_EQ(m.waste, 0.5);
  // Utilizations 0.8, 0.3, 0: mean 11/30, sample standard deviation 0.404145...
  EXPECT_NEAR(m.balance, 1 - 0.40414518843273806 / (11.0 / 30), 1e-12);
  const PackingMetrics one = *packing_metrics(Ints{50}, 100, {{0}});
  EXPECT_EQ(one.balance, 1);
  EXPECT_EQ(one.waste, 0);
  const PackingMetrics none = *packing_metrics(Ints{}, 100, {});
  EXPECT_EQ(none.utilization, 0);
  EXPECT_EQ(none.balance, 1);
  const auto bad = [&](const Bins& bins) { return packing_metrics(lengths, 100, bins, options).status().message(); };
  EXPECT_EQ(bad({{0, 1}}), "bins: expected every index in [0, 3) once, got none with index 2");
  EXPECT_EQ(bad({{0, 1}, {2, 0}}), "bins: expected every index in [0, 3) once, got index 0");
  EXPECT_EQ(bad({{0, 1}, {3}}), "bins: expected every index in [0, 3) once, got index 3");
}

}  // namespace
}  // namespace lmhead
