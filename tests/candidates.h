// Problems of candidate sets and of selected ids: data with teeth, placed on a backend's device, and results brought
// back. Used by support_test.cc and selected_test.cc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "lmhead/selected.h"
#include "lmhead/support.h"
#include "testing.h"

namespace lmhead::testing {

struct CandidateCase {
  DType dtype = DType::kFloat32;
  std::int64_t n = 13, h = 48, v = 320, k = 8;
  double temperature = 0.7;
  std::optional<double> softcap;
  double scale = 1.0;
  bool bias = false;
};

/// One problem on the host. Rows: 0 empty set, 1 sampled id outside its set, 2 all duplicates, 3 ignored with NaN
/// hidden, the rest random with padding and duplicates. The upstream gradient is 0 of row 6's logprob, of row 8's
/// entropy, and of both of row 9.
struct CandidateData {
  explicit CandidateData(const CandidateCase& c, unsigned seed = 1) : spec(c) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](std::vector<std::byte>& bytes, std::int64_t count, double scale) {
      bytes.resize(static_cast<std::size_t>(count) * size_of(c.dtype));
      for (std::int64_t i = 0; i < count; ++i) store_float(bytes.data(), c.dtype, i, normal(rng) * scale);
    };
    fill(hidden, c.n * c.h, 1.0);
    fill(weight, c.v * c.h, 3.0 / std::sqrt(static_cast<double>(c.h)));
    fill(bias, c.v, 1.0);
    ids.assign(static_cast<std::size_t>(c.n * c.k), -1);
    targets.resize(static_cast<std::size_t>(c.n));
    for (std::int64_t i = 0; i < c.n; ++i) {
      auto* row = ids.data() + i * c.k;
      for (std::int64_t k = 0; k < c.k; ++k)
        if (i != 0 && (k == 0 || rng() % 4 != 0))
          row[k] = static_cast<std::int32_t>(rng() % static_cast<unsigned>(c.v));
      if (i == 2) std::fill(row, row + c.k, 5);
      if (c.k > 2 && i > 3) row[1] = row[0];
      targets[static_cast<std::size_t>(i)] = i != 0 && c.k > 0 ? row[0] : 1;
    }
    if (c.n > 1 && c.k > 0) {
      std::int32_t outside = 0;
      while (std::count(ids.begin() + c.k, ids.begin() + 2 * c.k, outside) != 0) ++outside;
      targets[1] = outside;
    }
    if (c.n > 3) {
      targets[3] = -100;
      for (std::int64_t k = 0; k < c.h; ++k) store_float(hidden.data(), c.dtype, 3 * c.h + k, NAN);
    }
    result = c.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    for (auto* upstream : {&dlogprob, &dentropy}) {
      upstream->resize(static_cast<std::size_t>(c.n) * size_of(result));
      for (std::int64_t i = 0; i < c.n; ++i) store_float(upstream->data(), result, i, normal(rng));
      for (const std::int64_t i : {upstream == &dlogprob ? 6 : 8, 9})
        if (i < c.n) store_float(upstream->data(), result, i, 0.0);
    }
  }

  /// Element of hidden, weight or bias.
  double at(const std::vector<std::byte>& values, std::int64_t i) const {
    return load_float(values.data(), spec.dtype, i);
  }
  double upstream(const std::vector<std::byte>& values, std::int64_t i) const {
    return load_float(values.data(), result, i);
  }

  CandidateCase spec;
  DType result;
  std::vector<std::byte> hidden, weight, bias, dlogprob, dentropy;
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> targets;
};

template <class T>
std::vector<std::byte> as_bytes(const std::vector<T>& values) {
  const auto* begin = reinterpret_cast<const std::byte*>(values.data());
  return {begin, begin + values.size() * sizeof(T)};
}

/// Contiguous numbers on a device, NaN at first.
class Values {
 public:
  Values(Arena& arena, DType dtype, std::int64_t count)
      : dtype_(dtype), count_(count), buffer_(arena, static_cast<std::size_t>(count) * size_of(dtype)) {}
  Values(Arena& arena, DType dtype, const std::vector<std::byte>& content)
      : dtype_(dtype), count_(static_cast<std::int64_t>(content.size() / size_of(dtype))), buffer_(arena, content) {}

