// The backward's plan: chunks of dlogits within the workspace, and for each the kernels that make and use it.
#include <algorithm>

#include "core/return_if_error.h"
#include "cuda/launch.h"
#include "cuda/selected.h"
#include "cuda/sm90_cache.h"
#include "cuda/sm90_dlogits.h"
#include "cuda/sm90_gemm.h"
#include "cuda/sm90_plan.h"

namespace lmhead::cuda::sm90 {
namespace {

struct BackwardLayout {
  std::int64_t range;  ///< rows per outer range
  BackwardChunk chunk;
  CommonBuffers common;
  std::int64_t* counts;  ///< rows of each row chunk
  std::int64_t* cached;  ///< rows of the list that the cache holds
  int* tickets;          ///< two a chunk: of dlogits and of the products
  std::uint16_t* gathered;
  std::int64_t gathered_stride;
  std::uint16_t* dl;
  float *hidden_sums, *weight_sums, *bias_sums, *bias_partial;
  WorkspaceSize size;

  std::int64_t row_chunks(std::int64_t n) const { return ceil_div(n, chunk.rows); }
  std::int64_t column_chunks(std::int64_t v) const { return std::max<std::int64_t>(1, ceil_div(v, chunk.columns)); }

  /// The hidden gradient is written last, so until then it can hold the gathered rows.
  static bool gathers_in_gradient(const ResolvedProblem& r, const BackwardOutputs& out) {
    return !out.hidden.absent() && out.hidden.dtype == r.compute && out.hidden.row_stride % 8 == 0 &&
           out.hidden.row_stride >= r.h && reinterpret_cast<std::uintptr_t>(out.hidden.data) % 16 == 0;
  }

  static Result<BackwardLayout> make(const ResolvedProblem& r, const BackwardOutputs& out, const Execution& e,
                                     void* base) {
    Workspace w(base);
    const std::int64_t range = std::min(r.n, kRangeRows);
    BackwardLayout l{range,   {},      CommonBuffers(w, r, range),
                     nullptr, nullptr, nullptr,
                     nullptr, r.h,     nullptr,
                     nullptr, nullptr, nullptr,
                     nullptr, {}};
    const std::int64_t v = r.v_valid;
    l.counts = w.take<std::int64_t>(ceil_div(range, kTileRows));
    l.cached = w.take<std::int64_t>(1);
    const bool bias = !out.bias.absent();
    l.bias_sums = bias ? w.take<float>(v) : nullptr;
    const bool in_gradient = gathers_in_gradient(r, out);

    const std::size_t fixed = w.used() + 8 * kWorkspaceAlignment;
    const std::size_t room = budget_of(e) > fixed ? budget_of(e) - fixed : 0;
    // Beside dl a row of a chunk needs its gathered hidden row, a column its share of the sums and tickets.
    const std::size_t smallest =
        static_cast<std::size_t>(kTileRows) * static_cast<std::size_t>(kTileColumns + (in_gradient ? 0 : r.h)) * 2;
    if (room < smallest) return budget_too_small(fixed + smallest, e);
    std::int64_t most_rows = range;
    if (!in_gradient) {
      const auto half = static_cast<std::int64_t>(room / 2) / (r.h * 2);
      most_rows = std::min(range, std::max<std::int64_t>(kTileRows, half / kTileRows * kTileRows));
    }
    std::size_t for_dl = room - (in_gradient ? 0 : static_cast<std::size_t>(most_rows * r.h * 2));
    // Partial sums of the bias gradient take 4 bytes for 256 rows or more of 2 bytes; tickets a few KiB.
    for_dl -= for_dl / 64;
    const int multiprocessors = (*current_device())->multiprocessors;
    l.chunk = backward_chunk(most_rows, r.h, std::max<std::int64_t>(v, 1), for_dl, multiprocessors);
    if (l.chunk.rows == 0) return budget_too_small(fixed + smallest, e);
    if (l.chunk.rows < r.n) l.chunk.rows = l.chunk.rows / kTileRows * kTileRows;
    if (bias) l.bias_partial = w.take<float>(sum_slices(l.chunk.rows) * l.chunk.columns);
    l.tickets = w.take<int>(2 * l.row_chunks(range) * l.column_chunks(v));
    if (in_gradient) {
      l.gathered = static_cast<std::uint16_t*>(out.hidden.data);
      l.gathered_stride = out.hidden.rows > 1 ? out.hidden.row_stride : r.h;
    } else {
      l.gathered = w.take<std::uint16_t>(l.chunk.rows * r.h);
    }
    l.dl = w.take<std::uint16_t>(l.chunk.rows * l.chunk.columns);
    const std::size_t before = w.used();
    if (!out.hidden.absent() && out.hidden.dtype != DType::kFloat32) l.hidden_sums = w.take<float>(l.chunk.rows * r.h);
    if (!out.weight.absent() && out.weight.dtype != DType::kFloat32 && l.chunk.rows < r.n)
      l.weight_sums = w.take<float>(v * r.h);
    l.size = {w.used(), w.used() - before};
    return l;
  }
};

/// fp32 sums: the first write overwrites unless the caller wants to accumulate.
Store sum_store(bool wanted, bool first, bool accumulate) {
  return !wanted ? Store::kNone : first && !accumulate ? Store::kWrite : Store::kAdd;
}

Status clear_matrix(const Matrix& m, std::int64_t first_row, cudaStream_t stream) {
  if (m.absent() || first_row >= m.rows) return {};
  const std::size_t element = size_of(m.dtype), pitch = static_cast<std::size_t>(m.row_stride) * element;
  return to_status(cudaMemset2DAsync(static_cast<std::byte*>(m.data) + static_cast<std::size_t>(first_row) * pitch,
                                     m.rows - first_row > 1 ? pitch : static_cast<std::size_t>(m.cols) * element, 0,
                                     static_cast<std::size_t>(m.cols) * element,
                                     static_cast<std::size_t>(m.rows - first_row), stream),
                   "cudaMemset2DAsync");
}

class Backward {
 public:
  Backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e,
           const BackwardLayout& l)
      : r_(r),
        in_(in),
        out_(out),
        l_(l),
        stream_(stream_of(e)),
        cache_(CacheLayout::make(r, e.cache, e.cache_bytes)),
        multiprocessors_((*current_device())->multiprocessors),
        // Without an entropy gradient off and metric are one: no work is done for it.
        entropy_(r.given.entropy == EntropyMode::kGrad && !in.dentropy.absent()) {}

