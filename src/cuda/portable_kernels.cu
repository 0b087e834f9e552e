#include "cuda/portable_kernels.h"

#include <type_traits>

#include "cuda/element.cuh"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPerLane = static_cast<int>(kSegmentColumns) / kWarp;

/// A finished logit, and 1 - tanh^2 of its softcap. r = scale * (product + bias), z = softcap * tanh(r / softcap) / T.
/// z is rounded to fp32 in the forward and in the backward alike: lse is that of rounded logits, and a backward
/// that knew more digits would find p = e^(z - lse) of a dominant column off by half a spacing of z.
template <class Real>
struct Logit {
  float z;
  Real slope;
};
template <class Real>
__device__ __forceinline__ Logit<Real> finish_logit(const LogitTile& tile, float product, std::int64_t column,
                                                    float inverse_temperature) {
  Real raw = product;
  if (tile.bias.data != nullptr) raw += Real(load_float(tile.bias, column));
  raw *= Real(tile.scale);
  Real slope(1);
  if (tile.softcap != 0.0f) {
    const Real t = std::tanh(raw / Real(tile.softcap));
    raw = Real(tile.softcap) * t;
    slope -= t * t;
  }
  if constexpr (std::is_same_v<Real, float>) {
    return {__fmul_rn(raw, inverse_temperature), slope};  // never part of an fma, which would not round it
  } else {
    return {static_cast<float>(raw * Real(inverse_temperature)), slope};
  }
}

__device__ __forceinline__ float warp_max(float x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}
__device__ __forceinline__ float warp_min(float x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x = fminf(x, __shfl_xor_sync(kAllLanes, x, d));
  return x;
}
template <class Real>
__device__ __forceinline__ Real warp_sum(Real x) {
  for (int d = kWarp / 2; d > 0; d /= 2) x += __shfl_xor_sync(kAllLanes, x, d);
  return x;
}

/// State of columns [begin, end) of the shard, at most kSegmentColumns, by one warp. kVector: 16-byte loads,
/// for segments that start on a multiple of four in the tile. Real: type of the exponentials and their sums.
template <class Real, bool kVector>
__device__ SoftmaxStateT<Real> warp_state(const LogitTile& tile, const float* row, std::int64_t begin, std::int64_t end,
                                          const RowTerms& terms, int lane) {
  float z[kPerLane];
  const float* from = row + (begin - tile.begin);
  const int columns = static_cast<int>(end - begin);
  const auto column_of = [&](int k) { return kVector ? (k / 4 * kWarp + lane) * 4 + k % 4 : k * kWarp + lane; };
  if constexpr (kVector) {
#pragma unroll
    for (int k = 0; k < kPerLane; k += 4) {
      // The stride is a multiple of 8, so a load that starts before the end stays inside the row.
      float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (column_of(k) < columns) v = *reinterpret_cast<const float4*>(from + column_of(k));
      z[k] = v.x;
      z[k + 1] = v.y;
      z[k + 2] = v.z;
      z[k + 3] = v.w;
    }
  } else {
#pragma unroll
    for (int k = 0; k < kPerLane; ++k) z[k] = column_of(k) < columns ? from[column_of(k)] : 0.0f;
  }

  float max = -INFINITY, target = INFINITY;
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const int column = column_of(k);
    if (column < columns) {
      z[k] = finish_logit<Real>(tile, z[k], begin + column, terms.inverse_temperature).z;
      if (begin + column == terms.target) target = z[k];
    } else {
      z[k] = -INFINITY;
    }
    max = fmaxf(max, z[k]);  // drops NaN, which comes back in the sums
  }
  max = warp_max(max);
  // Nothing but -inf (or NaN) here: any finite reference point gives 2^-inf = 0 without inf - inf.
  const float base = max == -INFINITY ? 0.0f : max;
  Real sum(0), weighted(0);
#pragma unroll
  for (int k = 0; k < kPerLane; ++k) {
    const Real u = (Real(z[k]) - Real(base)) * kLog2E<Real>, e = std::exp2(u);
    sum += e;
    weighted += e == Real(0) ? Real(0) : e * u;
  }
  return {Real(max), warp_sum(sum), warp_sum(weighted), Real(warp_min(target))};
}

