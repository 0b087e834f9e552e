// Sharded execution: one head over the ranks of a tensor-parallel group, packed sequences over a
// context-parallel one. docs/parallelism.md has the traffic table.
//
// Checked mode (the CPU's default) exchanges one 512-byte header before a call writes or sends anything
// else: sizes, options, a hash of targets and masks, and each rank's own status. A rank that fails
// therefore fails on all ranks, with its message, nothing written and the group still usable. Without it a
// failing rank aborts the group. After the header only the transport can fail (kCommunication); outputs
// are then unspecified.
#pragma once

#include "lmhead/communicator.h"
#include "lmhead/lmhead.h"

namespace lmhead {

/// A contiguous range of vocabulary columns.
struct VocabShard {
  std::int64_t start = 0;
  std::int64_t size = 0;
};

/// The shard of `rank` among `ranks`: ceil(vocab_size / ranks) columns each, the last ones ragged or empty,
/// as torch.chunk and DTensor cut. Preconditions: vocab_size >= 0, 0 <= rank < ranks.
VocabShard vocab_shard(std::int64_t vocab_size, int rank, int ranks);

/// What to do with the hidden gradient, of which each rank holds the part of its own columns.
enum class ReduceHiddenGrad : std::uint8_t {
  kNone,           ///< leave the part [N, H]; the caller sums over ranks
  kSum,            ///< every rank gets the sum [N, H]
  kReduceScatter,  ///< rank r gets rows [r N/tp, (r+1) N/tp) of the sum [N/tp, H]; tp must divide N
};

/// Scratch memory for the two calls below, the inner call's included.
Result<WorkspaceSize> sharded_workspace_size(const Problem& problem, const Communicator& tp, Operation operation,
                                             ReduceHiddenGrad reduce = ReduceHiddenGrad::kNone,
                                             const BackwardOutputs& gradients = {}, const Execution& execution = {});

/// forward() of a head whose columns are spread over `tp`: every rank gets the same results, bit for bit.
///
/// problem.weight is this rank's shard; vocab_start and vocab_size are required, the shards of the ranks
/// follow each other in rank order and cover the vocabulary; empty ones are fine. Hidden, targets, masks,
/// temperatures and options are the same on all ranks.
/// One all_gather of 16 bytes a token (32 for fp64), and the header in checked mode. Nothing else.
Status sharded_forward(const Problem& problem, Communicator& tp, const ForwardOutputs& outputs,
                       const Execution& execution = {});

/// backward() of the same head. No collective under kNone. Under kSum and kReduceScatter the parts are
/// summed in fp32 and rounded once to the output's dtype, and checked mode exchanges the header first.
Status sharded_backward(const Problem& problem, Communicator& tp, const BackwardInputs& inputs,
                        const BackwardOutputs& outputs, ReduceHiddenGrad reduce = ReduceHiddenGrad::kNone,
                        const Execution& execution = {});

}  // namespace lmhead
