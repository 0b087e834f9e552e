// Candidate sets on the CPU: one dot product a distinct member, in ascending id order, so that a row's
// result does not depend on the order in which its set was listed.
#include "core/support.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu/head_row.h"
#include "cpu/parallel.h"
#include "cpu/workspace.h"

namespace lmhead {
namespace {

constexpr std::int64_t kRowGrain = 8;          // rows a thread takes at least
constexpr std::int64_t kVocabularyGrain = 64;  // weight rows a thread takes at least

/// One row of the problem: its distinct members and their logits on this shard.
template <class T>
class SupportRow : public HeadRow<T> {
 public:
  using HeadRow<T>::here;
  using HeadRow<T>::logit;
  explicit SupportRow(const ResolvedSupport& r) : HeadRow<T>(r.head), r_(r) {}

  /// Loads row i. False when the row is inactive or its set is empty.
  bool load(std::int64_t i) {
    if (!is_active(r_.head, i)) return false;
    const auto* ids = static_cast<const std::int32_t*>(r_.ids.data) + i * r_.ids.row_stride;
    members_.clear();
    bad_ = false;
    for (std::int64_t k = 0; k < r_.k; ++k) {
      if (ids[k] >= 0) members_.push_back(ids[k]);
      bad_ |= ids[k] < -1 || ids[k] >= r_.head.valid_vocab;  // unchecked: NaN in this row, no access
    }
    if (members_.empty()) return bad_;
    std::sort(members_.begin(), members_.end());
    members_.erase(std::unique(members_.begin(), members_.end()), members_.end());
    HeadRow<T>::load(i);
    target_ = load_int(r_.head.given.targets, i);
    bad_ |= target_ < 0 || target_ >= r_.head.valid_vocab;
    return true;
  }

  const std::vector<std::int64_t>& members() const { return members_; }
  std::int64_t target() const { return target_; }
  bool bad() const { return bad_; }
  bool is_member(std::int64_t id) const { return std::binary_search(members_.begin(), members_.end(), id); }

  SoftmaxStateT<T> state() {
    if (bad_) {
      const T nan = std::numeric_limits<T>::quiet_NaN();
      return {nan, nan, nan, nan};
    }
    SoftmaxStateT<T> octants[kOctants];
    for (auto& s : octants) s = empty_state<T>();
    const std::int64_t size = r_.head.order().octant_size();
    for (std::int64_t id : members_) {
      if (!here(id)) continue;
      const T z = logit(id);
      // z - z is NaN for NaN and +inf; -inf holds no mass.
      const SoftmaxStateT<T> one{z, z == -std::numeric_limits<T>::infinity() ? T(0) : z - z + T(1), T(0),
                                 id == target_ ? z : std::numeric_limits<T>::infinity()};
      octants[id / size] = merge(octants[id / size], one);
    }
    SoftmaxStateT<T> s = merge_tree(octants, kOctants);
    if (here(target_) && !is_member(target_)) s.target = logit(target_);
    return s;
  }

 private:
  const ResolvedSupport& r_;
  std::int64_t target_ = 0;
  bool bad_ = false;
  std::vector<std::int64_t> members_;
};

/// Whether row i counts: active, with a member anywhere in the vocabulary.
bool is_valid(const ResolvedSupport& r, std::int64_t i) {
  if (!is_active(r.head, i)) return false;
  const auto* ids = static_cast<const std::int32_t*>(r.ids.data) + i * r.ids.row_stride;
  return std::any_of(ids, ids + r.k, [](std::int32_t id) { return id != -1; });
}

template <class T>
void forward_rows(const ResolvedSupport& r, const Matrix& state, const Execution& execution) {
  parallel_for(execution.threads, r.head.n, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    SupportRow<T> row(r);
    for (std::int64_t i = begin; i < end; ++i)
      static_cast<SoftmaxStateT<T>*>(state.data)[i] = row.load(i) ? row.state() : empty_state<T>();
  });
}

template <class T>
void combine_rows(const ResolvedSupport& r, const ConstMatrix& states, const SupportOutputs& out) {
  const auto* state = static_cast<const SoftmaxStateT<T>*>(states.data);
  const std::int64_t n = r.head.n, shards = n == 0 ? 1 : states.rows / n;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool valid = is_valid(r, i);
    const RowResult<T> result = valid ? finish(merge_tree(state + i, shards, n), true, false) : RowResult<T>{0, 0, 0};
    if (!out.logprob.absent()) store_float(out.logprob, i, result.logprob);
    if (!out.entropy.absent()) store_float(out.entropy, i, result.entropy);
    if (!out.lse.absent()) store_float(out.lse, i, result.lse);
    if (!out.valid.absent()) static_cast<bool*>(out.valid.data)[i * out.valid.stride] = valid;
  }
}

