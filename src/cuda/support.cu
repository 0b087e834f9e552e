// Candidate sets on the GPU: a block a row, so that the hidden row is read once; a warp a candidate.
//
// Bound by the bytes of the weight rows: N K H of them (fewer where ids repeat within L2's reach). The
// products run in fp32 on the vector units, about four instructions an element, well under the memory time.
#include <cub/device/device_radix_sort.cuh>
#include <thrust/iterator/counting_iterator.h>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/support.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVector = 8;                           // elements a lane reads at a time when rows are 16-byte aligned
constexpr std::int64_t kMaxStagedBytes = 160 << 10;  // hidden rows beyond this are read from global memory

enum class Round { kNone, kBFloat16, kFloat16 };

template <Round R>
__device__ __forceinline__ float rounded(float x) {
  if constexpr (R == Round::kBFloat16) return __bfloat162float(__float2bfloat16_rn(x));
  if constexpr (R == Round::kFloat16) return __half2float(__float2half_rn(x));
  return x;
}

__device__ __forceinline__ float rounded_to(DType compute, DType own, float x) {
  if (compute == own) return x;
  if (compute == DType::kBFloat16) return rounded<Round::kBFloat16>(x);
  if (compute == DType::kFloat16) return rounded<Round::kFloat16>(x);
  return x;
}

/// Eight consecutive elements, 16-byte aligned.
template <class T>
__device__ __forceinline__ void load8(const T* p, float (&out)[kVector]) {
  if constexpr (sizeof(T) == 4) {
    const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w, out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
  } else {
    const uint4 raw = *reinterpret_cast<const uint4*>(p);
    const T* e = reinterpret_cast<const T*>(&raw);
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] = to_float(e[i]);
  }
}

template <class T>
struct RowReader {
  const T* weight;
  std::int64_t stride;
  __device__ const T* row(std::int64_t j) const { return weight + j * stride; }
};

/// The hidden row: in shared memory as fp32 in the compute type's precision, or in place when too long.
struct HiddenRow {
  const float* staged;
  const void* raw;
  DType dtype, compute;
  __device__ float operator[](std::int64_t k) const {
    return staged != nullptr ? staged[k] : rounded_to(compute, dtype, load_float(raw, dtype, k));
  }
};

__device__ HiddenRow stage_hidden(const SupportArgs& a, std::int64_t i, float* shared) {
  const auto* raw =
      static_cast<const char*>(a.hidden.data) + i * a.hidden.row_stride * (a.hidden.dtype == DType::kFloat32 ? 4 : 2);
  if (shared != nullptr) {
    for (std::int64_t k = threadIdx.x; k < a.hidden.cols; k += kThreads)
      shared[k] = rounded_to(a.compute, a.hidden.dtype, load_float(raw, a.hidden.dtype, k));
    __syncthreads();
  }
  return {shared, raw, a.hidden.dtype, a.compute};
}

/// <x, w_j> by one warp; every lane returns the sum. The order is fixed by H alone.
template <class T, Round R>
__device__ float warp_dot(const SupportArgs& a, const HiddenRow& x, const T* w, int lane) {
  const std::int64_t h = a.hidden.cols;
  float sum = 0.0f;
  std::int64_t k = 0;
  if (a.aligned) {
    float lanes[kVector] = {};
#pragma unroll 4
    for (std::int64_t c = lane * kVector; c < h; c += 32 * kVector) {
      float v[kVector];
      load8(w + c, v);
#pragma unroll
      for (int e = 0; e < kVector; ++e) lanes[e] = fmaf(x.staged[c + e], rounded<R>(v[e]), lanes[e]);
    }
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum += lanes[e];
    k = h;
  }
  for (k += lane; k < h; k += 32) sum = fmaf(x[k], rounded<R>(to_float(w[k])), sum);
#pragma unroll
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_xor_sync(~0u, sum, delta);
  return sum;
}

