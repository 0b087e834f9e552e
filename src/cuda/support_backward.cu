// Candidate sets on the GPU, backward: dl and the hidden gradient by rows, the weight gradient by ids.
#include <cub/device/device_radix_sort.cuh>

#include "core/return_if_error.h"
#include "cuda/support_kernels.cuh"

namespace lmhead::cuda {
namespace {

/// Eight elements from `at` on, or the first `count` of them; one store where they are 16-bit and aligned.
__device__ __forceinline__ void store8(const Matrix& out, std::int64_t at, const float (&v)[kVector], int count,
                                       bool accumulate) {
  if (!accumulate && count == kVector && out.dtype != DType::kFloat32) {
    auto* p = static_cast<unsigned short*>(out.data) + at;
    if (reinterpret_cast<std::uintptr_t>(p) % 16 == 0) {
      uint4 packed;
      for (int e = 0; e < kVector; ++e) store_float(&packed, out.dtype, e, v[e]);
      *reinterpret_cast<uint4*>(p) = packed;
      return;
    }
  }
#pragma unroll
  for (int e = 0; e < kVector; ++e)
    if (e < count)
      store_float(out.data, out.dtype, at + e, (accumulate ? load_float(out.data, out.dtype, at + e) : 0.0f) + v[e]);
}

constexpr int kGroup = kTogether * kWarps;  // slots whose weight rows are read together
constexpr int kStretches = 2;               // stretches of kThreads * kVector columns summed in registers

/// The slots of one group in shared memory.
struct Group {
  float dl[kGroup];
  std::int64_t column[kGroup];
};

/// dl of slots [first, first + kGroup) of a computed row, into `group` and row_dl.
template <class T, Round R>
__device__ __forceinline__ void group_gradients(const SupportArgs& a, const RowTerms& t, const SetFacts& set,
                                                const HiddenRow& x, const std::int32_t* ids, std::int64_t first,
                                                float* row_dl, Group& group) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::int64_t columns[kTogether];
  bool any = false;
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
    const std::int64_t k = first + warp + r * kWarps;
    columns[r] = k < a.k ? member_column(a, ids, k, lane) : k == a.k && !set.target_is_member ? t.target : -1;
    any |= columns[r] >= 0;
  }
  float z[kTogether];
  if (any) warp_logits<T, R>(a, x, columns, t.inverse_temperature, lane, z);
  if (lane != 0) return;
#pragma unroll
  for (int r = 0; r < kTogether; ++r) {
    const int at = warp + r * kWarps;
    const std::int64_t k = first + at;
    float dl = 0.0f;
    if (columns[r] >= 0) {
      const float log_p = z[r] - t.lse, p = k < a.k ? expf(log_p) : 0.0f;
      float dz = -t.a * p - (p == 0.0f ? 0.0f : t.g * p * (log_p + t.entropy));
      if (columns[r] == t.target) dz += t.a;
      dl = dz * slope(a, z[r], t.inverse_temperature);
    }
    group.dl[at] = dl;
    group.column[at] = columns[r];
    if (k <= a.k) row_dl[k] = dl;
  }
}

/// The same from row_dl, where it is known already.
__device__ __forceinline__ void group_again(const SupportArgs& a, const RowTerms& t, const std::int32_t* ids,
                                            std::int64_t first, const float* row_dl, Group& group) {
  if (threadIdx.x >= kGroup) return;
  const std::int64_t k = first + threadIdx.x;
  group.dl[threadIdx.x] = k <= a.k ? row_dl[k] : 0.0f;
  group.column[threadIdx.x] = k < a.k ? ids[k] - a.vocab_start : t.target;
}

/// sum += dl * w over the group's slots in order, `width` columns from `column` on.
template <class T, Round R>
__device__ __forceinline__ void add_group(const SupportArgs& a, const Group& group, std::int64_t column,
                                          float (&sum)[kVector]) {
  const T* weight = static_cast<const T*>(a.weight.data) + column;
#pragma unroll 1
  for (int e = 0; e < kGroup; e += 4) {
    if (a.aligned) {
      Raw8<T> v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (group.dl[e + q] != 0.0f) v[q].load(weight + group.column[e + q] * a.weight.row_stride);
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (const float d = group.dl[e + q]; d != 0.0f)
#pragma unroll
          for (int l = 0; l < kVector; ++l) sum[l] = fmaf(d, rounded<R>(v[q][l]), sum[l]);
    } else {
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (const float d = group.dl[e + q]; d != 0.0f)
          sum[0] = fmaf(d, rounded<R>(to_float(weight[group.column[e + q] * a.weight.row_stride])), sum[0]);
    }
  }
}

