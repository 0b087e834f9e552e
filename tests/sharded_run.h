// Runs a TestProblem over ranks, through sharded_forward and sharded_backward or their packed forms, and
// puts the ranks' results together as one rank would have given them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lmhead/parallel.h"
#include "testing/run.h"

namespace lmhead::testing {

struct ShardedOptions {
  std::vector<std::int64_t> shards = {};  ///< sizes; default: vocab_shard
  ReduceHiddenGrad reduce = ReduceHiddenGrad::kSum;
  bool fp32_gradients = false;
  bool accumulate_hidden = false;  ///< with fp32_gradients; dX is what was added to prefill()
  bool check = true;
  bool forward_only = false;
};

/// The rows of the weight and bias that a shard holds of a whole problem, wherever that lies.
Problem shard_of(const Problem& whole, VocabShard shard);
/// This rank's shard of the problem, in host memory.
Problem shard_of(const TestProblem& problem, VocabShard shard);

/// What one rank got. dx holds the rank's rows: all of them, or its part of a reduce-scatter.
struct RankResult {
  Status status;
  Traffic forward, backward;
  std::vector<double> logprob, entropy, lse, dx, dw, db;
};

/// An output on a device that starts as NaN, or as fp32 prefill().
class RankOutput {
 public:
  RankOutput(Arena& arena, DType dtype, std::int64_t count, bool prefilled = false);
  Vector vector() const { return {buffer_.data(), count_, 1, dtype_}; }
  ConstVector input() const { return {buffer_.data(), count_, 1, dtype_}; }
  Matrix matrix(std::int64_t cols) const { return {buffer_.data(), cols == 0 ? 0 : count_ / cols, cols, cols, dtype_}; }
  std::vector<double> values() const;

 private:
  DType dtype_;
  std::int64_t count_;
  Buffer buffer_;
};

/// Scratch memory for a call of one rank: what its query asks for, with guards. On the CPU every other rank leaves it
/// to the call.
class RankWorkspace {
 public:
  RankWorkspace(Arena& arena, int rank, const Result<WorkspaceSize>& size, Execution& execution);
  bool intact() const { return !buffer_ || buffer_->guards_intact(); }

 private:
  std::unique_ptr<Buffer> buffer_;
};

/// Forward and backward of one rank on the backend's device and a stream of its own; `tp` may be any transport.
RankResult run_rank(const BackendInfo& backend, const TestProblem& problem, Communicator& tp,
                    const ShardedOptions& options);

/// The ranks' results as one outcome. Adds to `failure` when ranks that must agree bit for bit do not.
Outcome assemble(const std::vector<RankResult>& ranks, ReduceHiddenGrad reduce, std::string& failure);

/// Threads as ranks, on the backend's device. `traffic` gets rank 0's counts of the forward and of the backward.
Outcome run_threads(const BackendInfo& backend, const TestProblem& problem, int tp, const ShardedOptions& options,
                    std::string& failure, Traffic* forward = nullptr, Traffic* backward = nullptr);

/// Available backends of the CPU.
std::vector<BackendInfo> cpu_backends();

}  // namespace lmhead::testing