/// z in nats of a finished product with column j of the shard, and dz/dproduct.
__device__ __forceinline__ float finish_logit(const SupportArgs& a, float product, std::int64_t j, float inverse_t) {
  if (a.bias.data != nullptr) product += load_float(a.bias, j);
  product *= a.scale;
  return (a.softcap > 0.0f ? a.softcap * tanhf(product / a.softcap) : product) * inverse_t;
}
__device__ __forceinline__ float slope(const SupportArgs& a, float z, float inverse_t) {
  if (!(a.softcap > 0.0f)) return a.scale * inverse_t;
  const float saturation = z / (inverse_t * a.softcap);
  return a.scale * inverse_t * (1.0f - saturation * saturation);
}

/// What a block knows of its row's set.
struct SetFacts {
  bool any, bad, target_is_member;
};

__device__ SetFacts scan_set(const SupportArgs& a, const std::int32_t* ids, std::int64_t target) {
  bool any = false, bad = false, member = false;
  for (std::int64_t k = threadIdx.x; k < a.k; k += kThreads) {
    const std::int32_t id = ids[k];
    any |= id != -1;
    bad |= id < -1 || id >= a.valid_vocab;
    member |= target >= 0 && id == target + a.vocab_start;
  }
  return {__syncthreads_or(any) != 0, __syncthreads_or(bad) != 0, __syncthreads_or(member) != 0};
}

/// Column of slot k on this shard, or -1 for padding, another shard's member, or a repeated id (the whole
/// warp looks back for an earlier one).
__device__ std::int64_t member_column(const SupportArgs& a, const std::int32_t* ids, std::int64_t k, int lane) {
  const std::int32_t id = ids[k];
  const std::int64_t j = id - a.vocab_start;
  if (id < 0 || j < 0 || j >= a.v_valid) return -1;
  bool repeated = false;
  for (std::int64_t e = lane; e < k; e += 32) repeated |= ids[e] == id;
  return __any_sync(~0u, repeated) ? -1 : j;
}

template <class T, Round R>
__global__ void __launch_bounds__(kThreads) states_kernel(const SupportArgs a, SoftmaxState* states, bool stage) {
  extern __shared__ float shared[];
  __shared__ SoftmaxState warp_states[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* weight = static_cast<const T*>(a.weight.data);
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
    for (std::int64_t k = warp; k < a.k; k += kWarps) {
      const std::int64_t j = member_column(a, ids, k, lane);
      if (j < 0) continue;
      const float z =
          finish_logit(a, warp_dot<T, R>(a, x, weight + j * a.weight.row_stride, lane), j, t.inverse_temperature);
      // z - z is NaN for NaN and +inf; -inf holds no mass.
      s = merge(s, {z, z == -INFINITY ? 0.0f : z - z + 1.0f, 0.0f, j == t.target ? z : INFINITY});
    }
    if (warp == 0 && t.target >= 0 && !set.target_is_member)
      s.target = finish_logit(a, warp_dot<T, R>(a, x, weight + t.target * a.weight.row_stride, lane), t.target,
                              t.inverse_temperature);
    if (lane == 0) warp_states[warp] = s;
    __syncthreads();
    if (threadIdx.x == 0) states[i] = merge_tree(warp_states, kWarps);
    __syncthreads();
  }
}

/// dX of row i: each thread owns whole columns, in stretches of kVector where rows are aligned, and adds
/// the slots in order, so that the one rounding of a 16-bit gradient comes last.
template <class T, Round R>
__device__ void hidden_gradient(const SupportArgs& a, const std::int32_t* ids, std::int64_t target, const float* row_dl,
                                const Matrix& out, std::int64_t i, bool accumulate) {
  const T* weight = static_cast<const T*>(a.weight.data);
  const int width = a.aligned ? kVector : 1;
  for (std::int64_t c = static_cast<std::int64_t>(threadIdx.x) * width; c < a.hidden.cols; c += kThreads * width) {
    float sum[kVector] = {};
    for (std::int64_t k = 0; k <= a.k; ++k) {
      const float d = row_dl[k];
      if (d == 0.0f) continue;
      const std::int64_t j = k == a.k ? target : ids[k] - a.vocab_start;
      const T* w = weight + j * a.weight.row_stride + c;
      if (a.aligned) {
        float v[kVector];
        load8(w, v);
#pragma unroll
        for (int l = 0; l < kVector; ++l) sum[l] = fmaf(d, rounded<R>(v[l]), sum[l]);
      } else {
        sum[0] = fmaf(d, rounded<R>(to_float(*w)), sum[0]);
      }
    }
#pragma unroll
    for (int l = 0; l < kVector; ++l) {
      if (l >= width) break;
      const std::int64_t at = i * out.row_stride + c + l;
      store_float(out.data, out.dtype, at, (accumulate ? load_float(out.data, out.dtype, at) : 0.0f) + sum[l]);
    }
  }
}