template <class Real>
__global__ void __launch_bounds__(kThreads, 2)
    segment_states_kernel(LogitTile tile, SegmentGrid grid, std::int64_t vocab_start, const RowTerms* terms,
                          SoftmaxStateT<Real>* partial) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  constexpr int kWarps = kThreads / kWarp;
  const std::int64_t segments = grid.count(), items = tile.rows * segments;
  for (std::int64_t item = blockIdx.x * std::int64_t{kWarps} + threadIdx.x / kWarp; item < items;
       item += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t i = item / segments, s = item % segments, id = grid.first() + s;
    const RowTerms row = terms[i];
    if (row.active == 0) continue;
    const std::int64_t begin = max(grid.begin, grid.origin(id)) - vocab_start;
    const std::int64_t end = min(grid.end, grid.limit(id)) - vocab_start;
    const float* products = tile.products + i * tile.stride;
    const SoftmaxStateT<Real> state = (begin - tile.begin) % 4 == 0
                                          ? warp_state<Real, true>(tile, products, begin, end, row, lane)
                                          : warp_state<Real, false>(tile, products, begin, end, row, lane);
    if (lane == 0) partial[s * tile.rows + i] = state;
  }
}

/// The lse of a row whose columns are all in the tile. The saved one is rounded to fp32, an error that every p of the
/// row has alike and that a gradient shows whole: the sum of p says how much it is. More than roundings of lse and
/// logits explain is not corrected: lse is then not that of these columns (or not finite).
__device__ double whole_row_lse(const LogitTile& tile, const float* from, const RowTerms& row) {
  __shared__ double of_warp[kThreads / kWarp];
  const int thread = static_cast<int>(threadIdx.x);
  const double lse = row.lse;
  double sum = 0;
  for (std::int64_t j = thread; j < tile.end - tile.begin; j += kThreads) {
    const float z = finish_logit<double>(tile, from[j], tile.begin + j, row.inverse_temperature).z;
    sum += std::exp2((z - lse) * kLog2E<double>);
  }
  sum = warp_sum(sum);
  __syncthreads();  // the row before has been read
  if (thread % kWarp == 0) of_warp[thread / kWarp] = sum;
  __syncthreads();
  sum = 0;
  for (const double part : of_warp) sum += part;
  const double rest = std::log(sum);
  return std::abs(rest) <= 0x1p-20 * std::fmax(1.0, std::abs(lse)) ? lse + rest : lse;
}

/// dl for one element, see lmhead.h. p log p -> 0 at p = 0: a -inf logit would give 0 * -inf.
/// An fp32 dl is computed in fp64 and so rounded once: an exp that errs by a few units errs the same way for
/// all columns of a flat row. Beside an fp32 product that costs nothing. 16-bit rounding hides it.
template <class T, bool kEntropy, class Real>
__device__ __forceinline__ T logit_gradient(const LogitTile& tile, float product, std::int64_t column,
                                            const RowTerms& row, Real lse) {
  const Logit<Real> logit = finish_logit<Real>(tile, product, column, row.inverse_temperature);
  const Real a = row.a, log_p = Real(logit.z) - lse;
  const Real p = std::exp2(log_p * kLog2E<Real>);
  // 1 - p by expm1: at p -> 1 the difference of two rounded numbers would keep no digit.
  Real dz = column == row.target ? -a * std::expm1(log_p) : -a * p;
  if constexpr (kEntropy) dz -= p == Real(0) ? Real(0) : Real(row.g) * p * (log_p + Real(row.entropy));
  dz *= Real(tile.scale) * Real(row.inverse_temperature) * logit.slope;
  return from_float<T>(static_cast<float>(dz));
}

template <class T>
struct alignas(8 * sizeof(T)) Eight {
  T v[8];
};

