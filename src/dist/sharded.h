// The steps of a sharded call: check, agree with the other ranks, run. src/dist/packed.cc puts its own
// gathers between them.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "core/dispatch.h"
#include "dist/header.h"
#include "lmhead/parallel.h"

namespace lmhead {

/// Memory of a call's own in front of the inner call's workspace.
class Scratch {
 public:
  static std::size_t aligned(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

  /// Takes `own` bytes from the front of the caller's workspace; on the CPU allocates them when there is none.
  /// `query` names the function that says how much the whole call needs.
  Status take(std::size_t own, const Execution& given, const char* query);

  std::byte* data = nullptr;
  Execution inner;  ///< with the rest of the workspace

 private:
  std::vector<std::byte> owned_;
};

/// A call whose arguments this rank has checked.
struct PreparedCall {
  Status local;              ///< what the checks found
  std::optional<Call> call;  ///< present when the problem itself is valid
  Scratch scratch;
  BackwardOutputs inner;  ///< backward only: outputs of the inner call

  const ResolvedProblem* problem() const { return call ? &call->problem : nullptr; }
};

PreparedCall prepare_forward(const Problem& problem, const Communicator& tp, const ForwardOutputs& outputs,
                             const Execution& execution);
PreparedCall prepare_backward(const Problem& problem, const Communicator& tp, const BackwardInputs& inputs,
                              const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution);

bool is_checked(const Execution& execution);

/// In checked mode the headers' verdict; otherwise `prepared.local`, and a failing rank aborts the group so that
/// no other waits. `shards`: the ranks hold one vocabulary and the same rows.
Status settle(Communicator& group, const CallFacts& facts, const PreparedCall& prepared, const Execution& execution,
              bool shards);

/// After settle(). run_backward reduces the hidden gradient too.
Status run_forward(const PreparedCall& prepared, Communicator& tp, const ForwardOutputs& outputs,
                   const Execution& execution);
Status run_backward(const PreparedCall& prepared, Communicator& tp, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution);

}  // namespace lmhead
