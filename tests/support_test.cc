// Candidate sets and selected ids against a dense fp64 reference: values, gradients, shards, budgets, errors.
#include "lmhead/selected.h"
#include "lmhead/support.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/element.h"

namespace lmhead {
namespace {

struct Case {
  DType dtype = DType::kFloat32;
  std::int64_t n = 13, h = 48, v = 320, k = 8;
  double temperature = 0.7;
  std::optional<double> softcap;
  double scale = 1.0;
  bool bias = false;
};

/// Owns the buffers of one problem. Rows: 0 empty set, 1 sampled id outside its set, 2 all duplicates,
/// 3 ignored with NaN hidden, the rest random with padding and duplicates.
struct Data {
  explicit Data(const Case& c, unsigned seed = 1) : spec(c) {
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
    }
  }

  SupportProblem problem(std::int64_t begin = 0, std::int64_t end = -1) const {
    if (end < 0) end = spec.v;
    SupportProblem p;
    p.head.hidden = {hidden.data(), spec.n, spec.h, spec.h, spec.dtype};
    p.head.weight = {weight.data() + static_cast<std::size_t>(begin * spec.h) * size_of(spec.dtype), end - begin,
                     spec.h, spec.h, spec.dtype};
    if (spec.bias)
      p.head.bias = {bias.data() + static_cast<std::size_t>(begin) * size_of(spec.dtype), end - begin, 1, spec.dtype};
    p.head.targets = {targets.data(), spec.n, 1, DType::kInt64};
    p.head.vocab_start = begin;
    p.head.vocab_size = spec.v;
    p.head.temperature = spec.temperature;
    p.head.logit_scale = spec.scale;
    p.head.softcap = spec.softcap;
    p.head.entropy = EntropyMode::kGrad;
    p.support_ids = {ids.data(), spec.n, spec.k, spec.k, DType::kInt32};
    return p;
  }

  Case spec;
  DType result;
  std::vector<std::byte> hidden, weight, bias, dlogprob, dentropy;
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> targets;
};

struct Results {
  explicit Results(const Data& d)
      : dtype(d.result),
        n(d.spec.n),
        h(d.spec.h),
        v(d.spec.v),
        size(size_of(dtype)),
        logprob(bytes(n)),
        entropy(bytes(n)),
        lse(bytes(n)),
        valid(static_cast<std::size_t>(n)),
        dx(bytes(n * h)),
        dw(bytes(v * h)),
        db(bytes(v)) {}
  std::vector<std::byte> bytes(std::int64_t count) const {
    return std::vector<std::byte>(static_cast<std::size_t>(count) * size, std::byte{0xff});
  }
  Vector vector(std::vector<std::byte>& b) const {
    return {b.data(), static_cast<std::int64_t>(b.size() / size), 1, dtype};
  }
  ConstVector cvector(const std::vector<std::byte>& b) const {
    return {b.data(), static_cast<std::int64_t>(b.size() / size), 1, dtype};
  }
  double at(const std::vector<std::byte>& b, std::int64_t i) const { return load_float(b.data(), dtype, i); }

