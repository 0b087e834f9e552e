// What a backend provides, and the checked problem it is given.
#pragma once

#include <span>

#include "core/configuration.h"
#include "core/vocabulary_order.h"
#include "lmhead/lmhead.h"

namespace lmhead {

/// A Problem after validate(): every default filled in, every shape and dtype checked.
struct ResolvedProblem {
  Problem given;
  std::int64_t n, h;
  std::int64_t v_local;      ///< rows of the weight shard
  std::int64_t v_valid;      ///< leading rows of the shard that are not vocabulary padding
  std::int64_t vocab_size;   ///< global
  std::int64_t valid_vocab;  ///< global
  DType compute;             ///< type in which hidden and weight are multiplied; dl is rounded to it
  DType result;              ///< kFloat32, or kFloat64 for fp64 inputs
  bool check;                ///< read and check values
  /// How to run it, chosen by plan_call(); nullptr: the backend has no choice, or the default is wanted.
  const Configuration* configuration = nullptr;

  VocabularyOrder order() const { return {vocab_size}; }
};

/// One backend. Functions may assume validated arguments of their own device.
struct Implementation {
  const char* name;
  Device device;
  /// Ok when compiled in and this machine can run it; else kUnsupported with the reason.
  Status (*available)();
  /// One line for `lmhead info`.
  std::string (*describe)();
  /// Ok when this backend can run the problem; else kUnsupported with the reason.
  Status (*supports)(const ResolvedProblem&, const Execution&);
  Result<WorkspaceSize> (*workspace_size)(const ResolvedProblem&, Operation, const BackwardOutputs&, const Execution&);
  /// Checked mode: reads targets and temperatures where they live.
  Status (*check_values)(const ResolvedProblem&, const Execution&);
  Status (*forward_partial)(const ResolvedProblem&, const Matrix& state, const Execution&);
  Status (*combine)(const ResolvedProblem&, const ConstMatrix& states, const ForwardOutputs&, const Execution&);
  Status (*forward)(const ResolvedProblem&, const ForwardOutputs&, const Execution&);
  Status (*backward)(const ResolvedProblem&, const BackwardInputs&, const BackwardOutputs&, const Execution&);
  /// Bytes of cache, at most `budget`, that this backend fills for a bf16 problem; nullptr: it keeps none.
  std::size_t (*cache_size)(const ResolvedProblem&, std::size_t budget) = nullptr;
  /// Compiled configurations of an operation, the analytic default first; nullptr: there is no choice.
  std::span<const Configuration> (*configurations)(Operation) = nullptr;
  /// What tuned times depend on, for the current device; lives as long as the process. Goes with `configurations`.
  Result<const TuningSource*> (*tuning_source)() = nullptr;
};

/// Fastest first, the plain reference last. The order in which "auto" tries them.
std::span<const Implementation* const> implementations();

// One per backend, defined in its own folder; those of src/cuda in builds with LMHEAD_HAS_CUDA.
extern const Implementation kReferenceCpu;  // src/cpu/reference.cc
extern const Implementation kBlockedCpu;    // src/cpu/blocked.cc
extern const Implementation kSm90Cuda;      // src/cuda/sm90.cc
extern const Implementation kPortableCuda;  // src/cuda/portable.cc

}  // namespace lmhead
