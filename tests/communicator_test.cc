// The local communicator: results, order of sums, and that no fault leaves a rank waiting.
#include "lmhead/communicator.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "core/element.h"
#include "rank_threads.h"

namespace lmhead {
namespace {

using std::chrono::milliseconds;
using testing::run_ranks;

TEST(Communicator, GathersInRankOrderAndInPlace) {
  for (const int ranks : {1, 2, 3, 8}) {
    const auto statuses = run_ranks(ranks, [&](Communicator& c) -> Status {
      std::vector<int> apart(static_cast<std::size_t>(ranks), -1), in_place = apart;
      const std::size_t own = static_cast<std::size_t>(c.rank());
      const int value = 100 + c.rank();
      in_place[own] = value;
      LMHEAD_RETURN_IF_ERROR(c.all_gather(&value, apart.data(), sizeof value));
      LMHEAD_RETURN_IF_ERROR(c.all_gather(&in_place[own], in_place.data(), sizeof value));
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(apart[static_cast<std::size_t>(r)], 100 + r);
        EXPECT_EQ(in_place[static_cast<std::size_t>(r)], 100 + r);
      }
      LMHEAD_RETURN_IF_ERROR(c.all_gather(nullptr, nullptr, 0));
      EXPECT_EQ(c.traffic().all_gathers, 3);
      EXPECT_EQ(c.traffic().bytes_sent, 2 * 4 * (ranks - 1));
      return {};
    });
    for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
  }
}

TEST(Communicator, SumsInRankOrderWithOneRounding) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const int ranks : {1, 3, 4}) {
      constexpr std::int64_t kCount = 7;  // no multiple of the ranks
      const auto value = [](int r, std::int64_t i) { return (r % 2 == 0 ? 1.0 : -1.0) * (1 + 0.37 * double(i) + r); };
      std::vector<double> expected(static_cast<std::size_t>(kCount * ranks));
      for (std::int64_t i = 0; i < kCount * ranks; ++i) {
        float sum32 = 0;
        double sum64 = 0;
        for (int r = 0; r < ranks; ++r) {
          sum32 += static_cast<float>(round_to(dtype, value(r, i)));
          sum64 += value(r, i);
        }
        expected[static_cast<std::size_t>(i)] = dtype == DType::kFloat64 ? sum64 : round_to(dtype, sum32);
      }
      const auto statuses = run_ranks(ranks, [&](Communicator& c) -> Status {
        std::vector<std::byte> all(size_of(dtype) * expected.size()), part(size_of(dtype) * kCount);
        for (std::int64_t i = 0; i < kCount * ranks; ++i) store_float(all.data(), dtype, i, value(c.rank(), i));
        LMHEAD_RETURN_IF_ERROR(c.reduce_scatter_sum(all.data(), part.data(), kCount, dtype));
        for (std::int64_t i = 0; i < kCount; ++i)
          EXPECT_EQ(load_float(part.data(), dtype, i), expected[static_cast<std::size_t>(c.rank() * kCount + i)]);
        LMHEAD_RETURN_IF_ERROR(c.all_reduce_sum(all.data(), kCount, dtype));
        for (std::int64_t i = 0; i < kCount; ++i)
          EXPECT_EQ(load_float(all.data(), dtype, i), expected[static_cast<std::size_t>(i)]);
        return {};
      });
      for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
    }
  }
}

TEST(Communicator, ARankThatIsGoneEndsTheOthersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto statuses = run_ranks(4, [](Communicator& c) -> Status {
    if (c.rank() == 2) return {};
    char byte = 0, all[4];
    LMHEAD_RETURN_IF_ERROR(c.all_gather(&byte, all, 1));
    return c.all_gather(&byte, all, 1);
  });
  for (const std::size_t r : {0, 1, 3}) {
    EXPECT_EQ(statuses[r].code(), StatusCode::kCommunication);
    EXPECT_NE(statuses[r].message().find("rank 2 is gone"), std::string::npos) << statuses[r].message();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Communicator, ASilentRankTimesOutOnEveryRankAndTheGroupStaysBroken) {
  const auto statuses = run_ranks(
      3,
      [](Communicator& c) -> Status {
        char byte = 0, all[3];
        if (c.rank() == 1) std::this_thread::sleep_for(milliseconds(400));
        const Status first = c.all_gather(&byte, all, 1);
        const Status second = c.all_gather(&byte, all, 1);
        EXPECT_EQ(first.message(), second.message());
        return first;
      },
      milliseconds(100));
  for (const Status& s : statuses) {
    EXPECT_EQ(s.code(), StatusCode::kCommunication);
    EXPECT_NE(s.message().find("ranks 1 did not reach all_gather within 100 ms"), std::string::npos) << s.message();
  }
}

TEST(Communicator, DifferentCallsOrSizesAreAnErrorOnEveryRank) {
  for (const bool sizes : {true, false}) {
    const auto statuses = run_ranks(2, [&](Communicator& c) -> Status {
      float data[2] = {}, all[4];
      if (sizes) return c.all_gather(data, all, c.rank() == 0 ? 4 : 8);
      return c.rank() == 0 ? c.all_gather(data, all, 4) : c.all_reduce_sum(data, 2, DType::kFloat32);
    });
    for (const Status& s : statuses) {
      EXPECT_EQ(s.code(), StatusCode::kCommunication);
      EXPECT_NE(s.message().find("ranks disagree: rank 0 calls all_gather with 4"), std::string::npos) << s.message();
    }
  }
}

TEST(Communicator, AbortCarriesItsReason) {
  const auto statuses = run_ranks(2, [](Communicator& c) -> Status {
    char byte = 0, all[2];
    if (c.rank() == 0) {
      c.abort({StatusCode::kOutOfMemory, "workspace: none left"});
      return c.all_gather(&byte, all, 1);
    }
    return c.exchange(&byte, all, 1);
  });
  for (const Status& s : statuses) EXPECT_NE(s.message().find("rank 0: workspace: none left"), std::string::npos);
}

TEST(Communicator, ArgumentsAreChecked) {
  EXPECT_EQ(local_communicators(0).status().message(), "size: expected >= 1, got 0");
  auto group = local_communicators(1);
  Communicator& c = *group->front();
  float data = 1;
  EXPECT_EQ(c.all_gather(nullptr, &data, 4).message(), "send: expected data, got a null pointer");
  EXPECT_EQ(c.all_reduce_sum(&data, -1, DType::kFloat32).message(), "count: expected >= 0, got -1");
  EXPECT_EQ(c.all_reduce_sum(&data, 1, DType::kInt32).code(), StatusCode::kTypeMismatch);
  EXPECT_EQ(c.reduce_scatter_sum(&data, nullptr, 1, DType::kFloat32).message(),
            "receive: expected data, got a null pointer");
}

}  // namespace
}  // namespace lmhead
