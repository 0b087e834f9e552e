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
#include "lmhead/layout.h"
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

/// Scratch memory for the two calls below, the inner call's included: kBackward for sharded_backward(), any other
/// operation for sharded_forward(). Its fp32 hidden gradient before a reduction counts as `accumulator`.
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

/// Packed sequences over tensor- and context-parallel ranks: one scoring problem over all of them.
struct PackedProblem {
  /// The head's shard and options, and this rank's hidden rows: the layout's local rows of its cp rank
  /// [local_total, H], or with sequence_parallel its tp rank's equal share of those [local_total / tp, H].
  /// targets, active and row_temperature stay absent: they follow from what is below.
  Problem head;
  /// Made with the sizes of both groups.
  const PackedLayout* layout = nullptr;
  /// [num_tokens] int32 | int64: every sequence's ids without padding, the same on all ranks. Row i scores the
  /// next id of its own sequence; a sequence's last row scores nothing (0, 0).
  ConstVector input_ids;
  /// [num_tokens] bool or integer, optional: row i is scored where loss_mask[i] > 0.
  ConstVector loss_mask;
  /// [num_tokens] fp32 (or fp64 for fp64 inputs), optional, each > 0: row i's temperature.
  ConstVector row_temperature;
  /// head.hidden holds this tp rank's share of the rows and is gathered over tp.
  bool sequence_parallel = false;
};

/// nullptr: that dimension has one rank.
struct ParallelGroups {
  Communicator* tp = nullptr;
  Communicator* cp = nullptr;
};

/// Scratch memory for the two calls below, on the device of `execution`. What they slice and gather (and under
/// sequence_parallel the gathered hidden) counts as `accumulator`: it comes on top of the budget.
Result<WorkspaceSize> packed_workspace_size(const PackedProblem& problem, const ParallelGroups& groups,
                                            Operation operation, ReduceHiddenGrad reduce = ReduceHiddenGrad::kNone,
                                            const BackwardOutputs& gradients = {}, const Execution& execution = {});

/// Scores packed sequences.
///
/// On a CUDA device every pointer but the layout is device memory, and the groups are CUDA's. The layout's index maps
/// (24 bytes a token) are copied from the host, for which the driver may wait for earlier work of the stream.
/// outputs logprob and entropy [num_tokens], whole and in source order on every rank; lse [local_total] of the
///         local rows, for the backward; fp32 (fp64 for fp64 inputs), in nats; each may be absent.
/// Collectives: sequence_parallel gathers hidden over tp; the states' all_gather over tp; one all_gather over cp
/// with both outputs in it. In checked mode a header over each group goes first.
Status packed_forward(const PackedProblem& problem, const ParallelGroups& groups, const ForwardOutputs& outputs,
                      const Execution& execution = {});

/// Gradients for upstream gradients of the whole outputs.
///
/// inputs  lse [local_total] as the forward wrote it; entropy, dlogprob, dentropy [num_tokens], the same on all
///         ranks: each takes its own rows, and nothing is summed over cp.
/// outputs hidden: as the problem's hidden rows. Under sequence_parallel it is reduce-scattered over tp, and
///         `reduce` is kReduceScatter or kNone; else `reduce` is kNone or kSum.
///         weight, bias: this rank's rows only; the caller sums them over cp (and dp).
Status packed_backward(const PackedProblem& problem, const ParallelGroups& groups, const BackwardInputs& inputs,
                       const BackwardOutputs& outputs, ReduceHiddenGrad reduce = ReduceHiddenGrad::kNone,
                       const Execution& execution = {});

}  // namespace lmhead
