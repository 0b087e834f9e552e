// The local communicator: results, order of sums, and that no fault leaves a rank waiting.
#include "lmhead/communicator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "core/element.h"
#include "core/return_if_error.h"
#include "rank_threads.h"
#include "sharded_run.h"
#include "testing.h"

namespace lmhead {
namespace {

using std::chrono::milliseconds;
using testing::run_ranks;

/// Ranks on host memory, and on the CUDA device where there is one; each rank on a stream of its own.
class CommunicatorOn : public ::testing::TestWithParam<Device> {};

std::vector<Device> devices() {
  std::vector<Device> list;
  for (const BackendInfo& backend : testing::available_backends())
    if (list.empty() || std::find(list.begin(), list.end(), backend.device) == list.end())
      list.push_back(backend.device);
  return list;
}

testing::Buffer floats(Device device, const std::vector<double>& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    store_float(bytes.data(), dtype, static_cast<std::int64_t>(i), values[i]);
  return {testing::arena(device), bytes};
}

std::vector<double> read(const testing::Buffer& buffer, DType dtype) {
  const std::vector<std::byte> bytes = buffer.download();
  std::vector<double> values(bytes.size() / size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = load_float(bytes.data(), dtype, static_cast<std::int64_t>(i));
  EXPECT_TRUE(buffer.guards_intact());
  return values;
}

TEST_P(CommunicatorOn, GathersInRankOrderAndInPlace) {
  constexpr DType kType = DType::kFloat32;
  for (const int ranks : {1, 2, 3, 8}) {
    const auto statuses = run_ranks(
        ranks,
        [&](Communicator& c) -> Status {
          EXPECT_EQ(c.device(), GetParam());
          EXPECT_STREQ(c.transport(), "local");
          const testing::Stream stream(testing::arena(GetParam()));
          const std::size_t own = static_cast<std::size_t>(c.rank()), all = static_cast<std::size_t>(ranks);
          std::vector<double> start(all, -1), expected(all);
          start[own] = 100 + c.rank();
          for (std::size_t r = 0; r < all; ++r) expected[r] = 100 + static_cast<double>(r);
          const testing::Buffer value = floats(GetParam(), {100.0 + c.rank()}, kType);
          const testing::Buffer apart = floats(GetParam(), std::vector<double>(all, -1), kType);
          const testing::Buffer in_place = floats(GetParam(), start, kType);
          LMHEAD_RETURN_IF_ERROR(c.all_gather(value.data(), apart.data(), 4, stream.get()));
          LMHEAD_RETURN_IF_ERROR(c.all_gather(in_place.data() + 4 * own, in_place.data(), 4, stream.get()));
          EXPECT_EQ(read(apart, kType), expected);
          EXPECT_EQ(read(in_place, kType), expected);
          LMHEAD_RETURN_IF_ERROR(c.all_gather(nullptr, nullptr, 0, stream.get()));
          EXPECT_EQ(c.traffic().all_gathers, 3);
          EXPECT_EQ(c.traffic().bytes_sent, 2 * 4 * (ranks - 1));
          return {};
        },
        std::chrono::seconds(30), GetParam());
    for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
  }
}

/// Each message is made from the one before it on every rank's own stream, and then overwritten: a rank whose stream
/// runs ahead of another's reading or writing shows.
TEST_P(CommunicatorOn, CallsFollowEachOtherOnEveryRanksStream) {
  constexpr int kRanks = 4, kCalls = 30;
  constexpr std::int64_t kCount = 1 << 14;
  constexpr DType kType = DType::kFloat32;
  const auto statuses = run_ranks(
      kRanks,
      [&](Communicator& c) -> Status {
        const testing::Stream stream(testing::arena(GetParam()));
        const testing::Buffer data = floats(GetParam(), std::vector<double>(kCount, c.rank() == 0 ? 1 : 0), kType);
        const testing::Buffer all = floats(GetParam(), std::vector<double>(kCount * kRanks, -1), kType);
        for (int i = 0; i < kCalls; ++i) {
          // Rank r gets the sum over ranks of rank r's own message, 4 times it; rank 0's value grows 4 times a call.
          LMHEAD_RETURN_IF_ERROR(c.all_gather(data.data(), all.data(), kCount * 4, stream.get()));
          LMHEAD_RETURN_IF_ERROR(c.reduce_scatter_sum(all.data(), data.data(), kCount, kType, stream.get()));
        }
        LMHEAD_RETURN_IF_ERROR(c.all_reduce_sum(data.data(), kCount, kType, stream.get()));
        EXPECT_EQ(read(data, kType), std::vector<double>(kCount, std::ldexp(1.0, 2 * kCalls)));
        return {};
      },
      std::chrono::seconds(30), GetParam());
  for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
}

TEST_P(CommunicatorOn, SumsInRankOrderWithOneRounding) {
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
      const auto statuses = run_ranks(
          ranks,
          [&](Communicator& c) -> Status {
            const testing::Stream stream(testing::arena(GetParam()));
            std::vector<double> own(expected.size());
            for (std::size_t i = 0; i < own.size(); ++i) own[i] = value(c.rank(), static_cast<std::int64_t>(i));
            const testing::Buffer all = floats(GetParam(), own, dtype);
            const testing::Buffer part = floats(GetParam(), std::vector<double>(kCount), dtype);
            LMHEAD_RETURN_IF_ERROR(c.reduce_scatter_sum(all.data(), part.data(), kCount, dtype, stream.get()));
            const auto begin = expected.begin() + c.rank() * kCount;
            EXPECT_EQ(read(part, dtype), std::vector<double>(begin, begin + kCount));
            LMHEAD_RETURN_IF_ERROR(c.all_reduce_sum(all.data(), kCount, dtype, stream.get()));
            std::vector<double> whole = read(all, dtype);
            whole.resize(kCount);
            EXPECT_EQ(whole, std::vector<double>(expected.begin(), expected.begin() + kCount));
            return {};
          },
          std::chrono::seconds(30), GetParam());
      for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, CommunicatorOn, ::testing::ValuesIn(devices()),
                         [](const auto& test) { return std::string(test.param == Device::kCpu ? "cpu" : "cuda"); });

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

TEST(Communicator, TheLongestTimeoutWaits) {
  const auto late = [](Communicator& c) -> Status {
    if (c.rank() == 1) std::this_thread::sleep_for(milliseconds(50));
    char byte = 0, all[2];
    return c.exchange(&byte, all, 1);
  };
  for (const Status& s : run_ranks(2, late, milliseconds::max())) EXPECT_TRUE(s.ok()) << s.message();
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

TEST(Communicator, ARankWithoutMemoryTellsTheOthers) {
  const auto statuses = run_ranks(2, [](Communicator& c) -> Status {
    float data = 0;
    // Only rank 0 asks for 2^63 bytes, which no buffer can have.
    return c.all_reduce_sum(&data, c.rank() == 0 ? std::int64_t{1} << 61 : 1, DType::kFloat32);
  });
  EXPECT_EQ(statuses[0].to_string(),
            "out of memory: memory: expected enough for all_reduce_sum, got an allocation that failed");
  EXPECT_EQ(statuses[1].code(), StatusCode::kCommunication);
  EXPECT_NE(statuses[1].message().find("rank 0: memory: expected enough"), std::string::npos) << statuses[1].message();
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