  DType dtype;
  std::int64_t n, h, v;
  std::size_t size;
  std::vector<std::byte> logprob, entropy, lse, valid, dx, dw, db;
};

Status run(const Data& d, Results& out, const Execution& e = {}) {
  const SupportProblem p = d.problem();
  LMHEAD_RETURN_IF_ERROR(support_forward(p,
                                         {out.vector(out.logprob),
                                          out.vector(out.entropy),
                                          out.vector(out.lse),
                                          {out.valid.data(), out.n, 1, DType::kBool}},
                                         e));
  // Gradients in fp32 buffers also for 16-bit inputs, to compare with fp64.
  return support_backward(
      p, {out.cvector(out.lse), out.cvector(out.entropy), out.cvector(d.dlogprob), out.cvector(d.dentropy)},
      {{out.dx.data(), out.n, out.h, out.h, out.dtype},
       {out.dw.data(), out.v, out.h, out.h, out.dtype},
       d.spec.bias ? out.vector(out.db) : Vector{}},
      e);
}

/// The definition, dense and in fp64.
struct Dense {
  std::vector<double> logprob, entropy, dx, dw, db;
  explicit Dense(const Data& d) {
    const Case& c = d.spec;
    const auto n = static_cast<std::size_t>(c.n), h = static_cast<std::size_t>(c.h), v = static_cast<std::size_t>(c.v);
    logprob.resize(n);
    entropy.resize(n);
    dx.resize(n * h);
    dw.resize(v * h);
    db.resize(v);
    for (std::int64_t i = 0; i < c.n; ++i) {
      const auto ui = static_cast<std::size_t>(i);
      const std::int64_t y = d.targets[ui];
      std::set<std::int32_t> set(d.ids.begin() + i * c.k, d.ids.begin() + (i + 1) * c.k);
      set.erase(-1);
      if (set.empty() || y == -100) continue;
      std::vector<double> z(v), slope(v);
      for (std::size_t j = 0; j < v; ++j) {
        double r = 0;
        for (std::size_t k = 0; k < h; ++k)
          r += load_float(d.hidden.data(), c.dtype, static_cast<std::int64_t>(ui * h + k)) *
               load_float(d.weight.data(), c.dtype, static_cast<std::int64_t>(j * h + k));
        if (c.bias) r += load_float(d.bias.data(), c.dtype, static_cast<std::int64_t>(j));
        r *= c.scale;
        const double t = c.softcap ? std::tanh(r / *c.softcap) : 0;
        z[j] = (c.softcap ? *c.softcap * t : r) / c.temperature;
        slope[j] = c.scale / c.temperature * (1 - t * t);
      }
      double max = -INFINITY, sum = 0;
      for (auto j : set) max = std::max(max, z[static_cast<std::size_t>(j)]);
      for (auto j : set) sum += std::exp(z[static_cast<std::size_t>(j)] - max);
      const double lse = max + std::log(sum);
      logprob[ui] = z[static_cast<std::size_t>(y)] - lse;
      for (auto j : set) {
        const double lp = z[static_cast<std::size_t>(j)] - lse;
        entropy[ui] -= std::exp(lp) * lp;
      }
      const double a = load_float(d.dlogprob.data(), d.result, i), g = load_float(d.dentropy.data(), d.result, i);
      set.insert(static_cast<std::int32_t>(y));
      for (auto id : set) {
        const auto j = static_cast<std::size_t>(id);
        const bool member = std::count(d.ids.begin() + i * c.k, d.ids.begin() + (i + 1) * c.k, id) != 0;
        const double lp = z[j] - lse, p = member ? std::exp(lp) : 0;
        const double dl = (a * ((id == y) - p) - g * p * (lp + entropy[ui])) * slope[j];
        db[j] += dl;
        for (std::size_t k = 0; k < h; ++k) {
          dx[ui * h + k] += dl * load_float(d.weight.data(), c.dtype, static_cast<std::int64_t>(j * h + k));
          dw[j * h + k] += dl * load_float(d.hidden.data(), c.dtype, static_cast<std::int64_t>(ui * h + k));
        }
      }
    }
  }
};

void expect_close(const Results& r, const std::vector<std::byte>& got, const std::vector<double>& want, double rtol,
                  double atol, const std::string& what) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double x = r.at(got, static_cast<std::int64_t>(i));
    ASSERT_TRUE(std::abs(x - want[i]) <= rtol * std::abs(want[i]) + atol)
        << what << "[" << i << "] = " << x << ", expected " << want[i];
  }
}

class SupportValues : public testing::TestWithParam<std::tuple<DType, std::int64_t>> {};