  Vector vector() const { return {buffer_.data(), count_, 1, dtype_}; }
  ConstVector view(std::int64_t begin = 0, std::int64_t count = -1) const {
    return {buffer_.data() + offset(begin), count < 0 ? count_ : count, 1, dtype_};
  }
  Matrix matrix(std::int64_t rows, std::int64_t cols, std::int64_t first_row = 0) const {
    return {buffer_.data() + offset(first_row * cols), rows, cols, cols, dtype_};
  }
  ConstMatrix rows(std::int64_t rows, std::int64_t cols, std::int64_t first_row = 0) const {
    return {buffer_.data() + offset(first_row * cols), rows, cols, cols, dtype_};
  }
  std::vector<std::byte> bytes() const {
    EXPECT_TRUE(buffer_.guards_intact()) << "memory around a result was written";
    return buffer_.download();
  }
  std::vector<double> numbers() const {
    const std::vector<std::byte> content = bytes();
    std::vector<double> numbers(static_cast<std::size_t>(count_));
    for (std::int64_t i = 0; i < count_; ++i)
      numbers[static_cast<std::size_t>(i)] = load_float(content.data(), dtype_, i);
    return numbers;
  }

 private:
  std::size_t offset(std::int64_t elements) const { return static_cast<std::size_t>(elements) * size_of(dtype_); }
  DType dtype_;
  std::int64_t count_;
  Buffer buffer_;
};

/// The inputs on a device.
struct PlacedCandidates {
  PlacedCandidates(Arena& arena, const CandidateData& d)
      : spec(d.spec),
        hidden(arena, d.spec.dtype, d.hidden),
        weight(arena, d.spec.dtype, d.weight),
        bias(arena, d.spec.dtype, d.bias),
        dlogprob(arena, d.result, d.dlogprob),
        dentropy(arena, d.result, d.dentropy),
        ids(arena, DType::kInt32, as_bytes(d.ids)),
        targets(arena, DType::kInt64, as_bytes(d.targets)) {}

  /// The shard [begin, end) of the vocabulary; all of it by default.
  SupportProblem problem(std::int64_t begin = 0, std::int64_t end = -1) const {
    if (end < 0) end = spec.v;
    SupportProblem p;
    p.head.hidden = hidden.rows(spec.n, spec.h);
    p.head.weight = weight.rows(end - begin, spec.h, begin);
    if (spec.bias) p.head.bias = bias.view(begin, end - begin);
    p.head.targets = targets.view();
    p.head.vocab_start = begin;
    p.head.vocab_size = spec.v;
    p.head.temperature = spec.temperature;
    p.head.logit_scale = spec.scale;
    p.head.softcap = spec.softcap;
    p.head.entropy = EntropyMode::kGrad;
    p.support_ids = ids.rows(spec.n, spec.k);
    return p;
  }

  CandidateCase spec;
  Values hidden, weight, bias, dlogprob, dentropy, ids, targets;
};

/// Results of a forward and a backward, gradients in fp32 also for 16-bit inputs, to compare with fp64.
struct CandidateResults {
  CandidateResults(Arena& arena, const CandidateData& d)
      : logprob(arena, d.result, d.spec.n),
        entropy(arena, d.result, d.spec.n),
        lse(arena, d.result, d.spec.n),
        valid(arena, DType::kBool, d.spec.n),
        dx(arena, d.result, d.spec.n * d.spec.h),
        dw(arena, d.result, d.spec.v * d.spec.h),
        db(arena, d.result, d.spec.v),
        spec(d.spec) {}
  BackwardOutputs gradients() const {
    return {dx.matrix(spec.n, spec.h), dw.matrix(spec.v, spec.h), spec.bias ? db.vector() : Vector{}};
  }
  BackwardInputs inputs(const PlacedCandidates& p) const {
    return {lse.view(), entropy.view(), p.dlogprob.view(), p.dentropy.view(), {}};
  }

  Values logprob, entropy, lse, valid, dx, dw, db;
  CandidateCase spec;
};

/// Tests of one backend: its execution, and calls with the workspace they ask for.
class CandidateTest : public BackendTest {
 protected:
  Execution execution() const { return execution_on(backend()); }
  static Execution execution_on(const BackendInfo& backend) {
    Execution e;
    e.backend = backend.name.c_str();
    e.device = backend.device;
    e.check = true;
    return e;
  }
  /// fn(execution) with a poisoned workspace of exactly the size asked for; on the CPU the call allocates its own.
  template <class Fn>
  static Status with_workspace(Execution e, const Result<WorkspaceSize>& size, Fn&& fn) {
    if (!size.ok()) return size.status();
    if (e.device == Device::kCpu) return fn(e);
    const Buffer workspace(arena(e.device), size->bytes);
    e.workspace = workspace.data();
    e.workspace_bytes = size->bytes;
    const Status status = fn(e);
    EXPECT_TRUE(workspace.guards_intact()) << "written past the workspace";
    return status;
  }
};

inline void expect_close(const std::vector<double>& got, const std::vector<double>& want, double rtol, double atol,
                         const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (std::size_t i = 0; i < want.size(); ++i)
    ASSERT_TRUE(std::abs(got[i] - want[i]) <= rtol * std::abs(want[i]) + atol)
        << what << "[" << i << "] = " << got[i] << ", expected " << want[i];
}

}  // namespace lmhead::testing
