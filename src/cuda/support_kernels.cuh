// What the candidate-set kernels share: a block a row, the hidden row in shared memory, products by warps.
#pragma once

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/launch.h"
#include "cuda/support.h"

namespace lmhead::cuda {

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

/// Eight consecutive elements as they lie in memory, 16-byte aligned.
template <class T>
struct Raw8 {
  uint4 words[sizeof(T) / 2];
  __device__ __forceinline__ void load(const T* p) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) words[i] = reinterpret_cast<const uint4*>(p)[i];
  }
  __device__ __forceinline__ float operator[](int i) const { return to_float(reinterpret_cast<const T*>(words)[i]); }
};

/// The hidden row: in shared memory as fp32 in the compute type's precision, or in place when too long.
/// Aligned rows lie in two halves, elements 0-3 and 4-7 of each group of eight, so that the lanes of a
/// 16-byte read fall on different banks.
struct HiddenRow {
  const float* staged;
  const void* raw;
  DType dtype, compute;
  __device__ float operator[](std::int64_t k) const {
    return staged != nullptr ? staged[k] : rounded_to(compute, dtype, load_float(raw, dtype, k));
  }
};

template <class X>
__device__ __forceinline__ void stage_aligned(const SupportArgs& a, const X* raw, float* shared) {
  const auto h = static_cast<int>(a.hidden.cols);
#pragma unroll 2
  for (int k = static_cast<int>(threadIdx.x) * kVector; k < h; k += kThreads * kVector) {
    Raw8<X> x;
    x.load(raw + k);
    float v[kVector];
#pragma unroll
    for (int e = 0; e < kVector; ++e) v[e] = rounded_to(a.compute, a.hidden.dtype, x[e]);
    *reinterpret_cast<float4*>(shared + k / 2) = {v[0], v[1], v[2], v[3]};
    *reinterpret_cast<float4*>(shared + (h + k) / 2) = {v[4], v[5], v[6], v[7]};
  }
}

__device__ inline HiddenRow stage_hidden(const SupportArgs& a, std::int64_t i, float* shared) {
  const auto* raw =
      static_cast<const char*>(a.hidden.data) + i * a.hidden.row_stride * (a.hidden.dtype == DType::kFloat32 ? 4 : 2);
  if (shared != nullptr) {
    if (!a.aligned) {
      for (std::int64_t k = threadIdx.x; k < a.hidden.cols; k += kThreads)
        shared[k] = rounded_to(a.compute, a.hidden.dtype, load_float(raw, a.hidden.dtype, k));
    } else if (a.hidden.dtype == DType::kBFloat16) {
      stage_aligned(a, reinterpret_cast<const __nv_bfloat16*>(raw), shared);
    } else if (a.hidden.dtype == DType::kFloat16) {
      stage_aligned(a, reinterpret_cast<const __half*>(raw), shared);
    } else {
      stage_aligned(a, reinterpret_cast<const float*>(raw), shared);
    }
    __syncthreads();
  }
  return {shared, raw, a.hidden.dtype, a.compute};
}

/// Candidates that a warp multiplies at a time: each read of the hidden row serves all of them.
constexpr int kTogether = 2;

/// <x, w> for kTogether weight rows by one warp; every lane gets the sums. The order is fixed by H alone.
template <class T, Round R>
__device__ __forceinline__ void warp_dots(const SupportArgs& a, const HiddenRow& x, const T* const (&w)[kTogether],
                                          int lane, float (&sum)[kTogether]) {
  std::int64_t k = 0;
#pragma unroll
  for (float& s : sum) s = 0.0f;
  if (a.aligned) {
    const auto h = static_cast<int>(a.hidden.cols);
    float lanes[kTogether][kVector] = {};
#pragma unroll 4
    for (int c = lane * kVector; c < h; c += 32 * kVector) {
      Raw8<T> v[kTogether];
#pragma unroll
      for (int r = 0; r < kTogether; ++r) v[r].load(w[r] + c);
      const float4 low = *reinterpret_cast<const float4*>(x.staged + c / 2);
      const float4 high = *reinterpret_cast<const float4*>(x.staged + (h + c) / 2);
      const float xs[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int r = 0; r < kTogether; ++r)
#pragma unroll
        for (int e = 0; e < kVector; ++e) lanes[r][e] = fmaf(xs[e], rounded<R>(v[r][e]), lanes[r][e]);
    }
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum[r] += lanes[r][e];
    k = h;
  }
  for (k += lane; k < a.hidden.cols; k += 32)
#pragma unroll
    for (int r = 0; r < kTogether; ++r) sum[r] = fmaf(x[k], rounded<R>(to_float(w[r][k])), sum[r]);
#pragma unroll
  for (int r = 0; r < kTogether; ++r)
#pragma unroll
    for (int delta = 16; delta > 0; delta /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], delta);
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

/// z of up to kTogether columns of the shard (-1: none; not all of them) by one warp.
template <class T, Round R>
__device__ __forceinline__ void warp_logits(const SupportArgs& a, const HiddenRow& x,
                                            const std::int64_t (&columns)[kTogether], float inverse_t, int lane,
                                            float (&z)[kTogether]) {
  std::int64_t any = 0;
#pragma unroll
  for (std::int64_t j : columns) any = j >= 0 ? j : any;
  const T* rows[kTogether];
#pragma unroll
  for (int r = 0; r < kTogether; ++r)  // in place of none a row that is read anyway
    rows[r] = static_cast<const T*>(a.weight.data) + (columns[r] >= 0 ? columns[r] : any) * a.weight.row_stride;
  warp_dots<T, R>(a, x, rows, lane, z);
#pragma unroll
  for (int r = 0; r < kTogether; ++r)
    if (columns[r] >= 0) z[r] = finish_logit(a, z[r], columns[r], inverse_t);
}

/// What a block knows of its row's set.
struct SetFacts {
  bool any, bad, target_is_member;
};

__device__ inline SetFacts scan_set(const SupportArgs& a, const std::int32_t* ids, std::int64_t target) {
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
__device__ inline std::int64_t member_column(const SupportArgs& a, const std::int32_t* ids, std::int64_t k, int lane) {
  const std::int32_t id = ids[k];
  const std::int64_t j = id - a.vocab_start;
  if (id < 0 || j < 0 || j >= a.v_valid) return -1;
  bool repeated = false;
  for (std::int64_t e = lane; e < k; e += 32) repeated |= ids[e] == id;
  return __any_sync(~0u, repeated) ? -1 : j;
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

inline std::size_t staged_bytes(const SupportArgs& a) {
  const auto bytes = a.hidden.cols * static_cast<std::int64_t>(sizeof(float));
  return bytes <= kMaxStagedBytes ? static_cast<std::size_t>(bytes) : 0;
}

/// Rows that are too long to stage are read element by element.
inline SupportArgs with_staging(SupportArgs a) {
  if (staged_bytes(a) == 0) a.aligned = false;
  return a;
}

}  // namespace lmhead::cuda
