// What a candidate-set backend provides, and the checked problem it is given.
#pragma once

#include <span>

#include "core/implementation.h"
#include "lmhead/selected.h"
#include "lmhead/support.h"

namespace lmhead {

/// A problem with K ids a row: a candidate set (int32), or selected ids (int32 or int64).
struct ResolvedSupport {
  ResolvedProblem head;
  ConstMatrix ids;  ///< [N, K], -1 is padding
  std::int64_t k;
  const char* ids_name;  ///< the argument's name in messages
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
  Status (*selected_logits)(const ResolvedSupport&, const Matrix& logits, const Execution&);
  Status (*selected_combine)(const ResolvedSupport&, const ConstMatrix& logits, const ConstVector& lse,
                             const ConstVector& logprob, const Matrix& selected, const Execution&);
};

/// The candidate-set backend that the caller allows.
Result<const SupportImplementation*> choose_support(const Execution& execution);

extern const SupportImplementation kSupportCpu;   // src/cpu/support.cc
extern const SupportImplementation kSupportCuda;  // src/cuda/support.cc, with LMHEAD_HAS_CUDA

/// The error for an id outside {-1} and [0, valid_vocab).
Status bad_support_id(const ResolvedSupport& problem, std::int64_t id, std::int64_t row, std::int64_t column);
/// Checked mode on host memory: targets in range, ids -1 or in range, temperatures > 0.
Status check_host_support_values(const ResolvedSupport& problem);

}  // namespace lmhead
