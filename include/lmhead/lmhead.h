// lmhead: per-token log-probability and policy entropy from hidden states and an LM-head weight,
// with gradients, never holding the [N, V] logits.
//
//   r_ij = scale * (<x_i, w_j> + b_j)      z_ij = softcap * tanh(r_ij / softcap) / T_i
//   logprob_i = z_iy - log sum_j exp z_ij  entropy_i = - sum_j p_ij log p_ij,   p_i = softmax(z_i)
//
// Three calls make every parallel layout: forward_partial (this shard's columns, one projection),
// combine (the states of all shards, 16 bytes a token), backward (no communication).
//
// Every call checks all its arguments before it writes anything, takes no ownership, and returns a
// Status whose message names the argument, what was expected and what was given.
//
// Determinism: logprob and entropy of a row depend on that row, H, V and the dtype alone on
// "reference", "cpu" and "sm90": not on N, the row's position, threads, chunks or masks. Equal
// vocabulary shards (1, 2, 4 or 8 ranks, vocab_size % 8 == 0) give the same bits. Gradients repeat
// bitwise from run to run. Error bounds: docs/numerics.md.
#pragma once

#include <span>
#include <string>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead {

/// Numbers in one partial-softmax state: {max, sum, weighted, target}, see docs/numerics.md.
inline constexpr std::int64_t kStateWidth = 4;

/// The calls that need scratch memory.
enum class Operation : std::uint8_t { kForward, kForwardPartial, kBackward };

/// Scratch memory that `operation` needs for this problem within execution.workspace_budget.
/// `gradients` matters for kBackward only: which outputs are wanted and in which dtype.
Result<WorkspaceSize> workspace_size(const Problem& problem, Operation operation, const BackwardOutputs& gradients = {},
                                     const Execution& execution = {});

/// Bytes for Execution::cache, at most `budget`: what the largest number of leading active rows needs whose
/// exponentials the forward can keep there for the backward; 0 when no tile of 128 rows fits. About 2.13 V_local bytes
/// a row and 8 N. Forward and backward must be given the same size. kUnsupported where the backend that `execution`
/// leads to keeps none: "sm90" alone does.
///
/// A cache changes no bit of logprob, entropy and lse; gradients are within 1.1 of the errors without it
/// (docs/numerics.md).
Result<std::size_t> cache_size(const Problem& problem, std::size_t budget, const Execution& execution = {});

/// Folds this shard's columns into one state per row.
///
/// state  [N, 4] fp32 (fp64 for fp64 inputs), contiguous rows: max m of z in nats, s = sum 2^u and
///        t = sum 2^u u with u = (z - m) log2 e, and z at the target (+inf if it is not in this shard).
///        Inactive rows get the empty state {-inf, 0, 0, +inf}.
Status forward_partial(const Problem& problem, const Matrix& state, const Execution& execution = {});

/// Merges the states of all shards, given in shard order, into per-token results.
///
/// states  [S * N, 4]: shard k's row i is row k * N + i, as one all-gather leaves them. S >= 1.
/// outputs logprob, entropy and lse [N]; each may be absent.
/// Reads problem.targets, active, ignore_index, out_of_vocab, valid_vocab and the shapes only.
Status combine(const Problem& problem, const ConstMatrix& states, const ForwardOutputs& outputs,
               const Execution& execution = {});

/// forward_partial and combine for an unsharded head.
Status forward(const Problem& problem, const ForwardOutputs& outputs, const Execution& execution = {});

/// Gradients for upstream a_i = dL/dlogprob_i and g_i = dL/dentropy_i:
///
///   dz_ij = a_i (1[j = y_i] - p_ij) - g_i p_ij (log p_ij + entropy_i)
///   dl_ij = dz_ij * (scale / T_i) * (1 - (z_ij T_i / softcap)^2)
///   dX = dl W,   dW = dl^T X,   db = column sums of dl
///
/// dl is rounded once, to the compute dtype; sums over chunks are fp32 (reference: fp64).
/// Under EntropyMode::kOff and kMetric dentropy must be absent, and the result has the same bits.
Status backward(const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                const Execution& execution = {});

/// One way to run the calls above, in the order in which "auto" tries them.
struct BackendInfo {
  std::string name;         ///< "sm90", "cuda_portable", "cpu", "reference"
  Device device;            ///< where its pointers must live
  bool available;           ///< compiled in, and the machine can run it
  std::string description;  ///< what it runs on here: device or instruction set, GEMM library
};
/// Every backend of this build, available or not. The same list for the life of the process.
std::span<const BackendInfo> backends();

/// Name of the backend that the last successful one of the calls above used on this thread, also inside a sharded or
/// packed call; "" before the first. Candidate sets (support.h, selected.h) leave it as it is.
const char* last_backend();

/// Library version, "0.1.0".
const char* version();

}  // namespace lmhead