TEST_P(SupportValues, MatchTheDenseDefinition) {
  for (int variant = 0; variant < 3; ++variant) {
    Case c;
    std::tie(c.dtype, c.k) = GetParam();
    c.v = c.k > 320 ? 2048 : 320;
    if (variant == 1) c.softcap = 5.0, c.scale = 0.5, c.bias = true;
    if (variant == 2) c.h = 37, c.v += 1, c.temperature = 1.0;
    const Data d(c);
    const Dense want(d);
    Results got(d);
    const Status status = run(d, got);
    ASSERT_TRUE(status.ok()) << status.to_string();
    const std::string name =
        std::string(to_string(c.dtype)) + " K=" + std::to_string(c.k) + " variant " + std::to_string(variant);
    // fp32 arithmetic on the given values for every input type.
    const double tight = c.dtype == DType::kFloat64 ? 1e-11 : 1e-5, floor = c.dtype == DType::kFloat64 ? 1e-11 : 4e-6;
    expect_close(got, got.logprob, want.logprob, tight, floor, name + " logprob");
    expect_close(got, got.entropy, want.entropy, tight, floor, name + " entropy");
    expect_close(got, got.dx, want.dx, tight, 2 * floor, name + " dX");
    expect_close(got, got.dw, want.dw, tight, 2 * floor, name + " dW");
    if (c.bias) expect_close(got, got.db, want.db, tight, 2 * floor, name + " db");
    for (std::int64_t i = 0; i < c.n; ++i) {
      EXPECT_EQ(got.valid[static_cast<std::size_t>(i)] != std::byte{0}, i != 0 && i != 3) << "row " << i;
      EXPECT_GE(got.at(got.entropy, i), 0.0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SupportValues,
                         testing::Combine(testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                                          DType::kFloat64),
                                          testing::Values(1, 8, 64, 1024)),
                         [](const auto& test) {
                           return std::string(to_string(std::get<0>(test.param))) + "_K" +
                                  std::to_string(std::get<1>(test.param));
                         });

TEST(Selected, LogitsOverShardsMinusLse) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Case c;
    c.dtype = dtype;
    c.bias = true;
    c.softcap = 6.0;
    Data d(c);
    std::vector<std::int64_t> ids(d.ids.begin(), d.ids.end());  // int64, as torch.topk gives them
    const Problem whole = d.problem().head;
    const auto n = static_cast<std::size_t>(c.n), k = static_cast<std::size_t>(c.k);
    Results out(d);
    Problem metric = whole;
    metric.entropy = EntropyMode::kOff;
    ASSERT_TRUE(forward(metric, {out.vector(out.logprob), {}, out.vector(out.lse)}).ok());
    // One forward a column gives the expected numbers.
    std::vector<double> want(n * k);
    std::vector<std::int64_t> column(n);
    for (std::size_t j = 0; j < k; ++j) {
      for (std::size_t i = 0; i < n; ++i)
        column[i] = ids[i * k + j] < 0 || d.targets[i] == -100 ? -100 : ids[i * k + j];
      Problem p = metric;
      p.targets.data = column.data();
      Results one(d);
      ASSERT_TRUE(forward(p, {one.vector(one.logprob), {}, {}}).ok());
      for (std::size_t i = 0; i < n; ++i) want[i * k + j] = one.at(one.logprob, static_cast<std::int64_t>(i));
    }
    for (const std::vector<std::int64_t>& cuts : {std::vector<std::int64_t>{0, c.v}, {0, 40, 40, c.v}}) {
      const auto shards = cuts.size() - 1;
      std::vector<std::byte> logits(shards * n * k * out.size), selected(n * k * out.size, std::byte{0xff});
      for (std::size_t s = 0; s < shards; ++s) {
        SelectedProblem p{d.problem(cuts[s], cuts[s + 1]).head, {ids.data(), c.n, c.k, c.k, DType::kInt64}};
        ASSERT_TRUE(selected_logits(p, {logits.data() + s * n * k * out.size, c.n, c.k, c.k, out.dtype}).ok());
      }
      const SelectedProblem p{metric, {ids.data(), c.n, c.k, c.k, DType::kInt64}};
      ASSERT_TRUE(selected_combine(p, {logits.data(), static_cast<std::int64_t>(shards * n), c.k, c.k, out.dtype},
                                   out.cvector(out.lse), out.cvector(out.logprob),
                                   {selected.data(), c.n, c.k, c.k, out.dtype})
                      .ok());
      const double tolerance = dtype == DType::kFloat64 ? 1e-12 : 4e-6;
      for (std::size_t e = 0; e < n * k; ++e) {
        const double got = load_float(selected.data(), out.dtype, static_cast<std::int64_t>(e));
        EXPECT_TRUE(std::abs(got - want[e]) <= tolerance) << e << ": " << got << ", expected " << want[e];
        if (ids[e] == d.targets[e / k]) {
          EXPECT_EQ(got, out.at(out.logprob, static_cast<std::int64_t>(e / k)));
        }
      }
    }
  }
}

