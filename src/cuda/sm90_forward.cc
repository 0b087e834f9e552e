// The forward's plan: chunks of rows within the workspace, tensor maps, and the kernels of each chunk in order.
#include "cuda/sm90_forward.h"

#include <algorithm>

#include "core/return_if_error.h"
#include "cuda/launch.h"
#include "cuda/sm90_cache.h"
#include "cuda/sm90_plan.h"

namespace lmhead::cuda::sm90 {
namespace {

/// The forward's whole workspace stays below this, whatever the budget.
constexpr std::size_t kForwardBytes = std::size_t{128} << 20;
/// A forward tile of so few rows is copied and padded. Read in place, its other rows lie outside the tensor, and TMA
/// fills them slower than it loads them (docs/kernels.md).
constexpr std::int64_t kPaddedRows = 64;

struct ForwardLayout {
  std::int64_t range;  ///< rows per outer range
  SegmentGrid grid;
  std::int64_t whole_rows, gathered_rows;  ///< rows of a chunk read in place, and of one gathered first
  CommonBuffers common;
  std::int64_t *whole_counts, *gathered_counts;
  int* tickets;      ///< of the whole chunks, then of the gathered ones
  std::byte* chunk;  ///< states of one chunk, then its gathered rows or the tile of few rows
  std::size_t bytes;

  int wholes() const { return static_cast<int>(ceil_div(range, whole_rows)); }
  int gathereds() const { return static_cast<int>(ceil_div(range, gathered_rows)); }