  /// Ranges and chunks from the last row to the first: a row's place in the list is never behind the row itself,
  /// so gathering a chunk into the hidden gradient cannot meet rows that are finished.
  Status run() {
    l_.common.prepare_bias(r_, stream_);
    if (!out_.accumulate_weight) LMHEAD_RETURN_IF_ERROR(clear_matrix(out_.weight, r_.v_valid, stream_));
    bool first = true;
    for (std::int64_t begin = (r_.n - 1) / l_.range * l_.range; begin >= 0; begin -= l_.range) {
      LMHEAD_RETURN_IF_ERROR(begin_range(begin, std::min(l_.range, r_.n - begin)));
      for (std::int64_t k = l_.row_chunks(rows_) - 1; k >= 0; --k, first = false)
        LMHEAD_RETURN_IF_ERROR(row_chunk(k, first));
    }
    return finish_outputs();
  }

 private:
  Status begin_range(std::int64_t begin, std::int64_t rows) {
    begin_ = begin;
    rows_ = rows;
    inputs_ = row_inputs(r_, begin, rows, in_);
    hidden_ = out_.hidden;
    if (!hidden_.absent()) {
      hidden_.data = static_cast<std::byte*>(hidden_.data) +
                     static_cast<std::size_t>(begin * hidden_.row_stride) * size_of(hidden_.dtype);
      hidden_.rows = rows;
    }
    const std::int64_t row_chunks = l_.row_chunks(rows);
    list_rows(inputs_, rows, true, l_.common.list(),
              {l_.counts, static_cast<int>(row_chunks), l_.chunk.rows, nullptr, 0, 0, l_.common.compacted, l_.tickets,
               static_cast<int>(2 * row_chunks * l_.column_chunks(r_.v_valid))},
              {}, stream_);
    // An fp32 gradient is written row by row through the list: the rows outside it here.
    if (!hidden_.absent() && !out_.accumulate_hidden && l_.hidden_sums == nullptr)
      finish_hidden(nullptr, l_.common.index, l_.common.active, 0, 0, true, false, hidden_, stream_);
    if (reads_cache() && !all_cached())
      count_cached({l_.common.index, l_.common.active}, cache_.place, cache_.rows, l_.cached, stream_);
    return {};
  }

  /// The cache holds rows of the first range.
  bool reads_cache() const { return begin_ == 0 && cache_.rows > 0; }
  bool all_cached() const { return reads_cache() && cache_.rows >= rows_; }
  const std::int64_t* cached_count() const { return all_cached() ? l_.common.active : l_.cached; }