template <class T, Round R>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(const SupportArgs a, float* dl, const Matrix out, bool accumulate, bool stage) {
  extern __shared__ float shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* weight = static_cast<const T*>(a.weight.data);
  for (std::int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const RowTerms t = a.terms[i];
    const std::int32_t* ids = a.ids + i * a.id_stride;
    float* row_dl = dl + i * (a.k + 1);
    SetFacts set{false, false, false};
    if (t.active) set = scan_set(a, ids, t.target);
    const bool computed = set.any && !set.bad;
    for (std::int64_t k = threadIdx.x; k <= a.k; k += kThreads) row_dl[k] = 0.0f;
    __syncthreads();
    if (computed) {
      const HiddenRow x = stage_hidden(a, i, stage ? shared : nullptr);
      for (std::int64_t k = warp; k <= a.k; k += kWarps) {
        const bool member = k < a.k;
        const std::int64_t j = member ? member_column(a, ids, k, lane) : set.target_is_member ? -1 : t.target;
        if (j < 0) continue;
        const float z =
            finish_logit(a, warp_dot<T, R>(a, x, weight + j * a.weight.row_stride, lane), j, t.inverse_temperature);
        const float log_p = z - t.lse, p = member ? expf(log_p) : 0.0f;
        float dz = -t.a * p - (p == 0.0f ? 0.0f : t.g * p * (log_p + t.entropy));
        if (j == t.target) dz += t.a;
        if (lane == 0) row_dl[k] = dz * slope(a, z, t.inverse_temperature);
      }
      __syncthreads();
    }
    if (out.data == nullptr) continue;
    if (set.bad) {  // an unchecked bad id: NaN in its own row
      for (std::int64_t c = threadIdx.x; c < a.hidden.cols; c += kThreads)
        store_float(out.data, out.dtype, i * out.row_stride + c, NAN);
    } else if (computed || !accumulate) {
      hidden_gradient<T, R>(a, ids, t.target, row_dl, out, i, accumulate);
    }
    __syncthreads();
  }
}

__global__ void keys_kernel(const SupportArgs a, const float* dl, ConstVector targets, std::int64_t v_local,
                            std::uint32_t* keys, std::uint32_t* slots) {
  const std::int64_t count = a.n * (a.k + 1);
  for (std::int64_t s = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; s < count;
       s += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t i = s / (a.k + 1), k = s % (a.k + 1);
    std::int64_t id = v_local;  // nothing there: sorted behind every column
    if (dl[s] != 0.0f) id = (k == a.k ? load_int(targets, i) : a.ids[i * a.id_stride + k]) - a.vocab_start;
    keys[s] = static_cast<std::uint32_t>(id);
    slots[s] = static_cast<std::uint32_t>(s);
  }
}

__global__ void clear_rows_kernel(Matrix out) {
  const std::int64_t count = out.rows * out.cols;
  for (std::int64_t e = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; e < count;
       e += std::int64_t{gridDim.x} * kThreads)
    store_float(out.data, out.dtype, e / out.cols * out.row_stride + e % out.cols, 0.0f);
}

