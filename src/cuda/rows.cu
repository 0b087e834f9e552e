#include "cuda/rows.h"

#include "core/return_if_error.h"
#include "core/validate.h"
#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/rows.cuh"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = static_cast<int>(kOctants);  // fold: one lane an octant

ConstVector slice(ConstVector v, std::int64_t begin, std::int64_t count) {
  if (v.absent()) return v;
  v.data = static_cast<const std::byte*>(v.data) + begin * v.stride * static_cast<std::int64_t>(size_of(v.dtype));
  v.size = count;
  return v;
}
Vector slice(Vector v, std::int64_t begin, std::int64_t count) {
  if (v.absent()) return v;
  v.data = static_cast<std::byte*>(v.data) + begin * v.stride * static_cast<std::int64_t>(size_of(v.dtype));
  v.size = count;
  return v;
}

ConstMatrix slice(ConstMatrix m, std::int64_t begin, std::int64_t count) {
  m.data = static_cast<const std::byte*>(m.data) + begin * m.row_stride * static_cast<std::int64_t>(size_of(m.dtype));
  m.rows = count;
  return m;
}
SelectedGradient slice(SelectedGradient s, std::int64_t begin, std::int64_t count) {
  if (s.absent()) return s;
  return {slice(s.ids, begin, count), slice(s.logits, begin, count), slice(s.upstream, begin, count)};
}

__global__ void prepare_kernel(RowInputs rows, std::int64_t n, bool backward, RowTerms* terms) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads)
    terms[i] = takes_part(rows, i, backward) ? row_terms(rows, i, backward) : kNoTerms;
}

template <class Real>
__device__ __forceinline__ SoftmaxStateT<Real> shuffle_down(unsigned mask, const SoftmaxStateT<Real>& s, int delta) {
  return {__shfl_down_sync(mask, s.max, delta, kLanesPerRow), __shfl_down_sync(mask, s.sum, delta, kLanesPerRow),
          __shfl_down_sync(mask, s.weighted, delta, kLanesPerRow),
          __shfl_down_sync(mask, s.target, delta, kLanesPerRow)};
}

/// The row's results, each rounded to fp32 once.
template <class Real>
__device__ __forceinline__ RowResult<float> results_of(const SoftmaxStateT<Real>& s, bool in_vocab) {
  const RowResult<Real> r = finish(s, in_vocab);
  return {static_cast<float>(r.logprob), static_cast<float>(r.entropy), static_cast<float>(r.lse)};
}

template <class Real>
__global__ void fold_kernel(FoldChunk<Real> chunk, RowInputs rows, std::int64_t n, RowList list, RowOutputs out) {
  const std::int64_t count = list.count != nullptr ? *list.count : n;
  const int octant = static_cast<int>(threadIdx.x) % kLanesPerRow;
  constexpr int kRows = kThreads / kLanesPerRow;
  for (std::int64_t base = blockIdx.x * std::int64_t{kRows}; base < n; base += std::int64_t{gridDim.x} * kRows) {
    const std::int64_t i = base + threadIdx.x / kLanesPerRow;
    // All lanes of a row agree, but rows of one warp may not: the shuffles below name the row's lanes only.
    if (i >= n || (i >= count && list.index != nullptr)) continue;
    const std::int64_t row = list.index != nullptr ? list.index[i] : i;
    SoftmaxStateT<Real> state = empty_state<Real>();
    const bool active = is_active(rows, row);
    if (active) {
      if (!chunk.first) state = chunk.carry[octant * chunk.carry_stride + i];
      const SegmentGrid& grid = chunk.grid;
      const std::int64_t b = max(grid.begin, octant * grid.octant_size);
      const std::int64_t e = min(grid.end, (octant + 1) * grid.octant_size);
      if (b < e) {
        const std::int64_t first = grid.first(), last = grid.id(e - 1) - first;
        for (std::int64_t s = grid.id(b) - first; s <= last; ++s)
          state = merge(state, chunk.partial[s * chunk.partial_stride + i]);
      }
    }
    if (!chunk.last) {
      chunk.carry[octant * chunk.carry_stride + i] = state;
      continue;
    }
    // merge_tree over eight octants: neighbours first. A vocabulary of one octant has seven empty ones,
    // and the empty state is the identity bit for bit.
    const unsigned lanes = 0xffu << (threadIdx.x % 32u / kLanesPerRow * kLanesPerRow);
    for (int delta = 1; delta < kLanesPerRow; delta *= 2) state = merge(state, shuffle_down(lanes, state, delta));
    if (octant != 0) continue;
    if (out.state != nullptr) out.state[row] = state_as<float>(state);
    if (out.target != nullptr) out.target[row] = static_cast<float>(state.target);
    write_row(out, row, active ? results_of(state, target_in_vocab(rows, row)) : RowResult<float>{0.0f, 0.0f, 0.0f});
  }
}

template <class Real>
__global__ void combine_kernel(const SoftmaxState* states, std::int64_t shards, RowInputs rows, std::int64_t n,
                               RowOutputs out) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads) {
    RowResult<float> result{0.0f, 0.0f, 0.0f};
    if (is_active(rows, i))
      result = results_of(merge_tree<float, Real>(states + i, shards, n), target_in_vocab(rows, i));
    write_row(out, i, result);
  }
}