// Gradients of a loss over selected log-probs, the target's and the entropy: every backend against central sums
// of the definition in fp64.
TEST(Selected, GradientsAreThoseOfTheDenseDefinition) {
  for (const char* backend : {"reference", "cpu"})
    for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
      if (dtype == DType::kFloat64 && std::string(backend) == "cpu") continue;
      for (bool capped : {false, true}) {
        Case c;
        c.dtype = dtype;
        c.v = 1500;  // more than one tile
        c.bias = true;
        if (capped) c.softcap = 6.0, c.scale = 0.8;
        Data d(c);
        Problem p = d.problem().head;
        p.vocab_start = 0;
        Execution e;
        e.backend = backend;
        Results out(d);
        ASSERT_TRUE(forward(p, {out.vector(out.logprob), out.vector(out.entropy), out.vector(out.lse)}, e).ok());
        // Slots: the row's ids (with repeats and padding), then its target.
        const std::int64_t k = c.k + 1;
        std::vector<std::int64_t> ids(static_cast<std::size_t>(c.n * k));
        std::vector<std::byte> upstream = out.bytes(c.n * k), logits = out.bytes(c.n * k), total = out.bytes(c.n);
        std::mt19937 rng(5);
        std::normal_distribution<double> normal;
        for (std::int64_t i = 0; i < c.n; ++i) {
          double sum = 0;
          for (std::int64_t j = 0; j < k; ++j) {
            const auto at = static_cast<std::size_t>(i * k + j);
            ids[at] = j == c.k ? d.targets[static_cast<std::size_t>(i)] : d.ids[static_cast<std::size_t>(i * c.k + j)];
            if (i == 5 && j == 2) ids[at] = 7;
            double s = i == 5 ? (j == 0 ? 1.0 : j == 2 ? -1.0 : 0.0) : normal(rng);  // row 5: total exactly 0
            if (ids[at] == -1) s = 0;
            store_float(upstream.data(), out.dtype, i * k + j, s);
            sum += out.at(upstream, i * k + j);
          }
          store_float(total.data(), out.dtype, i, sum);
        }
        for (auto& id : ids) id = id == -100 ? -1 : id;
        store_float(d.dentropy.data(), d.result, 5, 0);  // nothing but its selected ids moves row 5
        const ConstMatrix id_matrix{ids.data(), c.n, k, k, DType::kInt64};
        ASSERT_TRUE(selected_logits({p, id_matrix}, {logits.data(), c.n, k, k, out.dtype}).ok());
        BackwardInputs in{
            out.cvector(out.lse), out.cvector(out.entropy), out.cvector(total), out.cvector(d.dentropy), {}};
        in.selected = {id_matrix, {logits.data(), c.n, k, k, out.dtype}, {upstream.data(), c.n, k, k, out.dtype}};
        ASSERT_TRUE(lmhead::backward(p, in,
                                     {{out.dx.data(), c.n, c.h, c.h, out.dtype},
                                      {out.dw.data(), c.v, c.h, c.h, out.dtype},
                                      out.vector(out.db)},
                                     e)
                        .ok());

        std::vector<double> dx(static_cast<std::size_t>(c.n * c.h)), dw(static_cast<std::size_t>(c.v * c.h));
        for (std::int64_t i = 0; i < c.n; ++i) {
          if (d.targets[static_cast<std::size_t>(i)] == -100) continue;
          std::vector<double> z(static_cast<std::size_t>(c.v)), slope(z.size());
          double max = -INFINITY, sum = 0, entropy = 0, a = 0;
          for (std::int64_t j = 0; j < c.v; ++j) {
            double r = load_float(d.bias.data(), dtype, j);
            for (std::int64_t h = 0; h < c.h; ++h)
              r += load_float(d.hidden.data(), dtype, i * c.h + h) * load_float(d.weight.data(), dtype, j * c.h + h);
            r *= c.scale;
            const double t = c.softcap ? std::tanh(r / *c.softcap) : 0;
            z[static_cast<std::size_t>(j)] = (c.softcap ? *c.softcap * t : r) / c.temperature;
            slope[static_cast<std::size_t>(j)] = c.scale / c.temperature * (1 - t * t);
            max = std::max(max, z[static_cast<std::size_t>(j)]);
          }
          for (double v : z) sum += std::exp(v - max);
          const double lse = max + std::log(sum), g = load_float(d.dentropy.data(), d.result, i);
          for (double v : z) entropy -= std::exp(v - lse) * (v - lse);
          for (std::int64_t j = 0; j < k; ++j) a += out.at(upstream, i * k + j);
          for (std::int64_t j = 0; j < c.v; ++j) {
            double s = 0;
            for (std::int64_t slot = 0; slot < k; ++slot)
              if (ids[static_cast<std::size_t>(i * k + slot)] == j) s += out.at(upstream, i * k + slot);
            const double lp = z[static_cast<std::size_t>(j)] - lse, prob = std::exp(lp);
            const double dl = (s - a * prob - g * prob * (lp + entropy)) * slope[static_cast<std::size_t>(j)];
            for (std::int64_t h = 0; h < c.h; ++h) {
              dx[static_cast<std::size_t>(i * c.h + h)] += dl * load_float(d.weight.data(), dtype, j * c.h + h);
              dw[static_cast<std::size_t>(j * c.h + h)] += dl * load_float(d.hidden.data(), dtype, i * c.h + h);
            }
          }
        }
        const double rtol = dtype == DType::kFloat64 ? 1e-11 : 2e-5, atol = dtype == DType::kFloat64 ? 1e-11 : 1e-5;
        expect_close(out, out.dx, dx, rtol, atol, std::string(backend) + " dX");
        expect_close(out, out.dw, dw, rtol, atol, std::string(backend) + " dW");
      }
    }
}