/// A block a row. The slots go in groups: each warp makes the dl of its two, then every thread adds the
/// group's weight rows, which L2 still holds, to the columns that it owns, slots in order; so a row of up
/// to kStretches stretches takes one pass over device memory and one rounding, which comes last.
template <class T, Round R>
__global__ void __launch_bounds__(kThreads)
    rows_backward_kernel(const SupportArgs a, float* dl, const Matrix out, bool accumulate, bool stage) {
  extern __shared__ float shared[];
  __shared__ Group group;
  const int width = a.aligned ? kVector : 1;
  const std::int64_t stretch = kThreads * width;
  for (std::int64_t i = blockIdx.x; i < a.n; i += gridDim.x) {
    const RowTerms t = a.terms[i];
    const std::int32_t* ids = a.ids + i * a.id_stride;
    float* row_dl = dl + i * (a.k + 1);
    SetFacts set{false, false, false};
    if (t.active) set = scan_set(a, ids, t.target);
    const bool computed = set.any && !set.bad;
    HiddenRow x{};
    if (computed) {
      x = stage_hidden(a, i, stage ? shared : nullptr);
    } else {
      for (std::int64_t k = threadIdx.x; k <= a.k; k += kThreads) row_dl[k] = 0.0f;
    }
    for (std::int64_t begin = 0; begin == 0 || (out.data != nullptr && begin < a.hidden.cols);
         begin += kStretches * stretch) {
      float sum[kStretches][kVector] = {};
      for (std::int64_t first = 0; computed && first <= a.k; first += kGroup) {
        if (begin == 0) {
          group_gradients<T, R>(a, t, set, x, ids, first, row_dl, group);
        } else {
          group_again(a, t, ids, first, row_dl, group);
        }
        __syncthreads();
        if (out.data != nullptr)
#pragma unroll
          for (int s = 0; s < kStretches; ++s) {
            const std::int64_t column = begin + s * stretch + static_cast<std::int64_t>(threadIdx.x) * width;
            if (column < a.hidden.cols) add_group<T, R>(a, group, column, sum[s]);
          }
        __syncthreads();
      }
      if (out.data == nullptr || (accumulate && !computed && !set.bad)) continue;
#pragma unroll
      for (int s = 0; s < kStretches; ++s) {
        const std::int64_t column = begin + s * stretch + static_cast<std::int64_t>(threadIdx.x) * width;
        if (column >= a.hidden.cols) continue;
        if (set.bad)  // an unchecked bad id: NaN in its own row
#pragma unroll
          for (float& v : sum[s]) v = NAN;
        store8(out, i * out.row_stride + column, sum[s], width, accumulate);
      }
    }
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

// The weight gradient. Slots sorted by id are cut into windows of equal length; a block sums the runs of
// equal ids in its window over its columns. A run inside one window is stored at once. A run that crosses a
// window's end leaves a partial sum a window (`heads`: runs from before; `tails`: runs that go on), and
// joins_kernel adds those in order. So an id that half of the tokens list costs no more than others.
constexpr int kColumnThreads = 128;  // a block's columns of 16-bit hidden rows fit L2 for all rows of a call
constexpr std::int64_t kPartialBytes = 32 << 20;  // heads and tails
constexpr std::int64_t kMinWindow = kColumnThreads;

struct Windows {
  std::int64_t count = 0, length = 0;  ///< windows, and slots in each
};

Windows windows_for(std::int64_t slots, std::int64_t h) {
  const std::int64_t most = std::max<std::int64_t>(1, kPartialBytes / (2 * (h + 1) * std::int64_t{sizeof(float)}));
  const std::int64_t length = std::max(kMinWindow, ceil_div(ceil_div(slots, most), kColumnThreads) * kColumnThreads);
  return {ceil_div(slots, length), length};
}

/// Sorted slots and where sums over runs of them go.
struct Runs {
  const float* dl;                    ///< [N (K + 1)] in the order of the rows
  const std::uint32_t *keys, *slots;  ///< column of the shard (v_local: none), and the slot
  std::int64_t count, v_local;
  Windows windows;
  float *heads, *tails;  ///< [windows, H + 1] partial sums; the last column is the bias's
  Matrix out;            ///< may be absent
  Vector bias;           ///< may be absent
  bool accumulate, accumulate_bias;
};

__device__ __forceinline__ void store_run(const Runs& r, std::int64_t id, std::int64_t column, std::int64_t h,
                                          int width, const float (&sum)[kVector], float bias_sum) {
  if (r.out.data != nullptr && column < h) store8(r.out, id * r.out.row_stride + column, sum, width, r.accumulate);
  if (r.bias.data != nullptr && column == 0) {
    const std::int64_t at = id * r.bias.stride;
    store_float(r.bias.data, r.bias.dtype, at,
                (r.accumulate_bias ? load_float(r.bias.data, r.bias.dtype, at) : 0.0f) + bias_sum);
  }
}

template <class X>
__global__ void __launch_bounds__(kColumnThreads) runs_kernel(const SupportArgs a, const Runs r) {
  __shared__ float slot_dl[kColumnThreads];
  __shared__ std::uint32_t slot_key[kColumnThreads], slot_row[kColumnThreads];
  const std::int64_t h = a.hidden.cols, window = blockIdx.x % r.windows.count, begin = window * r.windows.length;
  const std::int64_t end = std::min(begin + r.windows.length, r.count);
  const int width = a.aligned ? kVector : 1;
  const std::int64_t column = (blockIdx.x / r.windows.count * kColumnThreads + threadIdx.x) * width;
  const bool mine = r.out.data != nullptr && column < h;
  const X* hidden = static_cast<const X*>(a.hidden.data) + (mine ? column : 0);
  float sum[kVector] = {}, bias_sum = 0.0f;
  std::uint32_t id = r.keys[begin];
  bool head = begin > 0 && r.keys[begin - 1] == id;

  const auto finish = [&](bool goes_on) {
    if (head || goes_on) {
      float* partial = (head ? r.heads : r.tails) + window * (h + 1);
#pragma unroll
      for (int l = 0; l < kVector; ++l)
        if (mine && l < width) partial[column + l] = sum[l];
      if (column == 0) partial[h] = bias_sum;
    } else {
      store_run(r, id, column, h, width, sum, bias_sum);
    }
  };

  for (std::int64_t base = begin; base < end && id < r.v_local; base += kColumnThreads) {
    const int batch = static_cast<int>(std::min<std::int64_t>(kColumnThreads, end - base));
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < batch) {
      const std::uint32_t slot = r.slots[base + threadIdx.x];
      slot_key[threadIdx.x] = r.keys[base + threadIdx.x];
      slot_dl[threadIdx.x] = r.dl[slot];
      slot_row[threadIdx.x] = static_cast<std::uint32_t>(slot / (a.k + 1));
    }
    __syncthreads();
    for (int e = 0; e < batch && id < r.v_local; e += 4) {
      Raw8<X> v[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        if (a.aligned && mine && e + q < batch) v[q].load(hidden + slot_row[e + q] * a.hidden.row_stride);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (e + q >= batch) break;
        if (slot_key[e + q] != id) {
          finish(false);
          id = slot_key[e + q];
          head = false;
          bias_sum = 0.0f;
#pragma unroll
          for (float& s : sum) s = 0.0f;
          if (id >= r.v_local) break;  // the rest is padding
        }
        const float d = slot_dl[e + q];
        bias_sum += d;
        if (!mine) continue;
        if (a.aligned) {
#pragma unroll
          for (int l = 0; l < kVector; ++l) sum[l] = fmaf(d, rounded_to(a.compute, a.hidden.dtype, v[q][l]), sum[l]);
        } else {
          const float x = to_float(hidden[slot_row[e + q] * a.hidden.row_stride]);
          sum[0] = fmaf(d, rounded_to(a.compute, a.hidden.dtype, x), sum[0]);
        }
      }
    }
  }
  if (id < r.v_local) finish(end < r.count && r.keys[end] == id);
}

/// Joins the run that starts in a window and goes on behind it, if there is one.
__global__ void __launch_bounds__(kColumnThreads) joins_kernel(const SupportArgs a, const Runs r) {
  const std::int64_t h = a.hidden.cols, window = blockIdx.x % r.windows.count;
  const std::int64_t begin = window * r.windows.length, end = begin + r.windows.length;
  if (end >= r.count) return;
  const std::uint32_t id = r.keys[end];
  if (id >= r.v_local || r.keys[end - 1] != id) return;
  if (begin > 0 && r.keys[begin] == id && r.keys[begin - 1] == id) return;  // it started earlier
  const int width = a.aligned ? kVector : 1;
  const std::int64_t column = (blockIdx.x / r.windows.count * kColumnThreads + threadIdx.x) * width;
  float sum[kVector] = {}, bias_sum = r.tails[window * (h + 1) + h];
  const auto add = [&](const float* partial) {
#pragma unroll
    for (int l = 0; l < kVector; ++l)
      if (r.out.data != nullptr && l < width && column < h) sum[l] += partial[column + l];
  };
  add(r.tails + window * (h + 1));
  for (std::int64_t w = window + 1; w < r.windows.count && r.keys[w * r.windows.length] == id; ++w) {
    add(r.heads + w * (h + 1));
    bias_sum += r.heads[w * (h + 1) + h];
  }
  store_run(r, id, column, h, width, sum, bias_sum);
}

}  // namespace

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

