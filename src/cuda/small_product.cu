#include "cuda/small_product.h"

#include <algorithm>

#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 32;          ///< outputs of a block: kTile x kTile, four a thread
constexpr int kDepth = 32;         ///< terms of a step
constexpr int kPitch = kTile + 1;  // odd: 16 doubles that a half-warp stores lie in 16 banks
constexpr int kLoads = kTile * kDepth / kThreads;
/// 2^26 fp64 multiply-adds take about as long as a few launches, also where the GPU has few fp64 units.
constexpr std::int64_t kMaxWork = std::int64_t{1} << 26;
constexpr std::int64_t kMinPart = 4 * kDepth;  ///< terms
constexpr std::int64_t kEnoughBlocks = 256;

struct Args {
  std::int64_t m, n, k;
  const float *a, *b;
  std::int64_t a_stride, b_stride;
  float* out;
  std::int64_t out_stride;
  bool accumulate;
  std::int64_t per_part;
  double* partial;  ///< [parts, m, n], or null: one part
};

/// Elements (outer, term) of an operand of `outer_end` lines: kTermsContiguous says which index steps by one.
template <bool kTermsContiguous>
__device__ __forceinline__ void load(const float* data, std::int64_t stride, std::int64_t outer_begin,
                                     std::int64_t outer_end, std::int64_t term_begin, std::int64_t term_end,
                                     float (&values)[kLoads]) {
  const int lane = static_cast<int>(threadIdx.x) % kTile, line = static_cast<int>(threadIdx.x) / kTile;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int other = line + i * (kThreads / kTile);
    const std::int64_t outer = outer_begin + (kTermsContiguous ? other : lane);
    const std::int64_t term = term_begin + (kTermsContiguous ? lane : other);
    values[i] = outer < outer_end && term < term_end
                    ? data[kTermsContiguous ? outer * stride + term : term * stride + outer]
                    : 0.0f;
  }
}
template <bool kTermsContiguous>
__device__ __forceinline__ void store(const float (&values)[kLoads], double (&tile)[kDepth][kPitch]) {
  const int lane = static_cast<int>(threadIdx.x) % kTile, line = static_cast<int>(threadIdx.x) / kTile;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int other = line + i * (kThreads / kTile);
    tile[kTermsContiguous ? lane : other][kTermsContiguous ? other : lane] = static_cast<double>(values[i]);
  }
}

/// One block a tile of outputs and a part of the terms. A product of two fp32 numbers is exact in fp64.
template <bool kTransposeA, bool kTransposeB>
__global__ void __launch_bounds__(kThreads) small_product_kernel(Args args) {
  __shared__ double tile_a[kDepth][kPitch], tile_b[kDepth][kPitch];
  const std::int64_t tiles_n = (args.n + kTile - 1) / kTile;
  const std::int64_t row = blockIdx.x / tiles_n * kTile, column = blockIdx.x % tiles_n * kTile;
  const std::int64_t begin = blockIdx.y * args.per_part, end = min(args.k, begin + args.per_part);
  const int x = static_cast<int>(threadIdx.x) % (kTile / 2), y = static_cast<int>(threadIdx.x) / (kTile / 2);
  float next_a[kLoads], next_b[kLoads];
  double sums[2][2] = {};
  load<!kTransposeA>(args.a, args.a_stride, row, args.m, begin, end, next_a);
  load<kTransposeB>(args.b, args.b_stride, column, args.n, begin, end, next_b);
  for (std::int64_t k = begin; k < end; k += kDepth) {
    __syncthreads();  // the last step's tiles have been read
    store<!kTransposeA>(next_a, tile_a);
    store<kTransposeB>(next_b, tile_b);
    __syncthreads();
    load<!kTransposeA>(args.a, args.a_stride, row, args.m, k + kDepth, end, next_a);
    load<kTransposeB>(args.b, args.b_stride, column, args.n, k + kDepth, end, next_b);
    const int terms = static_cast<int>(min(std::int64_t{kDepth}, end - k));
#pragma unroll 8
    for (int t = 0; t < terms; ++t) {
      const double a[2] = {tile_a[t][y], tile_a[t][y + kTile / 2]}, b[2] = {tile_b[t][x], tile_b[t][x + kTile / 2]};
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) sums[i][j] = fma(a[i], b[j], sums[i][j]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::int64_t r = row + y + i * (kTile / 2), c = column + x + j * (kTile / 2);
      if (r >= args.m || c >= args.n) continue;
      if (args.partial != nullptr) {
        args.partial[(blockIdx.y * args.m + r) * args.n + c] = sums[i][j];
      } else {
        float* to = args.out + r * args.out_stride + c;
        *to = static_cast<float>(args.accumulate ? *to + sums[i][j] : sums[i][j]);
      }
    }
}

__global__ void add_parts_kernel(Args args, std::int64_t parts) {
  const std::int64_t size = args.m * args.n;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < size;
       i += std::int64_t{gridDim.x} * kThreads) {
    float* to = args.out + i / args.n * args.out_stride + i % args.n;
    double sum = args.accumulate ? *to : 0.0;
    for (std::int64_t part = 0; part < parts; ++part) sum += args.partial[part * size + i];
    *to = static_cast<float>(sum);
  }
}

}  // namespace

bool has_small_products(std::int64_t n, std::int64_t h, std::int64_t v) {
  // A tile's unused outputs cost as much as others; each factor alone, so that nothing overflows.
  std::int64_t work = kTile * kTile * kTile;
  for (const std::int64_t size : {n, h, v}) {
    const std::int64_t tiles = ceil_div(size, kTile);
    if (tiles > kMaxWork / work) return false;
    work *= std::max<std::int64_t>(tiles, 1);
  }
  return true;
}

Status multiply_small(const Product& p, cudaStream_t stream) {
  const std::int64_t tiles = ceil_div(p.m, kTile) * ceil_div(p.n, kTile), outputs = p.m * p.n;
  const auto room = static_cast<std::int64_t>(p.workspace_bytes / sizeof(double)) / outputs;
  std::int64_t parts = std::max<std::int64_t>(1, std::min({kEnoughBlocks / tiles, p.k / kMinPart, room}));
  const std::int64_t per_part = round_up(ceil_div(p.k, parts), kDepth);
  parts = ceil_div(p.k, per_part);
  const Args args{p.m,
                  p.n,
                  p.k,
                  static_cast<const float*>(p.a.data),
                  static_cast<const float*>(p.b.data),
                  p.a.row_stride,
                  p.b.row_stride,
                  static_cast<float*>(p.out),
                  p.out_stride,
                  p.accumulate,
                  per_part,
                  parts > 1 ? static_cast<double*>(p.workspace) : nullptr};
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(parts));
  if (p.transpose_a && p.transpose_b) {
    small_product_kernel<true, true><<<grid, kThreads, 0, stream>>>(args);
  } else if (p.transpose_a) {
    small_product_kernel<true, false><<<grid, kThreads, 0, stream>>>(args);
  } else if (p.transpose_b) {
    small_product_kernel<false, true><<<grid, kThreads, 0, stream>>>(args);
  } else {
    small_product_kernel<false, false><<<grid, kThreads, 0, stream>>>(args);
  }
  if (parts > 1) add_parts_kernel<<<grid_for(outputs, kThreads), kThreads, 0, stream>>>(args, parts);
  return last_launch("product of a small fp32 problem");
}

}  // namespace lmhead::cuda
