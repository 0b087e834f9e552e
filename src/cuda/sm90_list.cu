#include "cuda/sm90_list.h"

#include "core/softmax_state.h"
#include "cuda/launch.h"
#include "cuda/rows.cuh"

namespace lmhead::cuda::sm90 {
namespace {

// Two launches in all, because at a few thousand rows each is as long as its work. Every block adds up the counts of
// all parts itself: at most 1024, four a thread.
constexpr int kPartRows = 256;
constexpr int kWarps = kPartRows / 32;

__global__ void __launch_bounds__(kPartRows)
    count_kernel(RowInputs rows, std::int64_t n, bool backward, std::int32_t* parts) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kPartRows + threadIdx.x;
  const int count = __syncthreads_count(i < n && takes_part(rows, i, backward));
  if (threadIdx.x == 0) parts[blockIdx.x] = count;
}

/// By one block.
__device__ void split_count(int total, std::int64_t n, const ChunkCounts& c) {
  const bool compacted = c.gathereds > 0 && (total < n || c.wholes == 0);
  if (threadIdx.x == 0) *c.compacted = total < n;
  for (int i = threadIdx.x; i < c.ticket_count; i += kPartRows) c.tickets[i] = 0;
  for (int i = threadIdx.x; i < c.wholes; i += kPartRows)
    c.whole[i] = compacted ? 0 : max(std::int64_t{0}, min(c.whole_rows, total - i * c.whole_rows));
  for (int i = threadIdx.x; i < c.gathereds; i += kPartRows)
    c.gathered[i] = compacted ? max(std::int64_t{0}, min(c.gathered_rows, total - i * c.gathered_rows)) : 0;
}

__global__ void __launch_bounds__(kPartRows)
    list_kernel(RowInputs rows, std::int64_t n, bool backward, ListBuffers list, ChunkCounts counts, RowOutputs clear) {
  __shared__ int before_part[kWarps], all[kWarps], in_warp[kWarps];
  const int part = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32, lane = thread % 32;
  const std::int64_t i = std::int64_t{part} * kPartRows + thread;
  const bool listed = i < n && takes_part(rows, i, backward);

  int before = 0, total = 0;
  for (int p = thread; p < static_cast<int>(gridDim.x); p += kPartRows) {
    const int count = list.parts[p];
    total += count;
    before += p < part ? count : 0;
  }
  before = __reduce_add_sync(~0u, before);
  total = __reduce_add_sync(~0u, total);
  const unsigned ballot = __ballot_sync(~0u, listed);
  if (lane == 0) {
    before_part[warp] = before;
    all[warp] = total;
    in_warp[warp] = __popc(ballot);
  }
  __syncthreads();
  before = total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += before_part[w] + (w < warp ? in_warp[w] : 0);
    total += all[w];
  }
  before += __popc(ballot & ((1u << lane) - 1));

  if (part == 0) {
    if (thread == 0) *list.count = total;
    split_count(total, n, counts);
  }
  if (i >= n) return;
  if (listed) {
    list.index[before] = static_cast<std::int32_t>(i);
    list.terms[before] = row_terms(rows, i, backward);
  } else {
    list.terms[total + i - before] = kNoTerms;  // behind the list, among the rows outside it
    if (clear.state != nullptr) clear.state[i] = empty_state();
    write_row(clear, i, {0.0f, 0.0f, 0.0f});
  }
}

}  // namespace

std::int64_t list_parts(std::int64_t n) { return ceil_div(n, kPartRows); }

void list_rows(const RowInputs& rows, std::int64_t n, bool backward, const ListBuffers& list, const ChunkCounts& counts,
               const RowOutputs& clear, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(list_parts(n));
  count_kernel<<<blocks, kPartRows, 0, stream>>>(rows, n, backward, list.parts);
  list_kernel<<<blocks, kPartRows, 0, stream>>>(rows, n, backward, list, counts, clear);
}

}  // namespace lmhead::cuda::sm90
