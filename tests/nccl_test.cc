// Sharded calls over NCCL, one thread a GPU: world sizes 1, 2, 4 and 8 as far as the host has devices. One GPU
// runs world size 1. Sharded results must have the bits of one rank; everything is held against fp64.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/element.h"
#include "sharded_run.h"
#include "testing/check.h"

namespace lmhead {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

int devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// Memory of the current device, freed with the object.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(bytes, 256)), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xff, std::max<std::size_t>(bytes, 256)), cudaSuccess);
  }
  DeviceBytes(const void* host, std::size_t bytes) : DeviceBytes(bytes) {
    EXPECT_EQ(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::vector<double> values(DType dtype) const {
    std::vector<std::byte> host(bytes_);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
    std::vector<double> out(bytes_ / size_of(dtype));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = load_float(host.data(), dtype, static_cast<std::int64_t>(i));
    return out;
  }

 private:
  void* data_ = nullptr;
  std::size_t bytes_;
};

RankResult run_device(const TestProblem& problem, Communicator& tp, ReduceHiddenGrad reduce, bool checked, bool bad) {
  RankResult out;
  const std::int64_t n = problem.spec.n, h = problem.spec.h, v = problem.spec.v;
  const VocabShard shard = vocab_shard(v, tp.rank(), tp.size());
  const std::size_t element = size_of(problem.spec.weight);
  const DeviceBytes hidden(problem.hidden.bytes.data(), problem.hidden.bytes.size());
  const DeviceBytes weight(problem.weight.bytes.data() + static_cast<std::size_t>(shard.start * h) * element,
                           static_cast<std::size_t>(shard.size * h) * element);
  const DeviceBytes targets(problem.targets.bytes.data(), problem.targets.bytes.size());
  const DeviceBytes a(problem.dlogprob.bytes.data(), problem.dlogprob.bytes.size());
  const DeviceBytes g(problem.dentropy.bytes.data(), problem.dentropy.bytes.size());
  Problem p = shard_of(problem, shard);
  p.hidden.data = hidden.data();
  p.weight.data = weight.data();
  p.targets.data = targets.data();
  if (bad) p.temperature = -1;
  const std::size_t row = static_cast<std::size_t>(n) * sizeof(float);
  const DeviceBytes logprob(row), entropy(row), lse(row);
  const auto vector = [n](const DeviceBytes& d) { return Vector{d.data(), n, 1, DType::kFloat32}; };
  const auto input = [n](const DeviceBytes& d) { return ConstVector{d.data(), n, 1, DType::kFloat32}; };

  Execution execution;
  execution.device = Device::kCuda;
  execution.check = checked;
  const auto workspace_for = [&](Operation operation, const BackwardOutputs& gradients) {
    const auto size = sharded_workspace_size(
        p, tp, operation, operation == Operation::kBackward ? reduce : ReduceHiddenGrad::kNone, gradients, execution);
    auto memory = std::make_unique<DeviceBytes>(size.ok() ? size->bytes : 0);
    execution.workspace = memory->data();
    execution.workspace_bytes = size.ok() ? std::max<std::size_t>(size->bytes, 256) : 256;
    return memory;
  };
  const auto forward_memory = workspace_for(Operation::kForward, {});
  out.status = sharded_forward(p, tp, {vector(logprob), vector(entropy), vector(lse)}, execution);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  out.forward = tp.traffic();
  if (!out.status.ok()) return out;
  out.logprob = logprob.values(DType::kFloat32);
  out.entropy = entropy.values(DType::kFloat32);
  out.lse = lse.values(DType::kFloat32);

  const std::int64_t rows = reduce == ReduceHiddenGrad::kReduceScatter ? n / tp.size() : n;
  const DeviceBytes dx(static_cast<std::size_t>(rows * h) * element),
      dw(static_cast<std::size_t>(shard.size * h) * element);
  BackwardInputs inputs;
  inputs.lse = input(lse);
  inputs.entropy = input(entropy);
  inputs.dlogprob = input(a);
  inputs.dentropy = input(g);
  BackwardOutputs gradients;
  gradients.hidden = {dx.data(), rows, h, h, problem.spec.hidden};
  gradients.weight = {dw.data(), shard.size, h, h, problem.spec.weight};
  const auto backward_memory = workspace_for(Operation::kBackward, gradients);
  out.status = sharded_backward(p, tp, inputs, gradients, reduce, execution);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  out.dx = dx.values(problem.spec.hidden);
  out.dw = dw.values(problem.spec.weight);
  return out;
}

std::vector<RankResult> run_devices(const TestProblem& problem, int ranks, ReduceHiddenGrad reduce, bool checked,
                                    int bad_rank = -1) {
  const NcclId id = nccl_id().value();
  std::vector<RankResult> results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      RankResult& mine = results[static_cast<std::size_t>(r)];
      if (cudaSetDevice(r) != cudaSuccess) return;
      auto tp = nccl_communicator(id, r, ranks, std::chrono::seconds(30));
      mine.status = tp.status();
      if (tp.ok()) mine = run_device(problem, **tp, reduce, checked, r == bad_rank);
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
        const auto results = run_devices(problem, ranks, reduce, checked);
        EXPECT_EQ(results.front().forward.all_gathers, 1);
        EXPECT_EQ(results.front().forward.exchanges, checked);
        std::string failure;
        const Outcome outcome = assemble(results, reduce, failure);
        ASSERT_TRUE(outcome.ok()) << outcome.message();
        EXPECT_EQ(failure, "");
        const Report report = check(problem, {}, outcome, arena(Device::kCpu));
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
  const auto results = run_devices(TestProblem({.n = 8, .h = 64, .v = 256}), 2, ReduceHiddenGrad::kSum, true, 1);
  for (const RankResult& rank : results)
    EXPECT_NE(rank.status.message().find("temperature: expected a finite number > 0, got -1"), std::string::npos)
        << rank.status.to_string();
}

}  // namespace
}  // namespace lmhead