  static Result<ForwardLayout> make(const ResolvedProblem& r, const Execution& e, void* base) {
    Workspace w(base);
    const std::int64_t range = std::min(r.n, kRangeRows), start = r.given.vocab_start;
    const SegmentGrid grid = SegmentGrid::of(r.order(), start, start + r.v_valid);
    ForwardLayout l{range, grid, 0, 0, CommonBuffers(w, r, range), nullptr, nullptr, nullptr, nullptr, 0};
    const std::int64_t row_states = grid.count() * static_cast<std::int64_t>(sizeof(SoftmaxState));
    // A chunk is at least one tile: no more counts than that are needed.
    const std::int64_t most_chunks = ceil_div(range, kTileRows);
    l.whole_counts = w.take<std::int64_t>(most_chunks);
    l.gathered_counts = w.take<std::int64_t>(most_chunks);
    l.tickets = w.take<int>(2 * most_chunks);
    const std::size_t budget = std::min(budget_of(e), kForwardBytes), fixed = w.used() + kWorkspaceAlignment;
    const std::size_t room = budget > fixed ? budget - fixed : 0;
    l.whole_rows = forward_chunk_rows(range, std::max<std::int64_t>(row_states, 1), room);
    l.gathered_rows = forward_chunk_rows(range, row_states + r.h * 2, room);
    if (l.gathered_rows == 0)
      return budget_too_small(fixed + static_cast<std::size_t>(kTileRows * (row_states + r.h * 2)), e);
    l.chunk = w.take<std::byte>(std::max(l.whole_rows * row_states, l.gathered_rows * (row_states + r.h * 2)));
    l.bytes = w.used();
    return l;
  }
  /// The hidden rows that go with a chunk of so many rows.
  void* hidden_rows(std::int64_t rows) const {
    return chunk + rows * grid.count() * static_cast<std::int64_t>(sizeof(SoftmaxState));
  }
};

/// Where the chunk of rows from place `first` of the list on is kept; chunks begin at whole tiles.
KeptTiles keep_rows(const CacheLayout& cache, std::int64_t first, std::int64_t rows) {
  const auto kept = static_cast<int>(std::clamp<std::int64_t>(cache.rows - first, 0, rows));
  if (kept == 0) return {};
  const std::int64_t block = first / kBlockRows;
  return {cache.exponentials + block * kBlockVectors,
          cache.top + block * kBlockTops,
          cache.blocks,
          kept,
          cache.tiles_per_octant,
          cache.first_tile};
}

/// Rows [begin, begin + n) of the problem.
Status forward_range(const ResolvedProblem& r, const ForwardLayout& l, std::int64_t begin, std::int64_t n,
                     const RowOutputs& outputs, const CacheLayout& cache, const Execution& e) {
  const cudaStream_t stream = stream_of(e);
  const RowInputs inputs = row_inputs(r, begin, n);
  // Inactive rows of a single tile cost nothing, and listing them would: launches, at small N most of the time.
  const bool listed = n > kTileRows;
  if (listed) {
    list_rows(inputs, n, false, l.common.list(),
              {l.whole_counts, l.wholes(), l.whole_rows, l.gathered_counts, l.gathereds(), l.gathered_rows,
               l.common.compacted, l.tickets, l.wholes() + l.gathereds()},
              outputs, stream);
  } else {
    prepare_rows(inputs, n, false, l.common.terms, stream);
    LMHEAD_RETURN_IF_ERROR(to_status(cudaMemsetAsync(l.tickets, 0, sizeof(int), stream), "cudaMemsetAsync"));
  }

  if (cache.rows > 0)
    LMHEAD_RETURN_IF_ERROR(
        note_places(listed ? RowList{l.common.index, l.common.active} : RowList{}, n, cache.place, stream));

  ForwardWork work{};
  const bool any = l.grid.count() > 0;
  if (any) {
    LMHEAD_RETURN_IF_ERROR(weight_map(&work.weight, r, kTileColumns));
    LMHEAD_RETURN_IF_ERROR(weight_map(&work.weight_narrow, r, kNarrowColumns));
    work.segments = make_segments(l.grid, r.given.vocab_start);
  }
  work.head = make_head(r.given, l.common.bias);
  work.h = static_cast<int>(r.h);
  work.partial = reinterpret_cast<SoftmaxState*>(l.chunk);
  const int multiprocessors = (*current_device())->multiprocessors;

  const auto chunk = [&](std::int64_t first, std::int64_t rows, const std::int64_t* count, int* ticket) -> Status {
    work.ticket = ticket;
    work.terms = l.common.terms + first;
    work.count = count;
    work.partial_stride = rows;
    work.max_rows = static_cast<int>(rows);
    work.group = l2_group(ceil_div(rows, kTileRows), r.h, l2_percent(r));
    work.kept = keep_rows(cache, first, rows);
    if (any)
      LMHEAD_RETURN_IF_ERROR(
          launch_forward(work, r.compute, r.given.entropy != EntropyMode::kOff, multiprocessors, stream));
    const RowList list = listed ? RowList{l.common.index + first, count} : RowList{};
    fold_segments<float>({work.partial, rows, l.grid, nullptr, 0, true, true}, inputs, rows, list, outputs, stream);
    return {};
  };
  ConstMatrix hidden = r.given.hidden;
  hidden.row_stride = stride_of(hidden);
  hidden.data = static_cast<const std::uint16_t*>(hidden.data) + begin * hidden.row_stride;
  for (std::int64_t first = 0, k = 0; first < n; first += l.whole_rows, ++k) {
    const std::int64_t rows = std::min(l.whole_rows, n - first);
    if (rows <= kPaddedRows) {  // a tile fits: gathered_rows is at least kTileRows
      void* padded = l.hidden_rows(rows);
      pad_rows(hidden, first, rows, padded, stream);
      LMHEAD_RETURN_IF_ERROR(
          encode_tensor_map(&work.hidden, padded, r.compute, kTileRows, r.h, r.h, kTileRows, kTileDepth));
    } else {
      LMHEAD_RETURN_IF_ERROR(hidden_map(&work.hidden, r, begin + first, rows, kTileRows));
    }
    LMHEAD_RETURN_IF_ERROR(chunk(first, rows, listed ? l.whole_counts + k : nullptr, l.tickets + k));
  }
  if (!listed) return last_launch("sm90 forward");
  for (std::int64_t first = 0, k = 0; first < n; first += l.gathered_rows, ++k) {
    const std::int64_t rows = std::min(l.gathered_rows, n - first);
    void* gathered = l.hidden_rows(rows);
    gather_rows(hidden, l.common.index + first, l.gathered_counts + k, l.common.compacted, rows, gathered, r.h, stream);
    LMHEAD_RETURN_IF_ERROR(encode_tensor_map(&work.hidden, gathered, r.compute, rows, r.h, r.h, kTileRows, kTileDepth));
    LMHEAD_RETURN_IF_ERROR(chunk(first, rows, l.gathered_counts + k, l.tickets + l.wholes() + k));
  }
  return last_launch("sm90 forward");
}

}  // namespace

Status run_forward(const ResolvedProblem& r, const ForwardOutputs& outputs, SoftmaxState* states, const Execution& e) {
  if (r.n == 0) return {};
  LMHEAD_RETURN_IF_ERROR(check_device_pointers(r, e));
  Result<ForwardLayout> layout = ForwardLayout::make(r, e, e.workspace);
  if (!layout.ok()) return layout.status();
  layout->common.prepare_bias(r, stream_of(e));
  const CacheLayout cache = CacheLayout::make(r, e.cache, e.cache_bytes);
  for (std::int64_t begin = 0; begin < r.n; begin += layout->range) {
    const std::int64_t n = std::min(layout->range, r.n - begin);
    RowOutputs out = row_outputs(outputs, begin, n);
    if (states != nullptr) out.state = states + begin;
    if (begin == 0) out.target = cache.target;
    LMHEAD_RETURN_IF_ERROR(forward_range(r, *layout, begin, n, out, begin == 0 ? cache : CacheLayout{}, e));
  }
  return {};
}

Result<std::size_t> forward_workspace(const ResolvedProblem& r, const Execution& e) {
  Result<ForwardLayout> layout = ForwardLayout::make(r, e, nullptr);
  if (!layout.ok()) return layout.status();
  return layout->bytes;
}

}  // namespace lmhead::cuda::sm90