Result<std::size_t> support_weight_bytes(std::int64_t slots, std::int64_t v_local, std::int64_t h) {
  cub::DoubleBuffer<std::uint32_t> none(nullptr, nullptr);
  std::size_t bytes = 0;
  LMHEAD_RETURN_IF_ERROR(sort(nullptr, bytes, none, none, slots, v_local, nullptr));
  Workspace measure;
  for (int i = 0; i < 4; ++i) measure.take<std::uint32_t>(slots);
  for (int i = 0; i < 2; ++i) measure.take<float>(windows_for(slots, h).count * (h + 1));
  measure.take_bytes(static_cast<std::int64_t>(bytes));
  return measure.used();
}

Status support_weight_backward(const SupportArgs& a, const float* dl, const BackwardOutputs& out,
                               const ConstVector& targets, std::int64_t v_local, void* scratch,
                               std::size_t scratch_bytes, cudaStream_t stream) {
  const std::int64_t count = a.n * (a.k + 1), h = a.hidden.cols;
  const auto clear = [&](void* data, std::int64_t stride, std::int64_t cols, DType dtype) {
    const std::size_t bytes = size_of(dtype), width = static_cast<std::size_t>(cols) * bytes;
    return to_status(cudaMemset2DAsync(data, std::max(static_cast<std::size_t>(stride) * bytes, width), 0, width,
                                       static_cast<std::size_t>(v_local), stream),
                     "support backward");
  };
  if (!out.weight.absent() && !out.accumulate_weight && v_local > 0)
    LMHEAD_RETURN_IF_ERROR(clear(out.weight.data, out.weight.row_stride, h, out.weight.dtype));
  if (!out.bias.absent() && !out.accumulate_bias && v_local > 0)
    LMHEAD_RETURN_IF_ERROR(clear(out.bias.data, out.bias.stride, 1, out.bias.dtype));
  if (count == 0) return {};

  Workspace workspace(scratch);
  std::uint32_t* buffer[4];
  for (auto& b : buffer) b = workspace.take<std::uint32_t>(count);
  const Windows windows = windows_for(count, h);
  auto* heads = workspace.take<float>(windows.count * (h + 1));
  auto* tails = workspace.take<float>(windows.count * (h + 1));
  std::size_t sort_bytes = scratch_bytes - workspace.used();
  void* sort_scratch = static_cast<std::byte*>(scratch) + workspace.used();
  cub::DoubleBuffer<std::uint32_t> keys(buffer[0], buffer[1]), slots(buffer[2], buffer[3]);
  keys_kernel<<<grid_for(count, kThreads), kThreads, 0, stream>>>(a, dl, targets, v_local, keys.Current(),
                                                                  slots.Current());
  LMHEAD_RETURN_IF_ERROR(last_launch("support backward"));
  LMHEAD_RETURN_IF_ERROR(sort(sort_scratch, sort_bytes, keys, slots, count, v_local, stream));

  const Runs runs{
      dl,       keys.Current(),        slots.Current(),    count, v_local, windows, heads, tails, out.weight,
      out.bias, out.accumulate_weight, out.accumulate_bias};
  const std::int64_t columns_per_block = kColumnThreads * (a.aligned ? kVector : 1);
  // Windows fastest: the blocks that run together read the same columns of hidden. Fits a grid's x: windows
  // are few where H is large.
  const auto grid = static_cast<unsigned>(windows.count * (out.weight.absent() ? 1 : ceil_div(h, columns_per_block)));
  with_type(a.hidden.dtype, [&](auto* hidden) {
    using X = std::remove_pointer_t<decltype(hidden)>;
    runs_kernel<X><<<grid, kColumnThreads, 0, stream>>>(a, runs);
  });
  joins_kernel<<<grid, kColumnThreads, 0, stream>>>(a, runs);
  return last_launch("support weight gradient");
}

}  // namespace lmhead::cuda