  Status row_chunk(std::int64_t k, bool first) {
    const std::int64_t begin = k * l_.chunk.rows, rows = std::min(l_.chunk.rows, rows_ - begin);
    std::uint16_t* gathered = l_.gathered;
    if (BackwardLayout::gathers_in_gradient(r_, out_)) gathered += (begin_ + begin) * l_.gathered_stride;
    ConstMatrix hidden = r_.given.hidden;
    hidden.row_stride = stride_of(hidden);
    hidden.data = static_cast<const std::uint16_t*>(hidden.data) + begin_ * hidden.row_stride;
    const std::int64_t* count = l_.counts + k;
    gather_rows(hidden, l_.common.index + begin, count, l_.common.compacted, rows, gathered, l_.gathered_stride,
                stream_);

    DlogitsWork dlogits{};
    LMHEAD_RETURN_IF_ERROR(hidden_map(&dlogits.hidden, r_, begin_ + begin, rows, kTileRows));
    LMHEAD_RETURN_IF_ERROR(encode_tensor_map(&dlogits.gathered, gathered, r_.compute, rows, r_.h, l_.gathered_stride,
                                             kTileRows, kTileDepth));
    LMHEAD_RETURN_IF_ERROR(weight_map(&dlogits.weight, r_, kTileColumns));
    dlogits.head = make_head(r_.given, l_.common.bias);
    dlogits.terms = l_.common.terms + begin;
    dlogits.count = count;
    dlogits.compacted = l_.common.compacted;
    dlogits.max_rows = static_cast<int>(rows);
    dlogits.h = static_cast<int>(r_.h);
    dlogits.group = l2_group(ceil_div(rows, kTileRows), r_.h, l2_percent(r_));

    CachedWork cached{};
    if (reads_cache()) {
      const std::int64_t start = r_.given.vocab_start;
      cached.cache = cache_;
      cached.segments = make_segments(SegmentGrid::of(r_.order(), start, start + r_.v_valid), start);
      cached.head = dlogits.head;
      cached.terms = dlogits.terms;
      cached.index = l_.common.index + begin;
      cached.count = count;
      cached.cached = dlogits.cached = cached_count();
      cached.begin = dlogits.begin = begin;
      cached.dl = l_.dl;
      cached.dl_stride = l_.chunk.columns;
      cached.max_rows = rows;
      cached.entropy = entropy_;
    }

    GemmWork gemm{};
    LMHEAD_RETURN_IF_ERROR(hidden_map(&gemm.hidden, r_, begin_ + begin, rows, kTileDepth));
    LMHEAD_RETURN_IF_ERROR(encode_tensor_map(&gemm.gathered, gathered, r_.compute, rows, r_.h, l_.gathered_stride,
                                             kTileDepth, kTileDepth));
    LMHEAD_RETURN_IF_ERROR(weight_map(&gemm.weight, r_, kTileDepth));
    gemm.count = count;
    gemm.compacted = l_.common.compacted;
    gemm.max_rows = static_cast<int>(rows);
    gemm.h = static_cast<int>(r_.h);
    const bool through_sums = l_.hidden_sums != nullptr;
    gemm.index = through_sums ? nullptr : l_.common.index + begin;
    // The last product can round the sums itself, unless the gradient still holds the gathered rows.
    const bool rounds = through_sums && hidden_.dtype == r_.compute;

    for (std::int64_t v = 0, c = 0; v < r_.v_valid; v += l_.chunk.columns, ++c) {
      const std::int64_t columns = std::min(l_.chunk.columns, r_.v_valid - v);
      // The map ends with the chunk's columns: what lies behind them in a row is never stored nor read.
      const auto dl_map = [&](CUtensorMap* map, int box_rows) {
        return encode_tensor_map(map, l_.dl, r_.compute, rows, columns, l_.chunk.columns,
                                 static_cast<std::uint32_t>(box_rows), kTileDepth);
      };
      LMHEAD_RETURN_IF_ERROR(dl_map(&dlogits.dl, kDlogitsBoxRows));
      dlogits.column = gemm.column = cached.column = static_cast<int>(v);
      dlogits.columns = gemm.columns = cached.columns = static_cast<int>(columns);
      dlogits.ticket = l_.tickets + 2 * (k * l_.column_chunks(r_.v_valid) + c);
      gemm.ticket = dlogits.ticket + 1;
      if (reads_cache()) LMHEAD_RETURN_IF_ERROR(launch_cached(cached, r_.compute, stream_));
      if (!all_cached())
        LMHEAD_RETURN_IF_ERROR(launch_dlogits(dlogits, r_.compute, entropy_, multiprocessors_, stream_));
      if (!inputs_.selected.absent())
        add_selected({l_.dl, l_.chunk.columns, r_.compute, rows, v, v + columns,
                      static_cast<float>(r_.given.logit_scale), static_cast<float>(r_.given.softcap.value_or(0.0))},
                     inputs_, {l_.common.index + begin, nullptr}, l_.common.terms + begin, stream_);
      if (l_.bias_sums != nullptr)
        sum_columns(l_.dl, r_.compute, l_.chunk.columns, count, columns, sum_slices(l_.chunk.rows), l_.bias_partial,
                    l_.bias_sums + v, !first, stream_);

      LMHEAD_RETURN_IF_ERROR(dl_map(&gemm.dl_rows, kTileRows));
      LMHEAD_RETURN_IF_ERROR(dl_map(&gemm.dl_columns, kTileDepth));
      gemm.dx = {through_sums ? l_.hidden_sums : hidden_.data, through_sums ? r_.h : hidden_.row_stride,
                 sum_store(!out_.hidden.absent(), c == 0, out_.accumulate_hidden)};
      if (rounds && v + columns == r_.v_valid)
        gemm.rounded = {static_cast<std::uint16_t*>(hidden_.data) + begin * hidden_.row_stride, hidden_.row_stride,
                        Store::kRounded};
      gemm.dw = weight_output(v, first);
      if (gemm.dx.store != Store::kNone || gemm.dw.store != Store::kNone)
        LMHEAD_RETURN_IF_ERROR(launch_gemm(gemm, r_.compute, multiprocessors_, stream_));
    }
    if (through_sums)
      finish_hidden(l_.hidden_sums, l_.common.index, l_.common.active, begin, rows, k == 0, rounds, hidden_, stream_);
    return {};
  }

