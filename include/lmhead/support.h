// Log-probability and entropy over each row's own candidate set, as top-k / top-p sampling draws from.
//
// A rollout engine that samples with top-k or top-p renormalises over the tokens it kept. A trainer
// that scores the sampled token over the whole vocabulary then compares two different distributions.
// These calls score it over the same set S_i, reading only the weight rows of its members:
//
//   z_ij as in lmhead.h;   logprob_i = z_iy - log sum_{j in S_i} exp z_ij
//   p_ij = exp z_ij / sum_{S_i};   entropy_i = - sum_{j in S_i} p_ij log p_ij  >= 0
//
// Members may stand in any order and more than once (a duplicate counts once). The sampled id y is
// scored even when it is not a member; it then does not join the sum. A row is valid when it has at
// least one member and is active (Problem::active, ignore_index); an invalid row gives 0, 0.
#pragma once

#include "lmhead/lmhead.h"

namespace lmhead {

/// A scoring problem over candidate sets.
struct SupportProblem {
  /// hidden, weight, bias, options and the vocabulary shard as everywhere; `targets` holds the sampled
  /// ids [N]. EntropyMode as everywhere; out_of_vocab must be kError.
  Problem head;
  /// [N, K] int32 global ids, padded anywhere with -1. Row stride >= K. K >= 0.
  ConstMatrix support_ids;
};

/// Results over candidate sets, fp32 (fp64 for fp64 inputs); absent ones are not written.
struct SupportOutputs {
  Vector logprob;  ///< [N] nats
  Vector entropy;  ///< [N] nats, >= 0
  Vector lse;      ///< [N] log sum over members; what backward needs
  Vector valid;    ///< [N] kBool: the row is active and has a member
};

/// Scratch memory of the calls below. Forward: 16 bytes a row (states). Backward with a weight or bias
/// gradient on the CPU: 4 bytes a candidate slot [N, K + 1], 24 bytes a weight row, and a sort buffer of 8 bytes a
/// slot that shrinks to the budget, down to 8 bytes a token row (vocabulary ranges are then taken in turn). On the
/// GPU: 32 bytes a row more in every call; a backward 4 bytes a slot, with a weight or bias gradient 16 more for the
/// sort, its own buffer and at most 32 MiB of partial sums, whatever the budget.
Result<WorkspaceSize> support_workspace_size(const SupportProblem& problem, Operation operation,
                                             const BackwardOutputs& gradients = {}, const Execution& execution = {});

/// State [N, 4] of the members that live on this shard, to be gathered over shards (see lmhead.h).
Status support_forward_partial(const SupportProblem& problem, const Matrix& state, const Execution& execution = {});

/// Merges the states of all shards: states [S * N, 4] in shard order.
Status support_combine(const SupportProblem& problem, const ConstMatrix& states, const SupportOutputs& outputs,
                       const Execution& execution = {});

/// support_forward_partial and support_combine for an unsharded head.
Status support_forward(const SupportProblem& problem, const SupportOutputs& outputs, const Execution& execution = {});

/// Gradients for upstream a = dL/dlogprob, g = dL/dentropy: over members and the sampled id,
///
///   dz_ij = a_i (1[j = y_i] - p_ij) - g_i p_ij (log p_ij + entropy_i)     (p_ij = 0 for a non-member y)
///
/// all sums in fp32 (fp64 for fp64 inputs); bitwise repeatable: the weight gradient sums each
/// vocabulary row's contributions in order of the token row. Weight rows outside every set get 0.
Status support_backward(const SupportProblem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                        const Execution& execution = {});

}  // namespace lmhead
