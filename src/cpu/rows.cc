#include "cpu/rows.h"

#include "core/return_if_error.h"

#include <algorithm>

namespace lmhead {
namespace {

/// Rows whose states forward_host holds at a time: 256 KiB of fp32 states.
constexpr std::int64_t kRowsPerChunk = 16384;

ConstVector slice(ConstVector v, std::int64_t begin, std::int64_t end) {
  if (v.absent()) return v;
  v.data = static_cast<const std::byte*>(v.data) + begin * v.stride * static_cast<std::int64_t>(size_of(v.dtype));
  v.size = end - begin;
  return v;
}

Vector slice(Vector v, std::int64_t begin, std::int64_t end) {
  if (v.absent()) return v;
  v.data = static_cast<std::byte*>(v.data) + begin * v.stride * static_cast<std::int64_t>(size_of(v.dtype));
  v.size = end - begin;
  return v;
}

template <class T>
void combine_rows(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& out) {
  const auto* state = static_cast<const SoftmaxStateT<T>*>(states.data);
  const std::int64_t shards = r.n == 0 ? 1 : states.rows / r.n;
  for (std::int64_t i = 0; i < r.n; ++i) {
    RowResult<T> result{0, 0, 0};
    if (is_active(r, i))
      result = finish(merge_tree(state + i, shards, r.n), target_in_vocab(r, load_int(r.given.targets, i)));
    if (!out.logprob.absent()) store_float(out.logprob, i, result.logprob);
    if (!out.entropy.absent()) store_float(out.entropy, i, result.entropy);
    if (!out.lse.absent()) store_float(out.lse, i, result.lse);
  }
}

}  // namespace

std::vector<std::int64_t> forward_rows(const ResolvedProblem& r) {
  std::vector<std::int64_t> rows;
  rows.reserve(static_cast<std::size_t>(r.n));
  for (std::int64_t i = 0; i < r.n; ++i) {
    if (is_active(r, i)) rows.push_back(i);
  }
  return rows;
}

double selected_upstream(const SelectedGradient& selected, std::int64_t i, std::int64_t id) {
  double sum = 0;
  for (std::int64_t k = 0; k < selected.ids.cols; ++k)
    if (load_int(selected.ids.data, selected.ids.dtype, i * selected.ids.row_stride + k) == id)
      sum += load_float(selected.upstream, i, k);
  return sum;
}

std::vector<std::int64_t> backward_rows(const ResolvedProblem& r, const BackwardInputs& in) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < r.n; ++i) {
    bool moved = (!in.dlogprob.absent() && load_float(in.dlogprob, i) != 0) ||
                 (!in.dentropy.absent() && load_float(in.dentropy, i) != 0);
    // Upstream gradients at selected ids may cancel in their total and still move the row.
    for (std::int64_t k = 0; !moved && k < in.selected.ids.cols; ++k)
      moved = load_float(in.selected.upstream, i, k) != 0;
    if (moved && is_active(r, i)) rows.push_back(i);
  }
  return rows;
}

Status combine_host(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& out, const Execution&) {
  if (r.result == DType::kFloat64) {
    combine_rows<double>(r, states, out);
  } else {
    combine_rows<float>(r, states, out);
  }
  return {};
}

ResolvedProblem row_range(const ResolvedProblem& r, std::int64_t begin, std::int64_t end) {
  ResolvedProblem part = r;
  Problem& p = part.given;
  p.hidden.data = row_data(p.hidden, begin);
  p.hidden.rows = part.n = end - begin;
  p.targets = slice(p.targets, begin, end);
  p.active = slice(p.active, begin, end);
  p.row_temperature = slice(p.row_temperature, begin, end);
  return part;
}

ForwardOutputs row_range(const ForwardOutputs& out, std::int64_t begin, std::int64_t end) {
  return {slice(out.logprob, begin, end), slice(out.entropy, begin, end), slice(out.lse, begin, end)};
}

Status forward_host(const Implementation& backend, const ResolvedProblem& r, const ForwardOutputs& out,
                    const Execution& execution) {
  const std::int64_t rows = std::min(r.n, kRowsPerChunk);
  std::vector<std::byte> states(static_cast<std::size_t>(rows * kStateWidth) * size_of(r.result));
  for (std::int64_t begin = 0; begin < r.n; begin += rows) {
    const std::int64_t end = std::min(r.n, begin + rows);
    const ResolvedProblem part = row_range(r, begin, end);
    const Matrix state{states.data(), part.n, kStateWidth, kStateWidth, r.result};
    LMHEAD_RETURN_IF_ERROR(backend.forward_partial(part, state, execution));
    LMHEAD_RETURN_IF_ERROR(combine_host(part, {state.data, state.rows, state.cols, state.row_stride, state.dtype},
                                        row_range(out, begin, end), execution));
  }
  return {};
}

}  // namespace lmhead