TEST(Selected, BadInputNamesTheArgument) {
  const Data d(Case{});
  std::vector<std::int64_t> ids(d.ids.begin(), d.ids.end());
  std::vector<float> logits(ids.size());
  const Matrix out{logits.data(), 13, 8, 8, DType::kFloat32};
  SelectedProblem p{d.problem().head, {ids.data(), 13, 8, 8, DType::kInt16}};
  EXPECT_EQ(selected_logits(p, out).message(), "ids: expected int32 or int64, got int16");
  p.ids.dtype = DType::kInt64;
  ids[40] = 320;
  EXPECT_EQ(selected_logits(p, out).message(),
            "ids: expected ids in [0, 320) or -1 as padding, got 320 at row 5, column 0");
  ids[40] = -1;
  EXPECT_EQ(selected_logits(p, {logits.data(), 13, 7, 7, DType::kFloat32}).message(),
            "logits: expected [13, 8], got [13, 7]");
}

TEST(Support, ShardsGiveTheBitsOfOneRank) {
  for (std::int64_t v : {320, 321}) {
    Case c;
    c.v = v;
    const Data d(c);
    Results whole(d);
    ASSERT_TRUE(run(d, whole).ok());
    for (std::vector<std::int64_t> cuts :
         {std::vector<std::int64_t>{0, v / 2, v},
          {0, v / 8, v / 4, 3 * (v / 8), v / 2, 5 * (v / 8), 3 * (v / 4), 7 * (v / 8), v},
          {0, 7, 7, 100, v}}) {
      const std::int64_t shards = static_cast<std::int64_t>(cuts.size()) - 1;
      std::vector<float> states(static_cast<std::size_t>(shards * c.n * 4));
      std::vector<float> dx(static_cast<std::size_t>(c.n * c.h)), sum(dx.size());
      for (std::int64_t s = 0; s < shards; ++s) {
        const SupportProblem p = d.problem(cuts[static_cast<std::size_t>(s)], cuts[static_cast<std::size_t>(s) + 1]);
        ASSERT_TRUE(support_forward_partial(p, {states.data() + s * c.n * 4, c.n, 4, 4, DType::kFloat32}).ok());
      }
      Results got(d);
      ASSERT_TRUE(support_combine(d.problem(0, cuts[1]), {states.data(), shards * c.n, 4, 4, DType::kFloat32},
                                  {got.vector(got.logprob), got.vector(got.entropy), got.vector(got.lse), {}})
                      .ok());
      const bool equal_shards = v % 8 == 0 && shards != 4;
      if (equal_shards) {
        EXPECT_EQ(std::memcmp(got.logprob.data(), whole.logprob.data(), got.logprob.size()), 0) << v << " " << shards;
        EXPECT_EQ(std::memcmp(got.entropy.data(), whole.entropy.data(), got.entropy.size()), 0) << v << " " << shards;
      }
      for (std::int64_t i = 0; i < c.n; ++i) {
        EXPECT_TRUE(std::abs(got.at(got.logprob, i) - whole.at(whole.logprob, i)) <= 4e-6);
        EXPECT_TRUE(std::abs(got.at(got.entropy, i) - whole.at(whole.entropy, i)) <= 4e-6);
      }
      for (std::int64_t s = 0; s < shards; ++s) {
        const std::int64_t b = cuts[static_cast<std::size_t>(s)], e = cuts[static_cast<std::size_t>(s) + 1];
        std::vector<float> dw(static_cast<std::size_t>((e - b) * c.h));
        ASSERT_TRUE(
            support_backward(
                d.problem(b, e),
                {got.cvector(got.lse), got.cvector(got.entropy), got.cvector(d.dlogprob), got.cvector(d.dentropy)},
                {{dx.data(), c.n, c.h, c.h, DType::kFloat32}, {dw.data(), e - b, c.h, c.h, DType::kFloat32}, {}})
                .ok());
        for (std::size_t i = 0; i < dx.size(); ++i) sum[i] += dx[i];
        for (std::size_t i = 0; i < dw.size(); ++i)
          EXPECT_TRUE(std::abs(dw[i] - whole.at(whole.dw, b * c.h + static_cast<std::int64_t>(i))) <= 1e-5);
      }
      for (std::size_t i = 0; i < sum.size(); ++i)
        EXPECT_TRUE(std::abs(sum[i] - whole.at(whole.dx, static_cast<std::int64_t>(i))) <= 1e-5);
    }
  }
}

