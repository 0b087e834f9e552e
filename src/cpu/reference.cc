// The definition of correct: one row, one column at a time, fp64 but for the logits, which are fp32 as on
// every path. No tricks; every other backend is tested against it.
#include <cmath>
#include <vector>

#include "core/validate.h"
#include "cpu/rows.h"

namespace lmhead {
namespace {

/// Row i of the problem against any column, in fp64.
class LogitRow {
 public:
  LogitRow(const ResolvedProblem& r, std::int64_t i)
      : r_(r), t_(temperature(r, i)), x_(static_cast<std::size_t>(r.h)), w_(x_.size()) {
    load_row(r.given.hidden, i, r.compute, x_.data());
  }
  /// z_ij in nats; j counts from the shard's start.
  double operator()(std::int64_t j) {
    const Problem& p = r_.given;
    load_row(p.weight, j, r_.compute, w_.data());
    double product = 0;
    for (std::size_t k = 0; k < x_.size(); ++k) product += x_[k] * w_[k];
    const double raw = p.logit_scale * (product + (p.bias.absent() ? 0.0 : load_float(p.bias, j)));
    const double z = (p.softcap ? *p.softcap * std::tanh(raw / *p.softcap) : raw) / t_;
    // Logits are fp32 on every path. It also keeps backward consistent with the fp32 lse it is given:
    // where one column holds nearly all the mass, lse is that column's rounded logit and p is 1.
    return r_.result == DType::kFloat32 ? static_cast<float>(z) : z;
  }
  /// dz_ij / d<x_i, w_j> = scale / T (1 - (z T / softcap)^2).
  double slope(double z) const {
    const Problem& p = r_.given;
    const double saturation = p.softcap ? z * t_ / *p.softcap : 0.0;
    return p.logit_scale / t_ * (1 - saturation * saturation);
  }
  const std::vector<double>& x() const { return x_; }
  const std::vector<double>& w() const { return w_; }  ///< the weight row of the last column asked for

