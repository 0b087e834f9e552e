// The library calls that `lmhead bench` times, on tensors that a device's measuring back end owns.
#pragma once

#include <cstdint>
#include <vector>

#include "bench.h"

namespace lmhead::tools {

/// Addresses on the run's device, all contiguous.
struct BenchTensors {
  const void *hidden, *weight;              ///< [n, h] and [v_local, h] of the run's dtype
  const std::int64_t* targets;              ///< [n]
  std::vector<const std::uint8_t*> active;  ///< one a case, [n]; null: dense
  const float* upstream;                    ///< [2, n]: of log-prob and of entropy
  float* rows;                              ///< [3, n]: log-prob, entropy, lse
  float* state;                             ///< [n, 4]: of a vocabulary shard
  void *dx, *dw;                            ///< gradients of hidden and weight; null without a backward
};

class BenchCalls {
 public:
  BenchCalls(const BenchRun& run, const BenchTensors& tensors, const Execution& execution)
      : run_(run), tensors_(tensors), execution_(execution) {}

  /// What the calls of case k need.
  WorkspaceSize workspace(std::size_t k) const;
  void use_workspace(void* data, std::size_t bytes) {
    execution_.workspace = data;
    execution_.workspace_bytes = bytes;
  }
  /// Forward of case k, and backward where the case has one. A device's work is queued on the execution's stream.
  void operator()(std::size_t k) const;

 private:
  Problem problem(std::size_t k) const;
  BackwardOutputs gradients() const;

  const BenchRun& run_;
  BenchTensors tensors_;
  Execution execution_;
};

/// Share of active rows of a mask; 1 of an empty one, which means dense.
double active_share(const std::vector<std::uint8_t>& mask);

}  // namespace lmhead::tools