/// The two phases of the backward. Phase 1, threads over rows: dl of every candidate slot (0 for
/// padding, duplicates and other shards; slot K is the sampled non-member) and the hidden gradient.
/// Phase 2, threads over weight rows: contributions of one id in order of the token row, found by a
/// counting sort over id ranges small enough for the position buffer.
template <class T>
class Backward {
 public:
  Backward(const ResolvedSupport& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& execution)
      : r_(r), in_(in), out_(out), threads_(execution.threads), slots_(r.k + 1) {}

  bool needs_weight() const { return !out_.weight.absent() || !out_.bias.absent(); }
  std::size_t dl_bytes() const { return static_cast<std::size_t>(r_.head.n * slots_) * sizeof(T); }
  std::size_t count_bytes() const { return static_cast<std::size_t>(3 * (r_.head.v_local + 1)) * sizeof(std::int64_t); }
  /// Positions held at a time: at least one id's worth (N), at most all.
  std::int64_t capacity(std::size_t budget) const {
    const std::size_t fixed = dl_bytes() + count_bytes();
    const std::int64_t room = budget > fixed ? static_cast<std::int64_t>((budget - fixed) / sizeof(std::int64_t)) : 0;
    return std::clamp(room, r_.head.n, r_.head.n * slots_);
  }
  std::size_t bytes(std::size_t budget) const {
    return needs_weight()
               ? dl_bytes() + count_bytes() + static_cast<std::size_t>(capacity(budget)) * sizeof(std::int64_t)
               : 0;
  }

  void run(std::byte* workspace, std::size_t budget) {
    if (needs_weight()) {
      counts_ = reinterpret_cast<std::int64_t*>(workspace);
      starts_ = counts_ + r_.head.v_local + 1;
      next_ = starts_ + r_.head.v_local + 1;
      positions_ = next_ + r_.head.v_local + 1;
      capacity_ = capacity(budget);
      dl_ = reinterpret_cast<T*>(positions_ + capacity_);
    }
    rows_phase();
    if (needs_weight()) weight_phase();
  }

