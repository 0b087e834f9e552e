// What a candidate-set backend provides, and the checked problem it is given.
#pragma once

#include <span>

#include "core/implementation.h"
#include "lmhead/support.h"

namespace lmhead {

struct ResolvedSupport {
  ResolvedProblem head;
  ConstMatrix ids;  ///< [N, K] int32
  std::int64_t k;
};

struct SupportImplementation {
  const char* name;
  Device device;
  Status (*available)();
  Result<WorkspaceSize> (*workspace_size)(const ResolvedSupport&, Operation, const BackwardOutputs&, const Execution&);
  Status (*check_values)(const ResolvedSupport&, const Execution&);
  Status (*forward_partial)(const ResolvedSupport&, const Matrix& state, const Execution&);
  Status (*combine)(const ResolvedSupport&, const ConstMatrix& states, const SupportOutputs&, const Execution&);
  Status (*backward)(const ResolvedSupport&, const BackwardInputs&, const BackwardOutputs&, const Execution&);
};

extern const SupportImplementation kSupportCpu;  // src/cpu/support.cc
#if LMHEAD_HAS_CUDA
extern const SupportImplementation kSupportCuda;  // src/cuda/support.cc
#endif

/// Checked mode on host memory: sampled ids in range, members -1 or in range, temperatures > 0.
Status check_host_support_values(const ResolvedSupport& problem);

}  // namespace lmhead
