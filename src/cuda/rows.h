// Row bookkeeping on the device: which rows are computed, their terms, folding states into results.
//
// "Active" means: mask set and target not ignore_index; in the backward also an upstream gradient
// other than exactly zero. Every function queues kernels on `stream` and returns; only check_values
// waits for them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/segments.h"
#include "core/implementation.h"

namespace lmhead::cuda {

/// Where each row's inputs are; passed to kernels by value.
struct RowInputs {
  ConstVector targets, active, temperature;      ///< the last two may be absent
  ConstVector lse, entropy, dlogprob, dentropy;  ///< backward; each but lse may be absent
  SelectedGradient selected;                     ///< backward; may be absent
  float scalar_temperature;
  std::int64_t ignore_index;
  std::int64_t vocab_start, v_valid, valid_vocab;
  bool zero_out_of_vocab;  ///< an id outside [0, valid_vocab) means logprob 0, not NaN
};
/// Inputs of rows [begin, begin + count), so that row 0 of the result is row `begin` of the problem.
RowInputs row_inputs(const ResolvedProblem& r, std::int64_t begin, std::int64_t count,
                     const BackwardInputs& backward = {});

/// What the column kernels need to know about a row.
struct alignas(32) RowTerms {
  float inverse_temperature;  ///< 1 / T; NaN for T that is not > 0 and finite
  float lse;
  float a, g;      ///< upstream gradients of logprob and entropy
  float entropy;   ///< 0 unless g is wanted
  int active;      ///< 0: nothing is computed for this row
  int64_t target;  ///< column within the shard, or -1 when it is not one of its valid columns
};

/// A list of the active rows; without one, row i of the work is row i.
struct RowList {
  const std::int32_t* index = nullptr;  ///< ascending row numbers
  const std::int64_t* count = nullptr;  ///< on the device; rows of the work beyond it are inactive
};

/// Writes terms[i] for i in [0, n). `backward`: active needs an upstream gradient, and a, g, lse,
/// entropy are filled in.
void prepare_rows(const RowInputs& rows, std::int64_t n, bool backward, RowTerms* terms, cudaStream_t stream);

/// Where a row's results go; absent ones are not written.
struct RowOutputs {
  Vector logprob, entropy, lse;
  SoftmaxState* state = nullptr;  ///< [n, 4]: the merged state itself, for forward_partial
  float* target = nullptr;        ///< [n]: z at the target, of active rows only
};
/// Results of rows [begin, begin + count).
RowOutputs row_outputs(const ForwardOutputs& outputs, std::int64_t begin, std::int64_t count);

/// One chunk of segment states to fold: state of segment grid.first() + s and work row i at
/// partial[s * partial_stride + i]. Real: float, or double for problems that compute in fp32.
template <class Real>
struct FoldChunk {
  const SoftmaxStateT<Real>* partial;
  std::int64_t partial_stride;
  SegmentGrid grid;
  /// Octant states [8, carry_stride] between chunks; may be null when the only chunk is first and last.
  SoftmaxStateT<Real>* carry;
  std::int64_t carry_stride;
  bool first, last;
};
/// Folds the chunk's segments in canonical order; after the last chunk merges the octants as a tree and
/// writes the results of the rows of the work. Inactive rows get zeros (the empty state). With a list the
/// rows outside it are not touched.
template <class Real>
void fold_segments(const FoldChunk<Real>& chunk, const RowInputs& rows, std::int64_t n, const RowList& list,
                   const RowOutputs& outputs, cudaStream_t stream);

/// combine() of the public interface: merge_tree over the states of all shards, in double for problems that
/// compute in fp32 (no rounding but that of the shards' states), else in float as inside a shard.
Status combine(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& outputs, const Execution& e);

/// Checked mode: reads ids and temperatures on the device, waits, and reports the first bad one with the
/// message of the host check. Uses the first 32 bytes of the workspace. An error while capturing a graph.
Status check_values(const ResolvedProblem& r, const Execution& e);
inline constexpr std::size_t kCheckBytes = 32;

}  // namespace lmhead::cuda