/// A block takes the sorted slots one after another; at the first slot of an id it sums the id's whole
/// run over its stretch of columns (blockIdx.y). One writer a weight element.
template <class X>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(const SupportArgs a, const float* dl, const std::uint32_t* keys, const std::uint32_t* slots,
                  std::int64_t v_local, const Matrix out, bool accumulate, const Vector bias, bool accumulate_bias) {
  const std::int64_t count = a.n * (a.k + 1), h = a.hidden.cols;
  const int width = a.aligned ? kVector : 1;
  const std::int64_t column = (std::int64_t{blockIdx.y} * kThreads + threadIdx.x) * width;
  const X* hidden = static_cast<const X*>(a.hidden.data);
  for (std::int64_t s = blockIdx.x; s < count; s += gridDim.x) {
    const std::uint32_t id = keys[s];
    if (id >= v_local) return;  // the rest is padding
    if (s > 0 && keys[s - 1] == id) continue;
    float sum[kVector] = {}, bias_sum = 0.0f;
    for (std::int64_t e = s; e < count && keys[e] == id; ++e) {
      const std::int64_t slot = slots[e];
      const float d = dl[slot];
      bias_sum += d;
      if (out.data == nullptr || column >= h) continue;
      const X* x = hidden + slot / (a.k + 1) * a.hidden.row_stride + column;
      if (a.aligned) {
        float v[kVector];
        load8(x, v);
#pragma unroll
        for (int l = 0; l < kVector; ++l) sum[l] = fmaf(d, rounded_to(a.compute, a.hidden.dtype, v[l]), sum[l]);
      } else {
        sum[0] = fmaf(d, rounded_to(a.compute, a.hidden.dtype, to_float(*x)), sum[0]);
      }
    }
    if (out.data != nullptr && column < h) {
#pragma unroll
      for (int l = 0; l < kVector; ++l) {
        if (l >= width) break;
        const std::int64_t at = std::int64_t{id} * out.row_stride + column + l;
        store_float(out.data, out.dtype, at, (accumulate ? load_float(out.data, out.dtype, at) : 0.0f) + sum[l]);
      }
    }
    if (bias.data != nullptr && column == 0) {
      const std::int64_t at = std::int64_t{id} * bias.stride;
      store_float(bias.data, bias.dtype, at,
                  (accumulate_bias ? load_float(bias.data, bias.dtype, at) : 0.0f) + bias_sum);
    }
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
  const T* weight = static_cast<const T*>(a.weight.data);
  for (std::int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const RowTerms t = a.terms[i];
    HiddenRow x{};
    if (t.active) x = stage_hidden(a, i, stage ? shared : nullptr);
    for (std::int64_t k = warp; k < a.k; k += kWarps) {
      const std::int64_t j = load_int(a.any_ids.data, a.any_ids.dtype, i * a.any_ids.row_stride + k) - a.vocab_start;
      float z = INFINITY;
      if (t.active && j >= 0 && j < a.v_valid)
        z = finish_logit(a, warp_dot<T, R>(a, x, weight + j * a.weight.row_stride, lane), j, t.inverse_temperature);
      if (lane == 0) static_cast<float*>(logits.data)[i * logits.row_stride + k] = z;
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

/// Calls fn(null weight pointer, rounding as a constant) for the types of a problem.
template <class Fn>
void with_kernel_types(const SupportArgs& a, Fn&& fn) {
  with_type(a.weight.dtype, [&](auto* weight) {
    if (a.compute == a.weight.dtype || a.compute == DType::kFloat32) {
      fn(weight, std::integral_constant<Round, Round::kNone>{});
    } else if (a.compute == DType::kBFloat16) {
      fn(weight, std::integral_constant<Round, Round::kBFloat16>{});
    } else {
      fn(weight, std::integral_constant<Round, Round::kFloat16>{});
    }
  });
}

/// Shared memory for a staged hidden row (0: too long). Aligned reads need a staged row.
template <class Kernel>
Status allow_shared(Kernel kernel, std::size_t bytes) {
  if (bytes <= (48 << 10)) return {};
  return to_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
                   "cudaFuncSetAttribute");
}

std::size_t staged_bytes(const SupportArgs& a) {
  const auto bytes = a.hidden.cols * static_cast<std::int64_t>(sizeof(float));
  return bytes <= kMaxStagedBytes ? static_cast<std::size_t>(bytes) : 0;
}

/// Rows that are too long to stage are read element by element.
SupportArgs with_staging(SupportArgs a) {
  if (staged_bytes(a) == 0) a.aligned = false;
  return a;
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

Status support_rows_backward(const SupportArgs& args, float* dl, const Matrix& out, bool accumulate,
                             cudaStream_t stream) {
  const SupportArgs a = with_staging(args);
  const std::size_t bytes = staged_bytes(a);
  Status status;
  with_kernel_types(a, [&](auto* weight, auto round) {
    using T = std::remove_pointer_t<decltype(weight)>;
    auto kernel = rows_backward_kernel<T, decltype(round)::value>;
    static_cast<void>(status = allow_shared(kernel, bytes));  // nvcc takes the assignment for a dropped result
    if (status.ok()) kernel<<<grid_for(a.n, 1), kThreads, bytes, stream>>>(a, dl, out, accumulate, bytes > 0);
  });
  LMHEAD_RETURN_IF_ERROR(status);
  return last_launch("support backward");
}

namespace {

int key_bits(std::int64_t v_local) {
  int bits = 1;
  while ((std::int64_t{1} << bits) <= v_local) ++bits;
  return bits;
}

Status sort(void* scratch, std::size_t& bytes, cub::DoubleBuffer<std::uint32_t>& keys,
            cub::DoubleBuffer<std::uint32_t>& slots, std::int64_t count, std::int64_t v_local, cudaStream_t stream) {
  return to_status(cub::DeviceRadixSort::SortPairs(scratch, bytes, keys, slots, static_cast<std::int32_t>(count), 0,
                                                   key_bits(v_local), stream),
                   "support sort");
}

}  // namespace

Result<std::size_t> support_sort_bytes(std::int64_t slots, std::int64_t v_local) {
  cub::DoubleBuffer<std::uint32_t> none(nullptr, nullptr);
  std::size_t bytes = 0;
  LMHEAD_RETURN_IF_ERROR(sort(nullptr, bytes, none, none, slots, v_local, nullptr));
  Workspace measure;
  for (int i = 0; i < 4; ++i) measure.take<std::uint32_t>(slots);
  measure.take_bytes(static_cast<std::int64_t>(bytes));
  return measure.used();
}

Status support_weight_backward(const SupportArgs& a, const float* dl, const BackwardOutputs& out,
                               const ConstVector& targets, std::int64_t v_local, void* scratch,
                               std::size_t scratch_bytes, cudaStream_t stream) {
  const std::int64_t count = a.n * (a.k + 1);
  Workspace workspace(scratch);
  std::uint32_t* buffer[4];
  for (auto& b : buffer) b = workspace.take<std::uint32_t>(count);
  std::size_t sort_bytes = scratch_bytes - workspace.used();
  void* sort_scratch = static_cast<std::byte*>(scratch) + workspace.used();
  cub::DoubleBuffer<std::uint32_t> keys(buffer[0], buffer[1]), slots(buffer[2], buffer[3]);

  if (!out.weight.absent() && !out.accumulate_weight && v_local > 0)
    clear_rows_kernel<<<grid_for(v_local * out.weight.cols, kThreads), kThreads, 0, stream>>>(out.weight);
  if (!out.bias.absent() && !out.accumulate_bias && v_local > 0)
    clear_rows_kernel<<<grid_for(v_local, kThreads), kThreads, 0, stream>>>(
        Matrix{out.bias.data, v_local, 1, out.bias.stride, out.bias.dtype});
  if (count == 0) return last_launch("support backward");
  keys_kernel<<<grid_for(count, kThreads), kThreads, 0, stream>>>(a, dl, targets, v_local, keys.Current(),
                                                                  slots.Current());
  LMHEAD_RETURN_IF_ERROR(last_launch("support backward"));
  LMHEAD_RETURN_IF_ERROR(sort(sort_scratch, sort_bytes, keys, slots, count, v_local, stream));
  const std::int64_t columns_per_block = kThreads * (a.aligned ? kVector : 1);
  const dim3 grid(grid_for(count, 8),
                  out.weight.absent() ? 1u : static_cast<unsigned>(ceil_div(a.hidden.cols, columns_per_block)));
  with_type(a.hidden.dtype, [&](auto* hidden) {
    using X = std::remove_pointer_t<decltype(hidden)>;
    weight_kernel<X><<<grid, kThreads, 0, stream>>>(a, dl, keys.Current(), slots.Current(), v_local, out.weight,
                                                    out.accumulate_weight, out.bias, out.accumulate_bias);
  });
  return last_launch("support weight gradient");
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
