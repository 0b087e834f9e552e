// The partial softmax over a set of columns and its one merge, used by a lane, a warp, a tile, a
// segment, an octant, a device and a rank alike. Host and device. Derivation: docs/numerics.md.
#pragma once

#include <cmath>
#include <limits>

#if defined(__CUDACC__)
#define LMHEAD_HD __host__ __device__ __forceinline__
#else
#define LMHEAD_HD inline
#endif

namespace lmhead {

/// With u = (z - max) log2 e:  sum = sum 2^u,  weighted = sum 2^u u  (<= 0),  max in nats.
/// target is z at the row's target if this set holds that column, else +inf.
template <class T>
struct SoftmaxStateT {
  T max, sum, weighted, target;
};
using SoftmaxState = SoftmaxStateT<float>;
static_assert(sizeof(SoftmaxState) == 16, "a state is one 16-byte row of the [N, 4] message");

template <class T>
inline constexpr T kLog2E = T(1.4426950408889634073599246810018921L);
template <class T>
inline constexpr T kLn2 = T(0.6931471805599453094172321214581766L);

/// The state of no columns.
template <class T = float>
LMHEAD_HD SoftmaxStateT<T> empty_state() {
  return {-std::numeric_limits<T>::infinity(), T(0), T(0), std::numeric_limits<T>::infinity()};
}

/// A state in other precision, each number rounded.
template <class To, class From>
LMHEAD_HD SoftmaxStateT<To> state_as(const SoftmaxStateT<From>& s) {
  return {static_cast<To>(s.max), static_cast<To>(s.sum), static_cast<To>(s.weighted), static_cast<To>(s.target)};
}

/// The same set seen from the reference point `max`, which need not be its maximum (a rounded one is not).
/// A factor 2^d that underflows drops the side: 0 * -inf would be NaN.
template <class T>
LMHEAD_HD void rebase(SoftmaxStateT<T>& state, T max) {
  const T d = (state.max - max) * kLog2E<T>;
  const T scale = std::exp2(d);
  state.weighted = scale == T(0) ? T(0) : scale * (state.weighted + d * state.sum);
  state.sum *= scale;
  state.max = max;
}

/// Union of two disjoint sets of columns. The empty set is the identity, bit for bit.
/// NaN in either sum survives; targets merge by min, +inf meaning "not here".
template <class T>
LMHEAD_HD SoftmaxStateT<T> merge(SoftmaxStateT<T> a, SoftmaxStateT<T> b) {
  const T target = a.target < b.target ? a.target : b.target;
  if (b.sum == T(0)) {
    a.target = target;
    return a;
  }
  if (a.sum == T(0)) {
    b.target = target;
    return b;
  }
  const T max = a.max > b.max ? a.max : b.max;
  rebase(a, max);
  rebase(b, max);
  return {max, a.sum + b.sum, a.weighted + b.weighted, target};
}

/// Results of one row. `in_vocab` false: the target is no column of the head ("zero": logprob 0).
template <class T>
struct RowResult {
  T logprob, entropy, lse;
};

/// log-prob = (target - max) - log sum; entropy = log sum - ln2 weighted / sum, both terms >= 0;
/// never lse - E[z], which loses digits with large logits and can go negative.
/// In fp64, once a row: lse is what backward sees of the forward, so it is rounded once and no more.
/// in_set: the target is one of the columns, so its log-prob is at most 0; a sampled id outside its
/// candidate set may have more.
template <class T>
LMHEAD_HD RowResult<T> finish(const SoftmaxStateT<T>& state, bool in_vocab, bool in_set = true) {
  const double max = state.max, sum = state.sum, log_sum = std::log(sum);
  T entropy = static_cast<T>(log_sum - kLn2<double> * (state.weighted / sum));
  if (entropy < T(0)) entropy = T(0);  // rounding only; keeps NaN
  T logprob = static_cast<T>((state.target - max) - log_sum);
  if (in_set && logprob > T(0)) logprob = T(0);  // likewise
  // A finite state without its target column: the id was out of range and unchecked.
  if (state.target == std::numeric_limits<T>::infinity()) logprob = std::numeric_limits<T>::quiet_NaN();
  if (!in_vocab && state.sum == state.sum) logprob = T(0);
  return {logprob, entropy, static_cast<T>(max + log_sum)};
}

}  // namespace lmhead
