// Runs a TestProblem over ranks, through sharded_forward and sharded_backward or their packed forms, and
// puts the ranks' results together as one rank would have given them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lmhead/parallel.h"
#include "testing/run.h"

namespace lmhead::testing {

struct ShardedOptions {
  std::vector<std::int64_t> shards = {};  ///< sizes; default: vocab_shard
  ReduceHiddenGrad reduce = ReduceHiddenGrad::kSum;
  bool fp32_gradients = false;
  bool check = true;
};

/// This rank's shard of the problem, in host memory.
Problem shard_of(const TestProblem& problem, VocabShard shard);

/// What one rank got. dx holds the rank's rows: all of them, or its part of a reduce-scatter.
struct RankResult {
  Status status;
  Traffic forward, backward;
  std::vector<double> logprob, entropy, lse, dx, dw, db;
};

/// Forward and backward of one rank; `tp` may be any transport.
RankResult run_rank(const BackendInfo& backend, const TestProblem& problem, Communicator& tp,
                    const ShardedOptions& options);

/// The ranks' results as one outcome. Adds to `failure` when ranks that must agree bit for bit do not.
Outcome assemble(const std::vector<RankResult>& ranks, ReduceHiddenGrad reduce, std::string& failure);

/// Threads as ranks. `traffic` gets rank 0's counts of the forward and of the backward.
Outcome run_threads(const BackendInfo& backend, const TestProblem& problem, int tp, const ShardedOptions& options,
                    std::string& failure, Traffic* forward = nullptr, Traffic* backward = nullptr);

/// Available backends of the CPU.
std::vector<BackendInfo> cpu_backends();

}  // namespace lmhead::testing
