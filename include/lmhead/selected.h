// Full-vocabulary log-probs of K given ids a row, beside logprob and entropy of the same forward: what
// distillation from a top-k teacher needs.
//
//   selected_ik = z_{i, id_ik} - lse_i          (nats; lse of the whole vocabulary, from the forward)
//
// Three steps, so that every parallel layout falls out: selected_logits on each vocabulary shard, one
// exchange of [N, K] (the minimum over shards, or a gather), selected_combine. The gradient is part of
// backward() in lmhead.h, through BackwardInputs::selected: no second pass and no sparse update.
#pragma once

#include "lmhead/lmhead.h"

namespace lmhead {

struct SelectedProblem {
  Problem head;
  /// [N, K] int32 | int64 global ids in any order, with repeats; -1 is padding (0, no gradient).
  /// Row stride >= K.
  ConstMatrix ids;
};

/// Scratch memory of selected_logits: 32 bytes a row on the GPU, none on the CPU.
Result<WorkspaceSize> selected_workspace_size(const SelectedProblem& problem, const Execution& execution = {});

/// z in nats at each id that this shard holds, +inf elsewhere: logits [N, K] fp32 (fp64 for fp64 inputs),
/// any row stride. Rows that are inactive, and padding, get +inf. An id outside [0, valid_vocab) is an
/// error in checked mode; unchecked it stays +inf on every shard, and selected_combine turns it into NaN.
Status selected_logits(const SelectedProblem& problem, const Matrix& logits, const Execution& execution = {});

/// logits [S * N, K] of all shards in shard order (S = 1 after a minimum over shards), lse [N] and logprob [N] of
/// the forward -> selected [N, K] in nats, all fp32 (fp64 for fp64 inputs). Where an id is the row's target, selected
/// has logprob's bits.
Status selected_combine(const SelectedProblem& problem, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const Matrix& selected, const Execution& execution = {});

}  // namespace lmhead
