// One token row against single columns of the head: for candidate sets and selected ids, where a GEMM has
// nothing to share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cpu/rows.h"

namespace lmhead {

/// Dot product over 16 interleaved partial sums: a fixed order that every SIMD width can keep.
template <class T>
T dot(const T* x, const T* w, std::int64_t h) {
  T lane[16] = {};
  std::int64_t k = 0;
  for (; k + 16 <= h; k += 16)
    for (int l = 0; l < 16; ++l) lane[l] += x[k + l] * w[k + l];
  for (int l = 0; k < h; ++k, ++l) lane[l] += x[k] * w[k];
  for (int width = 8; width > 0; width /= 2)
    for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
  return lane[0];
}

/// T is fp32, or fp64 for fp64 problems. One object a thread.
template <class T>
class HeadRow {
 public:
  explicit HeadRow(const ResolvedProblem& r)
      : r_(r), x_(static_cast<std::size_t>(r.h)), w_(x_.size()), exact_row_(x_.size()) {}

  void load(std::int64_t i) {
    fetch(r_.given.hidden, i, x_);
    t_ = static_cast<T>(temperature(r_, i));
  }
  /// Whether a global id is a valid column of this shard.
  bool here(std::int64_t id) const { return id >= r_.given.vocab_start && id < r_.given.vocab_start + r_.v_valid; }
  /// z in nats of a global id that is here(); leaves its weight row in w().
  T logit(std::int64_t id) {
    const Problem& p = r_.given;
    const std::int64_t j = id - p.vocab_start;
    fetch(p.weight, j, w_);
    T raw = dot(x_.data(), w_.data(), r_.h);
    if (!p.bias.absent()) raw += static_cast<T>(load_float(p.bias, j));
    raw *= static_cast<T>(p.logit_scale);
    if (p.softcap) raw = static_cast<T>(*p.softcap) * std::tanh(raw / static_cast<T>(*p.softcap));
    return raw / t_;
  }
  /// dz / d<x, w> at z.
  T slope(T z) const {
    const Problem& p = r_.given;
    const T saturation = p.softcap ? z * t_ / static_cast<T>(*p.softcap) : T(0);
    return static_cast<T>(p.logit_scale) / t_ * (T(1) - saturation * saturation);
  }
  const std::vector<T>& x() const { return x_; }
  const std::vector<T>& w() const { return w_; }

 private:
  void fetch(const ConstMatrix& m, std::int64_t row, std::vector<T>& out) {
    if (m.dtype == DType::kBFloat16 && r_.compute != DType::kFloat16) {
      const auto* bits = reinterpret_cast<const std::uint16_t*>(row_data(m, row));
      for (std::size_t k = 0; k < out.size(); ++k) out[k] = static_cast<T>(bf16_to_float(bits[k]));
    } else if (m.dtype == DType::kFloat32 && r_.compute == DType::kFloat32) {
      const auto* values = reinterpret_cast<const float*>(row_data(m, row));
      std::copy(values, values + out.size(), out.begin());
    } else {
      load_row(m, row, r_.compute, exact_row_.data());
      for (std::size_t k = 0; k < out.size(); ++k) out[k] = static_cast<T>(exact_row_[k]);
    }
  }

  const ResolvedProblem& r_;
  T t_ = 1;
  std::vector<T> x_, w_;
  std::vector<double> exact_row_;
};

}  // namespace lmhead