TEST(Support, BitsDependOnTheSetAlone) {
  Case c;
  c.n = 40;
  c.k = 16;
  Data d(c);
  Results want(d);
  ASSERT_TRUE(run(d, want).ok());
  // Threads, a tiny budget (one token row of positions at a time) and the order of the list.
  for (int threads : {1, 2, 3}) {
    Execution e;
    e.threads = threads;
    e.workspace_budget = threads == 3 ? 1 : 0;
    Results got(d);
    ASSERT_TRUE(run(d, got, e).ok());
    EXPECT_EQ(std::memcmp(got.dw.data(), want.dw.data(), got.dw.size()), 0) << threads;
    EXPECT_EQ(std::memcmp(got.dx.data(), want.dx.data(), got.dx.size()), 0) << threads;
  }
  for (std::int64_t i = 0; i < c.n; ++i) std::reverse(d.ids.begin() + i * c.k, d.ids.begin() + (i + 1) * c.k);
  Results got(d);
  ASSERT_TRUE(run(d, got).ok());
  EXPECT_EQ(std::memcmp(got.logprob.data(), want.logprob.data(), got.logprob.size()), 0);
  EXPECT_EQ(std::memcmp(got.entropy.data(), want.entropy.data(), got.entropy.size()), 0);
  EXPECT_EQ(std::memcmp(got.dw.data(), want.dw.data(), got.dw.size()), 0);
}