/// First bad value: row * 2 + (1 for a temperature), and the value itself.
struct Finding {
  unsigned long long key;
  std::int64_t id;
  float temperature;
};
static_assert(sizeof(Finding) <= kCheckBytes);
constexpr unsigned long long kNothing = ~0ull;

__device__ bool bad_target(const RowInputs& rows, std::int64_t i) {
  const std::int64_t id = load_int(rows.targets, i);
  return !rows.zero_out_of_vocab && (id < 0 || id >= rows.valid_vocab);
}

__global__ void clear_finding_kernel(Finding* finding) { finding->key = kNothing; }

__global__ void find_bad_kernel(RowInputs rows, std::int64_t n, Finding* finding) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads) {
    if (!is_active(rows, i)) continue;
    unsigned long long key = kNothing;
    if (bad_target(rows, i)) {
      key = static_cast<unsigned long long>(i) * 2;
    } else if (rows.temperature.data != nullptr && isnan(inverse_temperature(rows, i))) {
      key = static_cast<unsigned long long>(i) * 2 + 1;
    }
    if (key != kNothing) atomicMin(&finding->key, key);
  }
}

__global__ void read_bad_kernel(RowInputs rows, Finding* finding) {
  if (finding->key == kNothing) return;
  const auto i = static_cast<std::int64_t>(finding->key / 2);
  finding->id = load_int(rows.targets, i);
  finding->temperature = rows.temperature.data != nullptr ? load_float(rows.temperature, i) : 0.0f;
}

}  // namespace

RowInputs row_inputs(const ResolvedProblem& r, std::int64_t begin, std::int64_t count, const BackwardInputs& b) {
  const Problem& p = r.given;
  return {slice(p.targets, begin, count),
          slice(p.active, begin, count),
          slice(p.row_temperature, begin, count),
          slice(b.lse, begin, count),
          slice(b.entropy, begin, count),
          slice(b.dlogprob, begin, count),
          slice(b.dentropy, begin, count),
          slice(b.selected, begin, count),
          static_cast<float>(p.temperature),
          p.ignore_index,
          p.vocab_start,
          r.v_valid,
          r.valid_vocab,
          p.out_of_vocab == OutOfVocab::kZero};
}

RowOutputs row_outputs(const ForwardOutputs& o, std::int64_t begin, std::int64_t count) {
  return {slice(o.logprob, begin, count), slice(o.entropy, begin, count), slice(o.lse, begin, count), nullptr, nullptr};
}

void prepare_rows(const RowInputs& rows, std::int64_t n, bool backward, RowTerms* terms, cudaStream_t stream) {
  if (n > 0) prepare_kernel<<<grid_for(n, kThreads), kThreads, 0, stream>>>(rows, n, backward, terms);
}

template <class Real>
void fold_segments(const FoldChunk<Real>& chunk, const RowInputs& rows, std::int64_t n, const RowList& list,
                   const RowOutputs& outputs, cudaStream_t stream) {
  if (n > 0) fold_kernel<<<grid_for(n, kThreads / kLanesPerRow), kThreads, 0, stream>>>(chunk, rows, n, list, outputs);
}
template void fold_segments<float>(const FoldChunk<float>&, const RowInputs&, std::int64_t, const RowList&,
                                   const RowOutputs&, cudaStream_t);
template void fold_segments<double>(const FoldChunk<double>&, const RowInputs&, std::int64_t, const RowList&,
                                    const RowOutputs&, cudaStream_t);

Status combine(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& outputs, const Execution& e) {
  if (r.n == 0) return {};
  const auto kernel = r.compute == DType::kFloat32 ? combine_kernel<double> : combine_kernel<float>;
  kernel<<<grid_for(r.n, kThreads), kThreads, 0, stream_of(e)>>>(static_cast<const SoftmaxState*>(states.data),
                                                                 states.rows / r.n, row_inputs(r, 0, r.n), r.n,
                                                                 row_outputs(outputs, 0, r.n));
  return last_launch("combine");
}

Status check_values(const ResolvedProblem& r, const Execution& e) {
  if (r.n == 0) return {};
  const cudaStream_t stream = stream_of(e);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  LMHEAD_RETURN_IF_ERROR(to_status(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone)
    return {StatusCode::kInvalidArgument, "check: expected false while a CUDA graph is captured, got true"};
  const RowInputs rows = row_inputs(r, 0, r.n);
  auto* finding = static_cast<Finding*>(e.workspace);
  clear_finding_kernel<<<1, 1, 0, stream>>>(finding);
  find_bad_kernel<<<grid_for(r.n, kThreads), kThreads, 0, stream>>>(rows, r.n, finding);
  read_bad_kernel<<<1, 1, 0, stream>>>(rows, finding);
  LMHEAD_RETURN_IF_ERROR(last_launch("check_values"));
  Finding found{};
  LMHEAD_RETURN_IF_ERROR(
      to_status(cudaMemcpyAsync(&found, finding, sizeof found, cudaMemcpyDeviceToHost, stream), "check_values"));
  LMHEAD_RETURN_IF_ERROR(to_status(cudaStreamSynchronize(stream), "check_values"));
  if (found.key == kNothing) return {};
  const auto row = static_cast<std::int64_t>(found.key / 2);
  return found.key % 2 == 0 ? bad_target_id(r, found.id, row) : bad_temperature(found.temperature, row);
}

}  // namespace lmhead::cuda
