// Candidate sets on the GPU, forward: a block a row, so that the hidden row is read once; a warp two candidates at a
// time.
//
// Bound by the bytes of the weight rows: N K H of them (fewer where ids repeat within L2's reach). The
// products run in fp32 on the vector units, about four instructions an element, well under the memory time.
#include "core/return_if_error.h"
#include "cuda/support_kernels.cuh"

namespace lmhead::cuda {
namespace {

template <class T, Round R>
__global__ void __launch_bounds__(kThreads) states_kernel(const SupportArgs a, SoftmaxState* states, bool stage) {
  extern __shared__ float shared[];
  __shared__ SoftmaxState warp_states[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (std::int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const RowTerms t = a.terms[i];
    const std::int32_t* ids = a.ids + i * a.id_stride;
    SetFacts set{false, false, false};
    if (t.active) set = scan_set(a, ids, t.target);
    if (!set.any || set.bad) {
      SoftmaxState s = empty_state();
      if (set.bad) s = {NAN, NAN, NAN, NAN};
      if (threadIdx.x == 0) states[i] = s;
      continue;
    }
    const HiddenRow x = stage_hidden(a, i, stage ? shared : nullptr);
    SoftmaxState s = empty_state();
    for (std::int64_t k = warp; k < a.k; k += kTogether * kWarps) {
      std::int64_t columns[kTogether];
      bool any = false;
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const std::int64_t slot = k + r * kWarps;
        columns[r] = slot < a.k ? member_column(a, ids, slot, lane) : -1;
        any |= columns[r] >= 0;
      }
      if (!any) continue;
      float z[kTogether];
      warp_logits<T, R>(a, x, columns, t.inverse_temperature, lane, z);
#pragma unroll
      for (int r = 0; r < kTogether; ++r)  // z - z is NaN for NaN and +inf; -inf holds no mass
        if (columns[r] >= 0)
          s = merge(
              s, {z[r], z[r] == -INFINITY ? 0.0f : z[r] - z[r] + 1.0f, 0.0f, columns[r] == t.target ? z[r] : INFINITY});
    }
    if (warp == 0 && t.target >= 0 && !set.target_is_member) {
      float z[kTogether];
      warp_logits<T, R>(a, x, {t.target, -1}, t.inverse_temperature, lane, z);
      s.target = z[0];
    }
    if (lane == 0) warp_states[warp] = s;
    __syncthreads();
    if (threadIdx.x == 0) states[i] = merge_tree(warp_states, kWarps);
    __syncthreads();
  }
}

__global__ void results_kernel(const SupportArgs a, const SoftmaxState* states, std::int64_t shards, RowInputs rows,
                               SupportOutputs out) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < a.n;
       i += std::int64_t{gridDim.x} * kThreads) {
    bool valid = false;
    if ((rows.active.data == nullptr || load_int(rows.active, i) > 0) && load_int(rows.targets, i) != rows.ignore_index)
      for (std::int64_t k = 0; k < a.k && !valid; ++k) valid = a.ids[i * a.id_stride + k] != -1;
    RowResult<float> r{0.0f, 0.0f, 0.0f};
    if (valid) r = finish(merge_tree(states + i, shards, a.n), true, false);
    if (out.logprob.data != nullptr) store_float(out.logprob, i, r.logprob);
    if (out.entropy.data != nullptr) store_float(out.entropy, i, r.entropy);
    if (out.lse.data != nullptr) store_float(out.lse, i, r.lse);
    if (out.valid.data != nullptr) static_cast<bool*>(out.valid.data)[i * out.valid.stride] = valid;
  }
}

template <class T, Round R>
__global__ void __launch_bounds__(kThreads) selected_kernel(const SupportArgs a, const Matrix logits, bool stage) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (std::int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const RowTerms t = a.terms[i];
    HiddenRow x{};
    if (t.active) x = stage_hidden(a, i, stage ? shared : nullptr);
    for (std::int64_t k = warp; k < a.k; k += kTogether * kWarps) {
      std::int64_t columns[kTogether];
      bool any = false;
#pragma unroll
      for (int r = 0; r < kTogether; ++r) {
        const std::int64_t slot = k + r * kWarps;
        std::int64_t j = -1;
        if (t.active && slot < a.k)
          j = load_int(a.any_ids.data, a.any_ids.dtype, i * a.any_ids.row_stride + slot) - a.vocab_start;
        columns[r] = j >= 0 && j < a.v_valid ? j : -1;
        any |= columns[r] >= 0;
      }
      float z[kTogether];
      if (any) warp_logits<T, R>(a, x, columns, t.inverse_temperature, lane, z);
#pragma unroll
      for (int r = 0; r < kTogether; ++r)
        if (lane == 0 && k + r * kWarps < a.k)
          static_cast<float*>(logits.data)[i * logits.row_stride + k + r * kWarps] = columns[r] >= 0 ? z[r] : INFINITY;
    }
    __syncthreads();
  }
}

