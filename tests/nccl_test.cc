// Sharded calls over NCCL, one thread a GPU: world sizes 1, 2, 4 and 8 as far as the host has devices. One GPU
// runs world size 1. Sharded results must have the bits of one rank; everything is held against fp64.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "sharded_run.h"
#include "testing/check.h"

namespace lmhead {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

int devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// The first backend that "auto" would try on a GPU.
BackendInfo cuda_backend() {
  for (const BackendInfo& backend : backends())
    if (backend.available && backend.device == Device::kCuda) return backend;
  return {};
}

/// Rank r on device r. `problems` has one problem for all ranks, or one a rank.
std::vector<RankResult> run_devices(const std::vector<const TestProblem*>& problems, int ranks, ReduceHiddenGrad reduce,
                                    bool checked) {
  const NcclId id = nccl_id().value();
  const BackendInfo backend = cuda_backend();
  std::vector<RankResult> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < results.size(); ++r)
    threads.emplace_back([&, r] {
      if (cudaSetDevice(static_cast<int>(r)) != cudaSuccess) return;
      auto tp = nccl_communicator(id, static_cast<int>(r), ranks, std::chrono::seconds(30));
      results[r].status = tp.status();
      if (!tp.ok()) return;
      EXPECT_STREQ((*tp)->transport(), "nccl");
      results[r] =
          run_rank(backend, *problems[std::min(r, problems.size() - 1)], **tp, {.reduce = reduce, .check = checked});
    });
  for (std::thread& thread : threads) thread.join();
  return results;
}

TEST(Nccl, BitsOfOneRankAndTheBounds) {
  if (devices() == 0) GTEST_SKIP() << "no CUDA device";
  const TestProblem problem({.n = 256, .h = 256, .v = 8 * 2048, .data = Data::kPeaked});
  Outcome one;
  for (int ranks = 1; ranks <= std::min(8, devices()); ranks *= 2) {
    for (const ReduceHiddenGrad reduce : {ReduceHiddenGrad::kSum, ReduceHiddenGrad::kReduceScatter}) {
      for (const bool checked : {true, false}) {
        const auto results = run_devices({&problem}, ranks, reduce, checked);
        EXPECT_EQ(results.front().forward.all_gathers, 1);
        EXPECT_EQ(results.front().forward.exchanges, checked);
        std::string failure;
        const Outcome outcome = assemble(results, reduce, failure);
        ASSERT_TRUE(outcome.ok()) << outcome.message();
        EXPECT_EQ(failure, "");
        const Report report = check(problem, {}, outcome, arena(Device::kCuda));
        EXPECT_TRUE(report.ok()) << ranks << " ranks: " << report.failure;
        if (ranks == 1) one = outcome;
        EXPECT_EQ(first_difference(outcome.logprob, one.logprob), "") << ranks << " ranks";
        EXPECT_EQ(first_difference(outcome.entropy, one.entropy), "") << ranks << " ranks";
      }
    }
  }
}

TEST(Nccl, ABadRankFailsOnEveryRankInCheckedMode) {
  if (devices() < 2) GTEST_SKIP() << "needs two CUDA devices";
  Case spec{.n = 8, .h = 64, .v = 256};
  const TestProblem good(spec);
  spec.temperature = -1;
  const TestProblem bad(spec);
  for (const RankResult& rank : run_devices({&good, &bad}, 2, ReduceHiddenGrad::kSum, true))
    EXPECT_NE(rank.status.message().find("temperature: expected a finite number > 0, got -1"), std::string::npos)
        << rank.status.to_string();
}

}  // namespace
}  // namespace lmhead