/// One block a row. In place: a round reads 8 * kThreads floats and writes as many elements of at most the
/// same size, so its writes end where the reads of this and earlier rounds have been; the barrier makes
/// "have been" true.
template <class T, bool kEntropy>
__global__ void __launch_bounds__(kThreads)
    logit_gradients_kernel(LogitTile tile, [[maybe_unused]] bool whole, const RowTerms* terms) {
  using Real = std::conditional_t<std::is_same_v<T, float>, double, float>;
  constexpr int kVector = 8;
  const std::int64_t columns = tile.end - tile.begin;
  for (std::int64_t i = blockIdx.x; i < tile.rows; i += gridDim.x) {
    const RowTerms row = terms[i];
    const float* from = tile.products + i * tile.stride;
    T* to = reinterpret_cast<T*>(tile.products + i * tile.stride);
    Real lse = row.lse;
    if constexpr (std::is_same_v<T, float>)
      if (whole && row.active != 0) lse = whole_row_lse(tile, from, row);
    for (std::int64_t base = 0; base < columns; base += kVector * kThreads) {
      const std::int64_t j = base + std::int64_t{threadIdx.x} * kVector;
      Eight<T> out;
      if (j < columns && row.active != 0) {
        float in[kVector];
        *reinterpret_cast<float4*>(in) = *reinterpret_cast<const float4*>(from + j);
        *reinterpret_cast<float4*>(in + 4) = *reinterpret_cast<const float4*>(from + j + 4);
#pragma unroll
        for (int k = 0; k < kVector; ++k)
          out.v[k] = j + k < columns ? logit_gradient<T, kEntropy>(tile, in[k], tile.begin + j + k, row, lse)
                                     : from_float<T>(0.0f);
      } else {
#pragma unroll
        for (int k = 0; k < kVector; ++k) out.v[k] = from_float<T>(0.0f);
      }
      __syncthreads();
      if (j < columns) *reinterpret_cast<Eight<T>*>(to + j) = out;
    }
  }
}

/// Adds one slice of the rows for 32 columns a warp: partial[slice * columns + j].
template <class T>
__global__ void slice_sums_kernel(const T* dl, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                  std::int64_t slices, float* partial) {
  const std::int64_t per_slice = (rows + slices - 1) / slices;
  for (std::int64_t j = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; j < columns;
       j += std::int64_t{gridDim.x} * kThreads) {
    for (std::int64_t s = blockIdx.y; s < slices; s += gridDim.y) {
      const std::int64_t last = min(rows, (s + 1) * per_slice);
      float sum = 0.0f;
#pragma unroll 8
      for (std::int64_t i = s * per_slice; i < last; ++i) sum += to_float(dl[i * stride + j]);
      partial[s * columns + j] = sum;
    }
  }
}

__global__ void add_slices_kernel(const float* partial, std::int64_t columns, std::int64_t slices, float* sums,
                                  bool accumulate) {
  for (std::int64_t j = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; j < columns;
       j += std::int64_t{gridDim.x} * kThreads) {
    float sum = accumulate ? sums[j] : 0.0f;
    for (std::int64_t s = 0; s < slices; ++s) sum += partial[s * columns + j];
    sums[j] = sum;
  }
}

}  // namespace

template <class Real>
void segment_states(const LogitTile& tile, const SegmentGrid& grid, std::int64_t vocab_start, const RowTerms* terms,
                    SoftmaxStateT<Real>* partial, cudaStream_t stream) {
  const std::int64_t items = tile.rows * grid.count();
  if (items == 0) return;
  segment_states_kernel<<<grid_for(items, kThreads / kWarp), kThreads, 0, stream>>>(tile, grid, vocab_start, terms,
                                                                                    partial);
}
template void segment_states<float>(const LogitTile&, const SegmentGrid&, std::int64_t, const RowTerms*, SoftmaxState*,
                                    cudaStream_t);
template void segment_states<double>(const LogitTile&, const SegmentGrid&, std::int64_t, const RowTerms*,
                                     SoftmaxStateT<double>*, cudaStream_t);

void logit_gradients(const LogitTile& tile, DType dtype, bool entropy, bool whole, const RowTerms* terms,
                     cudaStream_t stream) {
  if (tile.rows == 0 || tile.begin == tile.end) return;
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const unsigned blocks = grid_for(tile.rows, 1);
    if (entropy) {
      logit_gradients_kernel<T, true><<<blocks, kThreads, 0, stream>>>(tile, whole, terms);
    } else {
      logit_gradients_kernel<T, false><<<blocks, kThreads, 0, stream>>>(tile, whole, terms);
    }
  });
}

std::int64_t column_slices(std::int64_t rows) { return std::clamp<std::int64_t>(ceil_div(rows, 128), 1, 64); }

void column_sums(const void* dl, DType dtype, std::int64_t dl_stride, std::int64_t rows, std::int64_t columns,
                 float* partial, float* sums, bool accumulate, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return;
  const std::int64_t slices = column_slices(rows);
  const unsigned blocks = grid_for(columns, kThreads);
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    slice_sums_kernel<<<dim3(blocks, static_cast<unsigned>(slices)), kThreads, 0, stream>>>(
        static_cast<const T*>(dl), dl_stride, rows, columns, slices, partial);
  });
  add_slices_kernel<<<blocks, kThreads, 0, stream>>>(partial, columns, slices, sums, accumulate);
}

}  // namespace lmhead::cuda