 private:
  const ResolvedProblem& r_;
  const double t_;
  std::vector<double> x_, w_;
};

using State = SoftmaxStateT<double>;

/// State of the shard's columns [begin, end); -inf logits hold no mass.
State segment_state(LogitRow& logit, std::int64_t begin, std::int64_t end, std::int64_t target) {
  State s = empty_state<double>();
  for (std::int64_t j = begin; j < end; ++j) {
    const double z = logit(j);
    const State one{z, z == -INFINITY ? 0.0 : z - z + 1.0, 0.0,
                    j == target ? z : INFINITY};  // z - z: NaN for NaN and +inf
    s = merge(s, one);
  }
  return s;
}

/// The state in result precision T. The reference point is rounded first and the sums moved to it, so that
/// each number is rounded once.
template <class T>
SoftmaxStateT<T> rounded(State s) {
  if (s.sum != 0) rebase(s, static_cast<double>(static_cast<T>(s.max)));
  return {static_cast<T>(s.max), static_cast<T>(s.sum), static_cast<T>(s.weighted), static_cast<T>(s.target)};
}

/// Octants are rounded to T before they are merged, as ranks are: 1, 2, 4 and 8 equal shards give the same bits.
template <class T>
SoftmaxStateT<T> row_state(const ResolvedProblem& r, std::int64_t i) {
  State octants[kOctants];
  for (State& s : octants) s = empty_state<double>();
  LogitRow logit(r, i);
  const std::int64_t start = r.given.vocab_start, target = target_column(r, i);
  for_each_segment(r.order(), start, start + r.v_valid, [&](std::int64_t octant, std::int64_t b, std::int64_t e) {
    octants[octant] = merge(octants[octant], segment_state(logit, b - start, e - start, target));
  });
  SoftmaxStateT<T> parts[kOctants];
  for (std::int64_t o = 0; o < kOctants; ++o) parts[o] = rounded<T>(octants[o]);
  return merge_tree(parts, kOctants);
}

Status forward_partial(const ResolvedProblem& r, const Matrix& state, const Execution&) {
  for (std::int64_t i = 0; i < r.n; ++i) {
    if (r.result == DType::kFloat64) {
      static_cast<State*>(state.data)[i] = is_active(r, i) ? row_state<double>(r, i) : empty_state<double>();
    } else {
      static_cast<SoftmaxState*>(state.data)[i] = is_active(r, i) ? row_state<float>(r, i) : empty_state();
    }
  }
  return {};
}

Status backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution&) {
  const std::size_t h = static_cast<std::size_t>(r.h), v = static_cast<std::size_t>(r.v_local);
  std::vector<double> dx(out.hidden.absent() ? 0 : h), dw(out.weight.absent() ? 0 : v * h),
      db(out.bias.absent() ? 0 : v);
  const std::vector<std::int64_t> rows = backward_rows(r, in);
  std::size_t next = 0;
  for (std::int64_t i = 0; i < r.n; ++i) {
    std::fill(dx.begin(), dx.end(), 0.0);
    if (next < rows.size() && rows[next] == i) {
      ++next;
      const std::int64_t target = target_column(r, i);
      const double a = in.dlogprob.absent() ? 0 : load_float(in.dlogprob, i);
      const double g = in.dentropy.absent() ? 0 : load_float(in.dentropy, i);
      LogitRow logit(r, i);
      const double lse = load_float(in.lse, i), entropy = g == 0 ? 0 : load_float(in.entropy, i);
      for (std::int64_t j = 0; j < r.v_valid; ++j) {
        const double z = logit(j), log_p = z - lse, prob = std::exp(log_p);
        // p log p -> 0 at p = 0: a -inf logit would give 0 * -inf.
        double dz = -a * prob - (prob == 0 ? 0 : g * prob * (log_p + entropy));
        if (in.selected.absent()) {
          if (j == target) dz += a;
        } else {
          dz += selected_upstream(in.selected, i, j + r.given.vocab_start);
        }
        const double dl = dz * logit.slope(z);
        if (!db.empty()) db[static_cast<std::size_t>(j)] += dl;
        for (std::size_t k = 0; k < dx.size(); ++k) dx[k] += dl * logit.w()[k];
        if (!dw.empty())
          for (std::size_t k = 0; k < h; ++k) dw[static_cast<std::size_t>(j) * h + k] += dl * logit.x()[k];
      }
    }
    for (std::size_t k = 0; k < dx.size(); ++k) {
      const auto col = static_cast<std::int64_t>(k);
      store_float(out.hidden, i, col, dx[k] + (out.accumulate_hidden ? load_float(out.hidden, i, col) : 0.0));
    }
  }
  for (std::size_t j = 0; j < v; ++j) {
    const auto row = static_cast<std::int64_t>(j);
    if (!dw.empty())
      for (std::int64_t k = 0; k < r.h; ++k)
        store_float(
            out.weight, row, k,
            dw[j * h + static_cast<std::size_t>(k)] + (out.accumulate_weight ? load_float(out.weight, row, k) : 0.0));
    if (!db.empty()) store_float(out.bias, row, db[j] + (out.accumulate_bias ? load_float(out.bias, row) : 0.0));
  }
  return {};
}

Result<WorkspaceSize> workspace_size(const ResolvedProblem&, Operation, const BackwardOutputs&, const Execution&) {
  return WorkspaceSize{};  // plain fp64 buffers of its own; not meant for real sizes
}

}  // namespace

const Implementation kReferenceCpu = {
    .name = "reference",
    .device = Device::kCpu,
    .available = [] { return Status(); },
    .describe = [] { return std::string("plain C++, fp64 accumulation"); },
    .supports = [](const ResolvedProblem&, const Execution&) { return Status(); },
    .workspace_size = workspace_size,
    .check_values = [](const ResolvedProblem& r, const Execution&) { return check_host_values(r); },
    .forward_partial = forward_partial,
    .combine = combine_host,
    .forward = [](const ResolvedProblem& r, const ForwardOutputs& o,
                  const Execution& e) { return forward_host(kReferenceCpu, r, o, e); },
    .backward = backward,
};

}  // namespace lmhead
