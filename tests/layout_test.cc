// The packed segment layout: published values, zig-zag shards, shifts, batches and active spans.
#include "lmhead/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace lmhead {
namespace {

using Ints = std::vector<std::int64_t>;
using Spans = std::vector<Span>;
constexpr auto kNone = Precision::kNone, kFp8 = Precision::kFp8, kMxFp8 = Precision::kMxFp8;

PackedLayout layout(const Ints& lengths, std::int64_t tp = 1, std::int64_t cp = 1, Precision precision = kNone) {
  Result<PackedLayout> made = PackedLayout::make(lengths, {tp, cp, precision});
  EXPECT_TRUE(made.ok()) << made.status().to_string();
  return *made;
}

std::string message(const Status& status) {
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

// Every length list x tp x cp x precision that the invariants are promised for.
template <class Check>
void for_every_layout(const Check& check) {
  const std::vector<Ints> cases = {{3}, {5, 7}, {1, 2, 3}, {4, 9}, {16, 16}, {1}, {127, 1}, {128}, {33, 31, 64}};
  for (const Ints& lengths : cases)
    for (const std::int64_t tp : {1, 2, 4, 8})
      for (const std::int64_t cp : {1, 2, 4})
        for (const Precision precision : {kNone, kFp8, kMxFp8}) {
          SCOPED_TRACE("tp " + std::to_string(tp) + " cp " + std::to_string(cp) + " " + to_string(precision) + " [" +
                       std::to_string(lengths[0]) + ", ...]");
          check(layout(lengths, tp, cp, precision));
        }
}

TEST(Layout, AlignmentValues) {
  struct Case {
    Precision precision;
    std::int64_t tp, cp, total;
  };
  for (const Case& c : {Case{kNone, 1, 1, 1}, Case{kNone, 4, 1, 4}, Case{kNone, 1, 2, 4}, Case{kNone, 4, 2, 16},
                        Case{kFp8, 1, 1, 16}, Case{kFp8, 4, 1, 512}, Case{kFp8, 1, 2, 32}, Case{kFp8, 2, 1, 256},
                        Case{kFp8, 2, 2, 512}, Case{kMxFp8, 1, 1, 32}, Case{kMxFp8, 1, 2, 64}, Case{kMxFp8, 2, 1, 64},
                        Case{kMxFp8, 2, 2, 128}, Case{kMxFp8, 4, 1, 128}}) {
    EXPECT_EQ(*total_alignment({c.tp, c.cp, c.precision}), c.total) << c.tp << " " << c.cp;
    EXPECT_EQ(*sequence_alignment({c.tp, c.cp, c.precision}), c.cp == 1 ? 1 : 2 * c.tp * c.cp);
  }
  EXPECT_EQ(*unpacked_alignment({4, 1, kNone}), 4);
  EXPECT_EQ(*unpacked_alignment({4, 2, kNone}), 4);
  EXPECT_EQ(*unpacked_alignment({1, 1, kFp8}), 16);
  EXPECT_EQ(*unpacked_alignment({2, 4, kFp8}), 256);
  EXPECT_EQ(*unpacked_alignment({4, 1, kFp8}), 512);
  EXPECT_EQ(*unpacked_alignment({3, 1, kMxFp8}), 96);
}

TEST(Layout, PublishedValues) {
  EXPECT_EQ(layout({7, 5, 3, 11}, 4, 1, kFp8).cu_seqlens_padded(), (Ints{0, 7, 12, 15, 512}));
  EXPECT_EQ(layout({7, 5}, 4).total(), 12);
  EXPECT_EQ(layout({6, 5}, 1, 2).cu_seqlens_padded(), (Ints{0, 8, 16}));
  EXPECT_EQ(layout({6, 5}, 1, 2, kFp8).padded_lengths(), (Ints{8, 24}));
  const PackedLayout empty = layout({}, 4, 2, kFp8);
  EXPECT_EQ(empty.padded_lengths(), Ints{});
  EXPECT_EQ(empty.cu_seqlens_padded(), Ints{0});
  EXPECT_EQ(empty.total(), 0);
  EXPECT_EQ(empty.local_total(), 0);
  EXPECT_EQ(*empty.local_rows(1), Ints{});
  EXPECT_EQ(empty.gathered_rows(), Ints{});
}

TEST(Layout, OnlyTheLastSegmentGrowsAndByLessThanTheTotalAlignment) {
  for_every_layout([](const PackedLayout& l) {
    const std::int64_t a_s = *sequence_alignment(l.options()), a_t = *total_alignment(l.options());
    std::int64_t own = 0;
    for (std::int64_t i = 0; i < l.num_sequences(); ++i) {
      const std::int64_t rounded = (l.lengths()[i] + a_s - 1) / a_s * a_s;
      own += rounded;
      if (i + 1 < l.num_sequences()) {
        EXPECT_EQ(l.padded_lengths()[i], rounded);
      }
      EXPECT_EQ(l.padded_lengths()[i] % a_s, 0);
      EXPECT_EQ(l.cu_seqlens_padded()[i + 1] - l.cu_seqlens_padded()[i], l.padded_lengths()[i]);
    }
    EXPECT_GE(l.total() - own, 0);
    EXPECT_LT(l.total() - own, a_t);
    EXPECT_EQ(l.total() % a_t, 0);
    EXPECT_EQ(l.local_total() % l.options().tp, 0) << "sequence parallelism cuts the local rows in tp parts";
  });
}

TEST(Layout, ShardsAndTheirInverseCoverEveryRowOnce) {
  for_every_layout([](const PackedLayout& l) {
    Ints gathered;  // what an all-gather of the global row numbers leaves on every rank
    for (std::int64_t rank = 0; rank < l.options().cp; ++rank) {
      const Ints rows = *l.local_rows(rank);
      EXPECT_EQ(std::ssize(rows), l.local_total());
      gathered.insert(gathered.end(), rows.begin(), rows.end());
    }
    const Ints inverse = l.gathered_rows();
    ASSERT_EQ(std::ssize(inverse), l.total());
    for (std::int64_t row = 0; row < l.total(); ++row) EXPECT_EQ(gathered[inverse[row]], row);
    // Local segments start at cu / cp, and a rank holds chunks r and 2cp-1-r of each.
    for (std::int64_t rank = 0; rank < l.options().cp; ++rank)
      for (std::int64_t i = 0; i < l.num_sequences() && l.options().cp > 1; ++i) {
        const std::int64_t begin = l.cu_seqlens_padded()[i], chunk = l.padded_lengths()[i] / (2 * l.options().cp);
        const std::int64_t local = rank * l.local_total() + begin / l.options().cp;
        EXPECT_EQ(gathered[local], begin + rank * chunk);
        EXPECT_EQ(gathered[local + chunk], begin + (2 * l.options().cp - 1 - rank) * chunk);
      }
  });
}

TEST(Layout, OneContextRankIsTheIdentity) {
  const PackedLayout l = layout({5, 7}, 4, 1, kFp8);
  Ints identity(512);
  std::iota(identity.begin(), identity.end(), 0);
  EXPECT_EQ(*l.local_rows(0), identity);
  EXPECT_EQ(l.gathered_rows(), identity);
}

TEST(Layout, ZigZagGolden) {
  const PackedLayout l = layout({6, 3}, 1, 2);  // padded 8 and 4
  EXPECT_EQ(*l.local_rows(0), (Ints{0, 1, 6, 7, 8, 11}));
  EXPECT_EQ(*l.local_rows(1), (Ints{2, 3, 4, 5, 9, 10}));
  EXPECT_EQ(l.gathered_rows(), (Ints{0, 1, 6, 7, 8, 9, 2, 3, 4, 10, 11, 5}));
}

TEST(Layout, SourceAndTargetRows) {
  const PackedLayout l = layout({3, 1, 2}, 1, 2);  // padded 4 each
  EXPECT_EQ(l.source_rows(), (Ints{0, 1, 2, -1, 3, -1, -1, -1, 4, 5, -1, -1}));
  EXPECT_EQ(l.global_rows(), (Ints{0, 1, 2, 4, 8, 9}));
  EXPECT_EQ(l.target_rows(), (Ints{1, 2, -1, -1, -1, -1, -1, -1, 9, -1, -1, -1}));
  for_every_layout([](const PackedLayout& each) {
    const Ints global = each.global_rows(), source = each.source_rows();
    for (std::int64_t row = 0; row < each.num_tokens(); ++row) EXPECT_EQ(source[global[row]], row);
    EXPECT_EQ(std::count(source.begin(), source.end(), -1), each.total() - each.num_tokens());
    const Ints target = each.target_rows();
    EXPECT_EQ(std::count_if(target.begin(), target.end(), [](std::int64_t t) { return t >= 0; }),
              each.num_tokens() - each.num_sequences());
  });
}

TEST(Layout, ShiftedTargetsAndMasksStayInsideTheirSequence) {
  const PackedLayout l = layout({3, 1, 2}, 1, 2);
  Ints ids(12), targets(12, 77);
  std::iota(ids.begin(), ids.end(), 100);
  ASSERT_TRUE(l.shift_targets(ids, -100, targets).ok());
  const Ints expected{101, 102, -100, -100, -100, -100, -100, -100, 109, -100, -100, -100};
  EXPECT_EQ(targets, expected);
  ASSERT_TRUE(l.shift_targets(ids, -100, ids).ok()) << "in place";
  EXPECT_EQ(ids, expected);
  std::vector<std::int32_t> ids32(12, 5), targets32(12);
  ASSERT_TRUE(l.shift_targets(ids32, -1, targets32).ok());
  EXPECT_EQ(targets32, (std::vector<std::int32_t>{5, 5, -1, -1, -1, -1, -1, -1, 5, -1, -1, -1}));
  // Padding and the first token of the next sequence are set: neither may leak into a row.
  std::vector<std::uint8_t> tokens{1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, rows(12);
  ASSERT_TRUE(l.shift_mask(tokens, rows).ok());
  EXPECT_EQ(rows, (std::vector<std::uint8_t>{0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0}));
  // The index map and the shift are one derivation.
  for_every_layout([](const PackedLayout& each) {
    Ints in(each.total()), out(each.total());
    std::iota(in.begin(), in.end(), 0);
    ASSERT_TRUE(each.shift_targets(in, -1, out).ok());
    EXPECT_EQ(out, each.target_rows());
  });
}

TEST(Layout, ResultsReturnToTheBatch) {
  const PackedLayout l = layout({3, 2}, 1, 2);  // global rows 0..2 and 4..5
  const std::vector<PackedLayout::BatchPosition> left_padded{{0, 1}, {1, 2}};
  EXPECT_EQ(*l.batch_rows(left_padded, 2, 4), (Ints{-1, 0, 1, 2, -1, -1, 4, 5}));
  EXPECT_EQ(*l.prediction_rows(left_padded, 2, 4), (Ints{-1, 0, 1, -1, -1, 4}));
  const std::vector<PackedLayout::BatchPosition> packed_row{{0, 0}, {0, 4}};
  EXPECT_EQ(*l.prediction_rows(packed_row, 1, 6), (Ints{0, 1, -1, -1, 4}));
  // A sequence of one token predicts nothing, in the last column and elsewhere.
  EXPECT_EQ(*layout({1, 1}).prediction_rows(std::vector<PackedLayout::BatchPosition>{{0, 0}, {1, 1}}, 2, 2),
            (Ints{-1, -1}));
  EXPECT_EQ(*layout({1}).prediction_rows(std::vector<PackedLayout::BatchPosition>{{0, 0}}, 1, 1), Ints{});
}

TEST(Layout, RoundTripThroughShardsAndBatchIsExact) {
  for_every_layout([](const PackedLayout& l) {
    const std::int64_t batch = l.num_sequences();
    const std::int64_t width = *std::max_element(l.lengths().begin(), l.lengths().end()) + 3;
    std::vector<PackedLayout::BatchPosition> positions;
    Ints ids(batch * width, -1);
    for (std::int64_t b = 0; b < batch; ++b) {
      positions.push_back({b, b % 3});
      for (std::int64_t t = 0; t < l.lengths()[b]; ++t) ids[b * width + b % 3 + t] = 1000 * b + t;
    }
    const Ints cells = *l.batch_rows(positions, batch, width);
    Ints packed(l.total(), -7), targets(l.total());
    for (std::size_t c = 0; c < cells.size(); ++c)
      if (cells[c] >= 0) packed[cells[c]] = ids[c];
    ASSERT_TRUE(l.shift_targets(packed, -100, targets).ok());
    Ints gathered;  // each rank computes on its own shard of the shifted targets; here the result is the target
    for (std::int64_t rank = 0; rank < l.options().cp; ++rank) {
      const Ints local = *l.local_rows(rank);
      for (const std::int64_t row : local) gathered.push_back(targets[row]);
    }
    const Ints inverse = l.gathered_rows();
    const Ints predictions = *l.prediction_rows(positions, batch, width);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t t = 0; t + 1 < width; ++t) {
        const std::int64_t row = predictions[b * (width - 1) + t];
        const std::int64_t now = ids[b * width + t], next = ids[b * width + t + 1];
        ASSERT_EQ(row >= 0, now >= 0 && next >= 0);
        if (row >= 0) {
          EXPECT_EQ(gathered[inverse[row]], next);
        }
      }
  });
}

TEST(Layout, FromOffsets) {
  const Ints offsets{0, 7, 12};
  EXPECT_EQ((*PackedLayout::from_cu_seqlens(offsets, {4, 1, kNone})).lengths(), (Ints{7, 5}));
  EXPECT_EQ((*PackedLayout::from_cu_seqlens(Ints{0}, {})).total(), 0);
  EXPECT_EQ(message(PackedLayout::from_cu_seqlens(Ints{}, {}).status()),
            "cu_seqlens: expected offsets that start at 0, got none");
  EXPECT_EQ(message(PackedLayout::from_cu_seqlens(Ints{1, 2}, {}).status()),
            "cu_seqlens: expected offsets that start at 0, got 1");
  EXPECT_EQ(message(PackedLayout::from_cu_seqlens(Ints{0, 2, 2}, {}).status()),
            "cu_seqlens: expected strictly rising offsets, got 2 then 2");
}

TEST(Layout, Errors) {
  const auto error = [](const Ints& lengths, LayoutOptions options) {
    return message(PackedLayout::make(lengths, options).status());
  };
  EXPECT_EQ(error({3, 0}, {}), "lengths[1]: expected an integer >= 1, got 0");
  EXPECT_EQ(error({-5}, {}), "lengths[0]: expected an integer >= 1, got -5");
  EXPECT_EQ(error({}, {0, 1, kNone}), "tp: expected an integer >= 1, got 0");
  EXPECT_EQ(error({}, {1, -2, kNone}), "cp: expected an integer >= 1, got -2");
  EXPECT_EQ(error({}, {1 << 20, 2, kNone}), "tp * cp: expected at most 1048576, got 1048576 * 2");
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(error({most}, {1, 2, kNone}), "lengths: expected a padded total within 64 bits, got a larger one");
  EXPECT_EQ(error({most}, {2, 1, kNone}), "lengths: expected a padded total within 64 bits, got a larger one");
  EXPECT_EQ(error({most, 1}, {}), "lengths: expected a padded total within 64 bits, got a larger one");
  EXPECT_EQ(message(layout({4}, 1, 2).local_rows(2).status()), "cp_rank: expected 0 <= cp_rank < 2, got 2");
  EXPECT_FALSE(layout({4}, 1, 2).local_rows(-1).ok());
  Ints three(3), four(4);
  EXPECT_EQ(message(layout({4}).shift_targets(three, -1, four)), "input_ids: expected [4], got [3]");
  EXPECT_EQ(message(layout({4}).shift_targets(four, -1, three)), "targets: expected [4], got [3]");
  EXPECT_EQ(message(precision_from_name("auto").status()),
            "precision: expected none, fp8 or mxfp8 (an automatic recipe resolved), got \"auto\"");
  EXPECT_EQ(*precision_from_name("MXFP8"), kMxFp8);
  using Positions = std::vector<PackedLayout::BatchPosition>;
  EXPECT_EQ(message(layout({4}).batch_rows(Positions{}, 1, 4).status()), "positions: expected [1], got [0]");
  for (const PackedLayout::BatchPosition& bad : Positions{{1, 0}, {-1, 0}, {0, 1}, {0, -1}})
    EXPECT_FALSE(layout({4}).batch_rows(Positions{bad}, 1, 4).ok());
  EXPECT_EQ(message(layout({4}).batch_rows(Positions{{0, 1}}, 1, 4).status()),
            "positions[0]: expected a sequence inside [1, 4], got row 0, column 1, length 4");
  EXPECT_EQ(message(layout({2, 2}).batch_rows(Positions{{0, 0}, {0, 1}}, 1, 4).status()),
            "positions[1]: expected cells of no other sequence, got row 0, column 1, length 2");
  EXPECT_FALSE(layout({}).prediction_rows(Positions{}, 1, 0).ok());
}

std::vector<std::uint8_t> mask(std::int64_t rows, const Spans& active) {
  std::vector<std::uint8_t> m(rows, 0);
  for (const Span& s : active) std::fill(m.begin() + s.begin, m.begin() + s.end, 1);
  return m;
}

TEST(ActiveSpans, GapsUpTo128AreCoalesced) {
  EXPECT_EQ(*active_spans(mask(400, {{0, 10}, {138, 140}})), (Spans{{0, 140}})) << "gap 128";
  EXPECT_EQ(*active_spans(mask(400, {{0, 10}, {139, 140}})), (Spans{{0, 10}, {139, 140}})) << "gap 129";
  EXPECT_EQ(*active_spans(mask(400, {{50, 100}, {300, 320}})), (Spans{{50, 100}, {300, 320}}));
  EXPECT_EQ(*active_spans(mask(400, {})), Spans{});
  EXPECT_EQ(*active_spans({}), Spans{});
  EXPECT_EQ(*active_spans(mask(4, {{0, 1}, {2, 3}}), 0), (Spans{{0, 1}, {2, 3}}));
  EXPECT_EQ(*active_spans(mask(4, {{0, 4}}), 0), (Spans{{0, 4}}));
  EXPECT_FALSE(active_spans(mask(4, {}), -1).ok());
}

TEST(ActiveSpans, InLocalCoordinatesOfEachContextRank) {
  const auto spans = [](const PackedLayout& l, const std::vector<Ints>& rows, std::int64_t rank) {
    std::vector<std::uint8_t> active(l.total(), 0);
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (const std::int64_t row : rows[i]) active[l.cu_seqlens_padded()[i] + row] = 1;
    return *active_spans(l, active, rank);
  };
  const PackedLayout four = layout({10, 17}, 1, 4);
  const std::vector<Ints> rows{{1, 2, 8}, {0, 1, 10, 15}};
  EXPECT_EQ(spans(four, rows, 0), (Spans{{1, 6}}));
  EXPECT_EQ(spans(four, rows, 1), (Spans{{0, 1}}));
  EXPECT_EQ(spans(four, rows, 2), (Spans{{7, 8}}));
  EXPECT_EQ(spans(four, rows, 3), (Spans{{2, 6}}));
  const PackedLayout two = layout({5}, 1, 2);
  EXPECT_EQ(spans(two, {{0, 2, 3}}, 0), (Spans{{0, 1}}));
  EXPECT_EQ(spans(two, {{0, 2, 3}}, 1), (Spans{{0, 2}}));
  const PackedLayout fp8 = layout({31}, 1, 2, kFp8);
  EXPECT_EQ(spans(fp8, {{0, 16, 24}}, 0), (Spans{{0, 9}}));
  EXPECT_EQ(spans(fp8, {{0, 16, 24}}, 1), (Spans{{8, 9}}));
  EXPECT_EQ(spans(fp8, {{}}, 1), Spans{});
  EXPECT_EQ(message(active_spans(two, mask(7, {}), 0).status()), "active: expected [8], got [7]");
  EXPECT_FALSE(active_spans(two, mask(8, {}), 2).ok());
}

TEST(ActiveSpans, CallerSpansAreChecked) {
  const auto active = mask(10, {{2, 4}, {7, 8}});
  const auto check = [&](const Spans& spans) { return check_active_spans(spans, 10, active); };
  EXPECT_TRUE(check({{2, 4}, {7, 8}}).ok());
  EXPECT_TRUE(check({{0, 4}, {4, 10}}).ok()) << "touching spans do not overlap";
  EXPECT_TRUE(check({{0, 10}}).ok());
  EXPECT_TRUE(check_active_spans({}, 10, mask(10, {})).ok());
  EXPECT_TRUE(check_active_spans({}, 10, std::nullopt).ok());
  EXPECT_EQ(message(check_active_spans(Spans{{0, 1}}, 10, std::nullopt)),
            "active_spans: expected an active mask beside the spans, got spans without a mask");
  EXPECT_EQ(message(check({{7, 8}, {2, 4}})),
            "active_spans: expected spans that cover every active row, got none over row 2");
  EXPECT_EQ(message(check({{1, 5}, {7, 8}, {5, 6}})),
            "active_spans: expected sorted spans that do not overlap, got [7, 8) then [5, 6)");
  EXPECT_EQ(message(check({{2, 5}, {4, 8}})),
            "active_spans: expected sorted spans that do not overlap, got [2, 5) then [4, 8)");
  for (const Span& bad : Spans{{-1, 9}, {0, 11}, {3, 3}, {5, 4}})
    EXPECT_NE(message(check({bad})).find("non-empty spans inside [0, 10)"), std::string::npos);
  EXPECT_EQ(message(check({{2, 4}})), "active_spans: expected spans that cover every active row, got none over row 7");
  EXPECT_EQ(message(check({{2, 3}, {7, 8}})),
            "active_spans: expected spans that cover every active row, got none over row 3");
  EXPECT_EQ(message(check({})), "active_spans: expected spans that cover every active row, got none over row 2");
  EXPECT_EQ(message(check_active_spans({}, 9, active)), "active: expected [9], got [10]");
}

}  // namespace
}  // namespace lmhead