__global__ void selected_results_kernel(const SupportArgs a, const ConstMatrix logits, std::int64_t shards,
                                        const ConstVector lse, const ConstVector logprob, const RowInputs rows,
                                        const Matrix selected) {
  const std::int64_t count = a.n * a.k;
  for (std::int64_t s = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; s < count;
       s += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t i = s / a.k, k = s % a.k;
    const std::int64_t id = load_int(a.any_ids.data, a.any_ids.dtype, i * a.any_ids.row_stride + k);
    const std::int64_t target = load_int(rows.targets, i);
    float z = INFINITY;
    for (std::int64_t shard = 0; shard < shards; ++shard) {
      const float part = static_cast<const float*>(logits.data)[(shard * a.n + i) * logits.row_stride + k];
      if (!(part >= z)) z = part;  // the minimum; NaN wins
    }
    float value = 0.0f;
    if (id != -1 && target != rows.ignore_index && (rows.active.data == nullptr || load_int(rows.active, i) > 0))
      value = id == target ? load_float(logprob, i) : z == INFINITY ? NAN : z - load_float(lse, i);
    static_cast<float*>(selected.data)[i * selected.row_stride + k] = value;
  }
}

__global__ void find_bad_kernel(const SupportArgs a, unsigned long long* found) {
  const std::int64_t count = a.n * a.k;
  for (std::int64_t s = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; s < count;
       s += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t id = load_int(a.any_ids.data, a.any_ids.dtype, s / a.k * a.any_ids.row_stride + s % a.k);
    if ((id < -1 || id >= a.valid_vocab) && a.terms[s / a.k].active)
      atomicMin(found, static_cast<unsigned long long>(s));
  }
}

}  // namespace

Status support_states(const SupportArgs& args, SoftmaxState* states, cudaStream_t stream) {
  const SupportArgs a = with_staging(args);
  const std::size_t bytes = staged_bytes(a);
  Status status;
  with_kernel_types(a, [&](auto* weight, auto round) {
    using T = std::remove_pointer_t<decltype(weight)>;
    auto kernel = states_kernel<T, decltype(round)::value>;
    static_cast<void>(status = allow_shared(kernel, bytes));  // nvcc takes the assignment for a dropped result
    if (status.ok()) kernel<<<grid_for(a.n, 1), kThreads, bytes, stream>>>(a, states, bytes > 0);
  });
  LMHEAD_RETURN_IF_ERROR(status);
  return last_launch("support forward");
}

Status support_results(const SupportArgs& a, const SoftmaxState* states, std::int64_t shards, const RowInputs& rows,
                       const SupportOutputs& out, cudaStream_t stream) {
  results_kernel<<<grid_for(a.n, kThreads), kThreads, 0, stream>>>(a, states, shards, rows, out);
  return last_launch("support combine");
}

Status selected_states(const SupportArgs& args, const Matrix& logits, cudaStream_t stream) {
  const SupportArgs a = with_staging(args);
  const std::size_t bytes = staged_bytes(a);
  Status status;
  with_kernel_types(a, [&](auto* weight, auto round) {
    using T = std::remove_pointer_t<decltype(weight)>;
    auto kernel = selected_kernel<T, decltype(round)::value>;
    static_cast<void>(status = allow_shared(kernel, bytes));
    if (status.ok()) kernel<<<grid_for(a.n, 1), kThreads, bytes, stream>>>(a, logits, bytes > 0);
  });
  LMHEAD_RETURN_IF_ERROR(status);
  return last_launch("selected logits");
}

Status selected_results(const SupportArgs& a, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const RowInputs& rows, const Matrix& selected,
                        cudaStream_t stream) {
  if (a.n * a.k == 0) return {};
  selected_results_kernel<<<grid_for(a.n * a.k, kThreads), kThreads, 0, stream>>>(a, logits, logits.rows / a.n, lse,
                                                                                  logprob, rows, selected);
  return last_launch("selected combine");
}

Status support_find_bad(const SupportArgs& a, unsigned long long* found, cudaStream_t stream) {
  LMHEAD_RETURN_IF_ERROR(to_status(cudaMemsetAsync(found, 0xff, sizeof *found, stream), "support check"));
  if (a.n * a.k > 0) find_bad_kernel<<<grid_for(a.n * a.k, kThreads), kThreads, 0, stream>>>(a, found);
  return last_launch("support check");
}

}  // namespace lmhead::cuda