  GemmOutput weight_output(std::int64_t v, bool first) const {
    if (out_.weight.absent()) return {nullptr, 0, Store::kNone};
    if (l_.weight_sums != nullptr) return {l_.weight_sums + v * r_.h, r_.h, sum_store(true, first, false)};
    const std::size_t offset = static_cast<std::size_t>(v * out_.weight.row_stride) * size_of(out_.weight.dtype);
    void* data = static_cast<std::byte*>(out_.weight.data) + offset;
    const bool rounded = out_.weight.dtype != DType::kFloat32;
    return {data, out_.weight.row_stride, rounded ? Store::kRounded : sum_store(true, first, out_.accumulate_weight)};
  }

  Status finish_outputs() {
    if (l_.weight_sums != nullptr) finish_weight(l_.weight_sums, r_.v_valid, out_.weight, stream_);
    if (l_.bias_sums != nullptr || !out_.bias.absent())
      finish_bias(l_.bias_sums, r_.v_valid, out_.bias, out_.accumulate_bias, stream_);
    return last_launch("sm90 backward");
  }

  const ResolvedProblem& r_;
  const BackwardInputs& in_;
  const BackwardOutputs& out_;
  const BackwardLayout& l_;
  const cudaStream_t stream_;
  const CacheLayout cache_;
  const int multiprocessors_;
  const bool entropy_;
  std::int64_t begin_ = 0, rows_ = 0;  ///< the current range
  RowInputs inputs_{};                 ///< of its rows
  Matrix hidden_;                      ///< the rows of the hidden gradient
};

/// No rows or no columns: the gradients are zero.
Status clear_gradients(const BackwardOutputs& out, cudaStream_t stream) {
  if (!out.accumulate_hidden) LMHEAD_RETURN_IF_ERROR(clear_matrix(out.hidden, 0, stream));
  if (!out.accumulate_weight) LMHEAD_RETURN_IF_ERROR(clear_matrix(out.weight, 0, stream));
  if (!out.bias.absent() && !out.accumulate_bias) finish_bias(nullptr, 0, out.bias, false, stream);
  return last_launch("sm90 backward");
}

}  // namespace

Status run_backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out,
                    const Execution& e) {
  if (r.n == 0 || r.v_valid == 0) return clear_gradients(out, stream_of(e));
  LMHEAD_RETURN_IF_ERROR(check_device_pointers(r, e));
  Result<BackwardLayout> layout = BackwardLayout::make(r, out, e, e.workspace);
  if (!layout.ok()) return layout.status();
  return Backward(r, in, out, e, *layout).run();
}

Result<WorkspaceSize> backward_workspace(const ResolvedProblem& r, const BackwardOutputs& out, const Execution& e) {
  if (r.v_valid == 0) return WorkspaceSize{kCheckBytes, 0};
  Result<BackwardLayout> layout = BackwardLayout::make(r, out, e, nullptr);
  if (!layout.ok()) return layout.status();
  return layout->size;
}

}  // namespace lmhead::cuda::sm90
