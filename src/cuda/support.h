// Kernels of the candidate-set calls. Every function queues work on `stream` and returns.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/support.h"
#include "cuda/rows.h"

namespace lmhead::cuda {

/// One candidate-set problem as kernels see it; passed by value.
struct SupportArgs {
  const std::int32_t* ids;  ///< [N, K], global: candidate sets
  std::int64_t id_stride, n, k;
  ConstMatrix any_ids;         ///< the same ids as given, int32 or int64: selected ids
  ConstMatrix hidden, weight;  ///< weight: this shard's valid rows
  ConstVector bias;            ///< may be absent
  std::int64_t vocab_start, v_valid, valid_vocab;
  float scale, softcap;   ///< softcap 0: none
  DType compute;          ///< hidden and weight are rounded to it before they are multiplied
  bool aligned;           ///< rows of hidden and weight may be read 16 bytes at a time
  const RowTerms* terms;  ///< [N] from prepare_rows
};

/// States of the members on this shard.
Status support_states(const SupportArgs& args, SoftmaxState* states, cudaStream_t stream);

/// dl of every slot into dl [N, K + 1] (0 where there is nothing; slot K is the sampled non-member), and
/// the hidden gradient unless absent.
Status support_rows_backward(const SupportArgs& args, float* dl, const Matrix& hidden_gradient, bool accumulate,
                             cudaStream_t stream);

/// Scratch bytes of support_weight_backward: sort buffers and partial sums.
Result<std::size_t> support_weight_bytes(std::int64_t slots, std::int64_t v_local, std::int64_t h);
/// Weight and bias gradients from dl: slots sorted by id (stable, so by token row within an id), summed in
/// windows of a length that N, K and H fix, then window by window. Either may be absent. slots = N (K + 1) < 2^31.
Status support_weight_backward(const SupportArgs& args, const float* dl, const BackwardOutputs& out,
                               const ConstVector& targets, std::int64_t v_local, void* scratch,
                               std::size_t scratch_bytes, cudaStream_t stream);

/// Results from the states of all shards.
Status support_results(const SupportArgs& args, const SoftmaxState* states, std::int64_t shards, const RowInputs& rows,
                       const SupportOutputs& out, cudaStream_t stream);

/// z of each id that this shard holds, +inf elsewhere.
Status selected_states(const SupportArgs& args, const Matrix& logits, cudaStream_t stream);
/// z - lse from the logits of all shards; logprob where the id is the target.
Status selected_results(const SupportArgs& args, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const RowInputs& rows, const Matrix& selected, cudaStream_t stream);

/// Queues the search for an id outside {-1} and [0, valid_vocab) in active rows; the smallest flat index
/// row * K + column, or ~0, ends up in *found (device).
Status support_find_bad(const SupportArgs& args, unsigned long long* found, cudaStream_t stream);

}  // namespace lmhead::cuda
