// Row bookkeeping shared by the CPU backends: which rows are computed, and per-row results.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/element.h"
#include "core/implementation.h"

namespace lmhead {

/// Whether the forward computes row i: active mask set and target not ignore_index.
inline bool is_active(const ResolvedProblem& r, std::int64_t i) {
  return (r.given.active.absent() || load_int(r.given.active, i) > 0) &&
         load_int(r.given.targets, i) != r.given.ignore_index;
}

/// T_i; NaN for a value that is not finite and > 0, so that an unchecked one makes its own row NaN.
inline double temperature(const ResolvedProblem& r, std::int64_t i) {
  if (r.given.row_temperature.absent()) return r.given.temperature;
  const double t = load_float(r.given.row_temperature, i);
  return t > 0 && std::isfinite(t) ? t : std::numeric_limits<double>::quiet_NaN();
}

/// The target's column in this shard, or -1. Any id is safe here: no difference of ids can overflow.
inline std::int64_t target_column(const ResolvedProblem& r, std::int64_t i) {
  const std::int64_t id = load_int(r.given.targets, i), start = r.given.vocab_start;
  return id >= start && id < start + r.v_valid ? id - start : -1;
}

/// True when the row's target is a column of the head. With OutOfVocab::kError an unchecked bad id
/// counts as "in": it is in no shard, so its target stays +inf and the row becomes NaN.
inline bool target_in_vocab(const ResolvedProblem& r, std::int64_t id) {
  return r.given.out_of_vocab == OutOfVocab::kError || (id >= 0 && id < r.valid_vocab);
}

/// Sum of the upstream gradients of row i at a global id.
double selected_upstream(const SelectedGradient& selected, std::int64_t i, std::int64_t id);

/// Rows that the forward computes, in order.
std::vector<std::int64_t> forward_rows(const ResolvedProblem& r);
/// Rows that the backward computes: active and with an upstream gradient other than exactly zero.
std::vector<std::int64_t> backward_rows(const ResolvedProblem& r, const BackwardInputs& in);

/// combine() on host memory, for every CPU backend.
Status combine_host(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& out,
                    const Execution& execution);
/// forward() as forward_partial and combine over row chunks, for every CPU backend.
Status forward_host(const Implementation& backend, const ResolvedProblem& r, const ForwardOutputs& out,
                    const Execution& execution);
/// The problem, and the results, restricted to rows [begin, end).
ResolvedProblem row_range(const ResolvedProblem& r, std::int64_t begin, std::int64_t end);
ForwardOutputs row_range(const ForwardOutputs& out, std::int64_t begin, std::int64_t end);

}  // namespace lmhead