 private:
  void rows_phase() {
    parallel_for(threads_, r_.head.n, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
      SupportRow<T> row(r_);
      std::vector<T> dx(static_cast<std::size_t>(r_.head.h)), dl(static_cast<std::size_t>(slots_));
      for (std::int64_t i = begin; i < end; ++i) {
        std::fill(dx.begin(), dx.end(), T(0));
        std::fill(dl.begin(), dl.end(), T(0));
        const T a = in_.dlogprob.absent() ? T(0) : static_cast<T>(load_float(in_.dlogprob, i));
        const T g = in_.dentropy.absent() ? T(0) : static_cast<T>(load_float(in_.dentropy, i));
        if ((a != 0 || g != 0) && row.load(i)) one_row(row, i, a, g, dx, dl);
        if (dl_ != nullptr) std::copy(dl.begin(), dl.end(), dl_ + i * slots_);
        if (out_.hidden.absent()) continue;
        for (std::int64_t k = 0; k < r_.head.h; ++k)
          store_float(out_.hidden, i, k,
                      static_cast<double>(dx[static_cast<std::size_t>(k)]) +
                          (out_.accumulate_hidden ? load_float(out_.hidden, i, k) : 0.0));
      }
    });
  }

  void one_row(SupportRow<T>& row, std::int64_t i, T a, T g, std::vector<T>& dx, std::vector<T>& dl) {
    const T lse = static_cast<T>(load_float(in_.lse, i));
    const T entropy = g == 0 ? T(0) : static_cast<T>(load_float(in_.entropy, i));
    const auto* ids = static_cast<const std::int32_t*>(r_.ids.data) + i * r_.ids.row_stride;
    const auto add = [&](std::int64_t id, std::int64_t slot, bool member) {
      if (!row.here(id) || row.bad()) return;
      const T z = row.logit(id), log_p = z - lse, p = member ? std::exp(log_p) : T(0);
      T dz = -a * p - (p == 0 ? T(0) : g * p * (log_p + entropy));
      if (id == row.target()) dz += a;
      const T d = dz * row.slope(z);
      dl[static_cast<std::size_t>(slot)] = d;
      for (std::size_t k = 0; k < dx.size(); ++k) dx[k] += d * row.w()[k];
    };
    // Ascending ids, as in the forward; dl goes to the first slot that lists the id.
    for (std::int64_t id : row.members())
      add(id, std::find(ids, ids + r_.k, static_cast<std::int32_t>(id)) - ids, true);
    if (!row.is_member(row.target())) add(row.target(), r_.k, false);
    if (row.bad()) std::fill(dx.begin(), dx.end(), std::numeric_limits<T>::quiet_NaN());
  }

  /// Local weight row of a slot with a contribution, or -1.
  std::int64_t slot_id(std::int64_t i, std::int64_t slot) const {
    if (dl_[i * slots_ + slot] == T(0)) return -1;
    const std::int64_t id = slot == r_.k ? load_int(r_.head.given.targets, i)
                                         : static_cast<const std::int32_t*>(r_.ids.data)[i * r_.ids.row_stride + slot];
    return id - r_.head.given.vocab_start;
  }

  void weight_phase() {
    const std::int64_t v = r_.head.v_local;
    std::fill(counts_, counts_ + v + 1, 0);
    for (std::int64_t i = 0; i < r_.head.n; ++i)
      for (std::int64_t s = 0; s < slots_; ++s)
        if (const std::int64_t j = slot_id(i, s); j >= 0) ++counts_[j + 1];
    for (std::int64_t begin = 0; begin < v;) {
      std::int64_t end = begin, held = 0;
      while (end < v && held + counts_[end + 1] <= capacity_) held += counts_[++end];
      range_phase(begin, end);
      begin = end;
    }
  }

  void range_phase(std::int64_t begin, std::int64_t end) {
    std::int64_t at = 0;
    for (std::int64_t j = begin; j < end; ++j) {
      starts_[j] = next_[j] = at;
      at += counts_[j + 1];
    }
    for (std::int64_t i = 0; i < r_.head.n; ++i)
      for (std::int64_t s = 0; s < slots_; ++s)
        if (const std::int64_t j = slot_id(i, s); j >= begin && j < end) positions_[next_[j]++] = i * slots_ + s;
    parallel_for(threads_, end - begin, kVocabularyGrain, [&](std::int64_t b, std::int64_t e) {
      std::vector<double> x(static_cast<std::size_t>(r_.head.h));
      std::vector<T> sum(x.size());
      for (std::int64_t j = begin + b; j < begin + e; ++j) one_weight_row(j, starts_[j], next_[j], x, sum);
    });
  }

  void one_weight_row(std::int64_t j, std::int64_t first, std::int64_t last, std::vector<double>& x,
                      std::vector<T>& sum) {
    std::fill(sum.begin(), sum.end(), T(0));
    T bias = 0;
    for (std::int64_t at = first; at < last; ++at) {
      const T d = dl_[positions_[at]];
      bias += d;
      if (out_.weight.absent()) continue;
      load_row(r_.head.given.hidden, positions_[at] / slots_, r_.head.compute, x.data());
      for (std::size_t k = 0; k < x.size(); ++k) sum[k] += d * static_cast<T>(x[k]);
    }
    if (!out_.weight.absent() && (first < last || !out_.accumulate_weight))
      for (std::int64_t k = 0; k < r_.head.h; ++k)
        store_float(out_.weight, j, k,
                    static_cast<double>(sum[static_cast<std::size_t>(k)]) +
                        (out_.accumulate_weight ? load_float(out_.weight, j, k) : 0.0));
    if (!out_.bias.absent())
      store_float(out_.bias, j, static_cast<double>(bias) + (out_.accumulate_bias ? load_float(out_.bias, j) : 0.0));
  }

  const ResolvedSupport& r_;
  const BackwardInputs& in_;
  const BackwardOutputs& out_;
  const int threads_;
  const std::int64_t slots_;
  std::int64_t* counts_ = nullptr;     // [V_local + 1] contributions to weight row j at j + 1
  std::int64_t* starts_ = nullptr;     // [V_local + 1] first position of row j within the range
  std::int64_t* next_ = nullptr;       // [V_local + 1] one past its last, once the range is sorted
  std::int64_t* positions_ = nullptr;  // [capacity_]
  std::int64_t capacity_ = 0;
  T* dl_ = nullptr;  // [N, K + 1]
};