TEST(Support, WorkspaceQueryIsWhatTheBackwardUses) {
  const Data d(Case{});
  Results out(d);
  ASSERT_TRUE(run(d, out).ok());
  const SupportProblem p = d.problem();
  const BackwardOutputs gradients{
      {out.dx.data(), out.n, out.h, out.h, out.dtype}, {out.dw.data(), out.v, out.h, out.h, out.dtype}, {}};
  const BackwardInputs inputs{out.cvector(out.lse), out.cvector(out.entropy), out.cvector(d.dlogprob),
                              out.cvector(d.dentropy)};
  for (std::size_t budget : {std::size_t{1}, std::size_t{1} << 20}) {
    Execution e;
    e.workspace_budget = budget;
    const Result<WorkspaceSize> size = support_workspace_size(p, Operation::kBackward, gradients, e);
    ASSERT_TRUE(size.ok());
    std::vector<unsigned char> scratch(size->bytes + 64, 0xff);
    e.workspace = scratch.data();
    e.workspace_bytes = size->bytes;
    ASSERT_TRUE(support_backward(p, inputs, gradients, e).ok());
    for (std::size_t i = size->bytes; i < scratch.size(); ++i)
      ASSERT_EQ(scratch[i], 0xff) << "written past the workspace";
    e.workspace_bytes -= 1;
    EXPECT_EQ(support_backward(p, inputs, gradients, e).code(), StatusCode::kInvalidArgument);
  }
}

TEST(Support, BadInputNamesTheArgument) {
  const Data d(Case{});
  Results out(d);
  const auto message = [&](const SupportProblem& p) {
    return support_forward(p, {out.vector(out.logprob), {}, {}, {}}).message();
  };
  SupportProblem p = d.problem();
  p.support_ids.dtype = DType::kInt64;
  EXPECT_EQ(message(p), "support_ids: expected int32, got int64");
  p = d.problem();
  p.support_ids.rows = 3;
  EXPECT_EQ(message(p), "support_ids: expected [13, K], got [3, 8]");
  p = d.problem();
  p.head.out_of_vocab = OutOfVocab::kZero;
  EXPECT_NE(message(p).find("out_of_vocab"), std::string::npos);
  Data bad(Case{});
  bad.ids[static_cast<std::size_t>(5 * 8 + 2)] = 320;
  EXPECT_EQ(message(bad.problem()),
            "support_ids: expected ids in [0, 320) or -1 as padding, got 320 at row 5, column 2");
  bad.ids[static_cast<std::size_t>(5 * 8 + 2)] = -2;
  EXPECT_NE(message(bad.problem()).find("got -2 at row 5"), std::string::npos);
  Data sampled(Case{});
  sampled.targets[4] = 320;
  EXPECT_NE(message(sampled.problem()).find("targets: expected ids in [0, 320)"), std::string::npos);
  EXPECT_EQ(std::to_integer<int>(out.logprob[0]), 0xff) << "nothing is written on an error";
}

TEST(Support, UncheckedBadIdsMakeTheirRowNaNOnly) {
  Data d(Case{});
  Results want(d);
  ASSERT_TRUE(run(d, want).ok());
  d.ids[static_cast<std::size_t>(5 * 8 + 2)] = 1 << 30;
  d.targets[7] = 100000;
  Execution e;
  e.check = false;
  Results got(d);
  ASSERT_TRUE(run(d, got, e).ok());
  for (std::int64_t i = 0; i < d.spec.n; ++i) {
    if (i == 5 || i == 7) {
      EXPECT_TRUE(std::isnan(got.at(got.logprob, i))) << i;
    } else {
      EXPECT_EQ(got.at(got.logprob, i), want.at(want.logprob, i)) << i;
    }
  }
}

TEST(Support, AllPaddingGivesZeros) {
  Data d(Case{});
  std::fill(d.ids.begin(), d.ids.end(), -1);
  Results out(d);
  ASSERT_TRUE(run(d, out).ok());
  for (std::int64_t i = 0; i < d.spec.n; ++i) EXPECT_EQ(out.at(out.logprob, i), 0.0);
  for (std::int64_t i = 0; i < d.spec.v * d.spec.h; ++i) ASSERT_EQ(out.at(out.dw, i), 0.0);
}

}  // namespace
}  // namespace lmhead