template <class T>
void selected_rows(const ResolvedSupport& r, const Matrix& logits, const Execution& execution) {
  parallel_for(execution.threads, r.head.n, kRowGrain, [&](std::int64_t begin, std::int64_t end) {
    HeadRow<T> row(r.head);
    for (std::int64_t i = begin; i < end; ++i) {
      const bool active = is_active(r.head, i);
      if (active) row.load(i);
      for (std::int64_t k = 0; k < r.k; ++k) {
        const std::int64_t id = load_int(r.ids.data, r.ids.dtype, i * r.ids.row_stride + k);
        const bool scored = active && row.here(id);
        store_float(logits, i, k,
                    scored ? static_cast<double>(row.logit(id)) : std::numeric_limits<double>::infinity());
      }
    }
  });
}

Status selected_combine(const ResolvedSupport& r, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const Matrix& selected, const Execution&) {
  const std::int64_t n = r.head.n, shards = n == 0 ? 1 : logits.rows / n;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool active = is_active(r.head, i);
    for (std::int64_t k = 0; k < r.k; ++k) {
      const std::int64_t id = load_int(r.ids.data, r.ids.dtype, i * r.ids.row_stride + k);
      double z = std::numeric_limits<double>::infinity();
      for (std::int64_t s = 0; s < shards; ++s) {
        const double part = load_float(logits, s * n + i, k);
        if (!(part >= z)) z = part;  // the minimum; NaN wins
      }
      double value = 0;
      if (active && id != -1) {
        value = z == std::numeric_limits<double>::infinity() ? std::numeric_limits<double>::quiet_NaN()
                                                             : z - load_float(lse, i);
        if (id == load_int(r.head.given.targets, i)) value = load_float(logprob, i);
      }
      store_float(selected, i, k, value);
    }
  }
  return {};
}

Result<WorkspaceSize> workspace_size(const ResolvedSupport& r, Operation operation, const BackwardOutputs& out,
                                     const Execution& execution) {
  if (operation == Operation::kForwardPartial) return WorkspaceSize{};
  if (operation == Operation::kForward)
    return WorkspaceSize{static_cast<std::size_t>(r.head.n * kStateWidth) * size_of(r.head.result), 0};
  const BackwardInputs none{};
  if (r.head.result == DType::kFloat64)
    return WorkspaceSize{Backward<double>(r, none, out, execution).bytes(budget_of(execution)), 0};
  return WorkspaceSize{Backward<float>(r, none, out, execution).bytes(budget_of(execution)), 0};
}

template <class T>
Status run_backward(const ResolvedSupport& r, const BackwardInputs& in, const BackwardOutputs& out,
                    const Execution& e) {
  Backward<T> backward(r, in, out, e);
  const std::size_t bytes = backward.bytes(budget_of(e));
  std::unique_ptr<std::byte[]> own;
  if (e.workspace == nullptr) own = std::make_unique_for_overwrite<std::byte[]>(bytes);
  backward.run(own != nullptr ? own.get() : static_cast<std::byte*>(e.workspace), budget_of(e));
  return {};
}

}  // namespace

const SupportImplementation kSupportCpu = {
    .name = "cpu",
    .device = Device::kCpu,
    .available = [] { return Status(); },
    .workspace_size = workspace_size,
    .check_values = [](const ResolvedSupport& r, const Execution&) { return check_host_support_values(r); },
    .forward_partial =
        [](const ResolvedSupport& r, const Matrix& state, const Execution& e) {
          if (r.head.result == DType::kFloat64) {
            forward_rows<double>(r, state, e);
          } else {
            forward_rows<float>(r, state, e);
          }
          return Status();
        },
    .combine =
        [](const ResolvedSupport& r, const ConstMatrix& states, const SupportOutputs& out, const Execution&) {
          if (r.head.result == DType::kFloat64) {
            combine_rows<double>(r, states, out);
          } else {
            combine_rows<float>(r, states, out);
          }
          return Status();
        },
    .backward =
        [](const ResolvedSupport& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e) {
          return r.head.result == DType::kFloat64 ? run_backward<double>(r, in, out, e)
                                                  : run_backward<float>(r, in, out, e);
        },
    .selected_logits =
        [](const ResolvedSupport& r, const Matrix& logits, const Execution& e) {
          if (r.head.result == DType::kFloat64) {
            selected_rows<double>(r, logits, e);
          } else {
            selected_rows<float>(r, logits, e);
          }
          return Status();
        },
    .selected_combine = selected_combine,
};

}  // namespace lmhead
