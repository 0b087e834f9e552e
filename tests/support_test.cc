// Candidate sets on every backend that has them, against a dense fp64 reference: values, gradients, shards, budgets,
// errors.
#include <atomic>
#include <new>
#include <set>
#include <tuple>

#include "candidates.h"
#include "core/return_if_error.h"
#include "cpu/parallel.h"

namespace lmhead {
namespace {

using testing::Buffer;
using testing::expect_close;
using testing::Values;
using Case = testing::CandidateCase;
using Data = testing::CandidateData;
using Placed = testing::PlacedCandidates;
using Results = testing::CandidateResults;

/// The names that candidate sets run under; "reference" and "sm90" leave them to these.
std::vector<BackendInfo> candidate_backends() {
  std::vector<BackendInfo> chosen;
  for (const BackendInfo& backend : testing::available_backends())
    if (backend.name == "cpu" || backend.name == "cuda_portable") chosen.push_back(backend);
  return chosen;
}

class SupportTest : public testing::CandidateTest {
 protected:
  static Status support_run(const Placed& placed, const Results& out, const Execution& e) {
    const SupportProblem p = placed.problem();
    LMHEAD_RETURN_IF_ERROR(
        with_workspace(e, support_workspace_size(p, Operation::kForward, {}, e), [&](const Execution& with) {
          return support_forward(p, {out.logprob.vector(), out.entropy.vector(), out.lse.vector(), out.valid.vector()},
                                 with);
        }));
    const BackwardOutputs gradients = out.gradients();
    return with_workspace(e, support_workspace_size(p, Operation::kBackward, gradients, e), [&](const Execution& with) {
      return support_backward(p, out.inputs(placed), gradients, with);
    });
  }
  /// The message of a forward that must fail before it writes.
  std::string message(const SupportProblem& p, const Results& out, std::optional<bool> check = true) const {
    Execution e = execution();
    e.check = check;
    const Status status =
        with_workspace(e, support_workspace_size(p, Operation::kForward, {}, e), [&](const Execution& with) {
          return support_forward(p, {out.logprob.vector(), {}, {}, {}}, with);
        });
    EXPECT_EQ(std::to_integer<int>(out.logprob.bytes()[0]), 0xff) << "written despite " << status.to_string();
    return status.message();
  }
};

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
          r += d.at(d.hidden, static_cast<std::int64_t>(ui * h + k)) *
               d.at(d.weight, static_cast<std::int64_t>(j * h + k));
        if (c.bias) r += d.at(d.bias, static_cast<std::int64_t>(j));
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
      const double a = d.upstream(d.dlogprob, i), g = d.upstream(d.dentropy, i);
      const std::set<std::int32_t> members = set;
      set.insert(static_cast<std::int32_t>(y));
      for (auto id : set) {
        const auto j = static_cast<std::size_t>(id);
        const double lp = z[j] - lse, p = members.count(id) != 0 ? std::exp(lp) : 0;
        const double dl = (a * ((id == y) - p) - g * p * (lp + entropy[ui])) * slope[j];
        db[j] += dl;
        for (std::size_t k = 0; k < h; ++k) {
          dx[ui * h + k] += dl * d.at(d.weight, static_cast<std::int64_t>(j * h + k));
          dw[j * h + k] += dl * d.at(d.hidden, static_cast<std::int64_t>(ui * h + k));
        }
      }
    }
  }
};

TEST_P(SupportTest, ValuesAndGradientsMatchTheDenseDefinition) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64})
    for (const std::int64_t k : {1, 8, 64, 1024})
      for (int variant = 0; variant < 3; ++variant) {
        Case c;
        c.dtype = dtype;
        c.k = k;
        c.v = k > 320 ? 2048 : 320;
        if (variant == 1) c.softcap = 5.0, c.scale = 0.5, c.bias = true;
        if (variant == 2) c.h = 37, c.v += 1, c.temperature = 1.0;
        const Data d(c);
        const Placed placed(memory(), d);
        const Results got(memory(), d);
        const Status status = support_run(placed, got, execution());
        if (dtype == DType::kFloat64 && backend().name == "cuda_portable") {
          EXPECT_EQ(status.to_string(),
                    "unsupported: hidden: candidate sets on CUDA expected float32, bfloat16 or float16, got float64");
          continue;
        }
        ASSERT_TRUE(status.ok()) << status.to_string();
        const Dense want(d);
        const std::string name =
            std::string(to_string(dtype)) + " K=" + std::to_string(k) + " variant " + std::to_string(variant);
        // fp32 arithmetic on the given values for every input type.
        const double tight = dtype == DType::kFloat64 ? 1e-11 : 1e-5, floor = dtype == DType::kFloat64 ? 1e-11 : 4e-6;
        expect_close(got.logprob.numbers(), want.logprob, tight, floor, name + " logprob");
        expect_close(got.entropy.numbers(), want.entropy, tight, floor, name + " entropy");
        expect_close(got.dx.numbers(), want.dx, tight, 2 * floor, name + " dX");
        expect_close(got.dw.numbers(), want.dw, tight, 2 * floor, name + " dW");
        if (c.bias) expect_close(got.db.numbers(), want.db, tight, 2 * floor, name + " db");
        const std::vector<std::byte> valid = got.valid.bytes();
        const std::vector<double> entropy = got.entropy.numbers();
        for (std::int64_t i = 0; i < c.n; ++i) {
          EXPECT_EQ(valid[static_cast<std::size_t>(i)], i != 0 && i != 3 ? std::byte{1} : std::byte{0}) << "row " << i;
          EXPECT_GE(entropy[static_cast<std::size_t>(i)], 0.0);
        }
      }
}

// The entropy of a set of one is 0 and of equal logits log K, whatever the logits' size.
TEST_P(SupportTest, LargeLogitsKeepTheEntropy) {
  Case c;
  c.temperature = 1.0;
  Data d(c);
  const auto fill = [&](std::vector<std::byte>& values, double x) {
    for (std::size_t i = 0; i < values.size() / 4; ++i)
      store_float(values.data(), c.dtype, static_cast<std::int64_t>(i), x);
  };
  fill(d.hidden, 5.0);
  fill(d.weight, 5.0);  // every logit 48 * 25 = 1200
  std::fill(d.targets.begin(), d.targets.end(), 1);
  std::fill(d.ids.begin(), d.ids.end(), -1);
  for (std::int64_t i = 0; i < c.n; ++i)
    for (std::int64_t k = 0; k <= i % c.k; ++k) d.ids[static_cast<std::size_t>(i * c.k + k)] = static_cast<int>(k + 1);
  const Results got(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), got, execution()).ok());
  const std::vector<double> logprob = got.logprob.numbers(), entropy = got.entropy.numbers();
  for (std::int64_t i = 0; i < c.n; ++i) {
    const double want = std::log(static_cast<double>(i % c.k + 1));
    EXPECT_NEAR(entropy[static_cast<std::size_t>(i)], want, 1e-6);
    EXPECT_NEAR(logprob[static_cast<std::size_t>(i)], -want, 2e-4);  // half an ulp of 1200
  }
}

TEST_P(SupportTest, MaskedRowsAreNotRead) {
  Data d(Case{});
  const Results want(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), want, execution()).ok());
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(d.spec.n), 1);
  mask[6] = 0;
  for (std::int64_t k = 0; k < d.spec.h; ++k) store_float(d.hidden.data(), d.spec.dtype, 6 * d.spec.h + k, NAN);
  d.ids[static_cast<std::size_t>(6 * d.spec.k)] = 1 << 30;
  d.targets[6] = -7;
  const Placed placed(memory(), d);
  const Buffer active(memory(), testing::as_bytes(mask));
  SupportProblem p = placed.problem();
  p.head.active = {active.data(), d.spec.n, 1, DType::kUInt8};
  const Results got(memory(), d);
  const Execution e = execution();
  ASSERT_TRUE(with_workspace(e, support_workspace_size(p, Operation::kForward, {}, e), [&](const Execution& with) {
                return support_forward(
                    p, {got.logprob.vector(), got.entropy.vector(), got.lse.vector(), got.valid.vector()}, with);
              }).ok());
  const BackwardOutputs gradients = got.gradients();
  ASSERT_TRUE(with_workspace(e, support_workspace_size(p, Operation::kBackward, gradients, e), [&](const Execution& w) {
                return support_backward(p, got.inputs(placed), gradients, w);
              }).ok());
  std::vector<double> logprob = want.logprob.numbers(), entropy = want.entropy.numbers(), dx = want.dx.numbers();
  logprob[6] = entropy[6] = 0;
  std::fill_n(dx.begin() + 6 * d.spec.h, d.spec.h, 0.0);
  EXPECT_EQ(got.logprob.numbers(), logprob);
  EXPECT_EQ(got.entropy.numbers(), entropy);
  EXPECT_EQ(got.dx.numbers(), dx);
  EXPECT_EQ(got.valid.bytes()[6], std::byte{0});
  for (const double x : got.dw.numbers()) ASSERT_TRUE(std::isfinite(x));
}

TEST_P(SupportTest, ShardsJoinToOneRank) {
  for (const std::int64_t v : {320, 321}) {
    Case c;
    c.v = v;
    const Data d(c);
    const Placed placed(memory(), d);
    const Results whole(memory(), d);
    const Execution e = execution();
    ASSERT_TRUE(support_run(placed, whole, e).ok());
    const std::vector<double> logprob = whole.logprob.numbers(), entropy = whole.entropy.numbers(),
                              dx = whole.dx.numbers(), dw = whole.dw.numbers();
    for (const std::vector<std::int64_t>& cuts :
         {std::vector<std::int64_t>{0, v / 2, v},
          {0, v / 8, v / 4, 3 * (v / 8), v / 2, 5 * (v / 8), 3 * (v / 4), 7 * (v / 8), v},
          {0, 7, 7, 100, v}}) {
      const std::int64_t shards = static_cast<std::int64_t>(cuts.size()) - 1;
      const auto shard = [&](std::int64_t s) {
        return placed.problem(cuts[static_cast<std::size_t>(s)], cuts[static_cast<std::size_t>(s) + 1]);
      };
      const Values states(memory(), DType::kFloat32, shards * c.n * kStateWidth);
      for (std::int64_t s = 0; s < shards; ++s) {
        const SupportProblem p = shard(s);
        ASSERT_TRUE(
            with_workspace(e, support_workspace_size(p, Operation::kForwardPartial, {}, e), [&](const Execution& with) {
              return support_forward_partial(p, states.matrix(c.n, kStateWidth, s * c.n), with);
            }).ok());
      }
      const Results got(memory(), d);
      ASSERT_TRUE(support_combine(shard(0), states.rows(shards * c.n, kStateWidth),
                                  {got.logprob.vector(), got.entropy.vector(), got.lse.vector(), {}}, e)
                      .ok());
      // Equal shards: the bits of one rank on the CPU; cuda_portable promises those of a repeated run only.
      const bool equal_bits = v % 8 == 0 && shards != 4 && backend().name == "cpu";
      expect_close(got.logprob.numbers(), logprob, 0, equal_bits ? 0 : 4e-6, "logprob");
      expect_close(got.entropy.numbers(), entropy, 0, equal_bits ? 0 : 4e-6, "entropy");
      std::vector<double> sum(dx.size());
      for (std::int64_t s = 0; s < shards; ++s) {
        const SupportProblem p = shard(s);
        const std::int64_t begin = p.head.vocab_start, rows = p.head.weight.rows;
        const Values part(memory(), DType::kFloat32, c.n * c.h), own(memory(), DType::kFloat32, rows * c.h);
        const BackwardOutputs gradients{part.matrix(c.n, c.h), own.matrix(rows, c.h), {}};
        ASSERT_TRUE(
            with_workspace(e, support_workspace_size(p, Operation::kBackward, gradients, e), [&](const Execution& w) {
              return support_backward(p, got.inputs(placed), gradients, w);
            }).ok());
        const std::vector<double> more = part.numbers();
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
        expect_close(own.numbers(), {dw.begin() + begin * c.h, dw.begin() + (begin + rows) * c.h}, 0, 1e-5, "dW");
      }
      expect_close(sum, dx, 0, 1e-5, "dX");
    }
  }
}

TEST_P(SupportTest, BitsRepeat) {
  Case c;
  c.n = 40;
  c.k = 16;
  Data d(c);
  const Results want(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), want, execution()).ok());
  // Threads, a tiny budget (one token row of positions at a time).
  for (int threads : {1, 2, 3}) {
    Execution e = execution();
    e.threads = threads;
    e.workspace_budget = threads == 3 ? 1 : 0;
    const Results got(memory(), d);
    ASSERT_TRUE(support_run(Placed(memory(), d), got, e).ok());
    EXPECT_EQ(got.dw.bytes(), want.dw.bytes()) << threads;
    EXPECT_EQ(got.dx.bytes(), want.dx.bytes()) << threads;
    EXPECT_EQ(got.logprob.bytes(), want.logprob.bytes()) << threads;
  }
  // The order of the list: no bit on the CPU, no more than rounding elsewhere.
  for (std::int64_t i = 0; i < c.n; ++i) std::reverse(d.ids.begin() + i * c.k, d.ids.begin() + (i + 1) * c.k);
  const Results got(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), got, execution()).ok());
  const double atol = backend().name == "cpu" ? 0 : 4e-6;
  expect_close(got.logprob.numbers(), want.logprob.numbers(), 0, atol, "logprob");
  expect_close(got.entropy.numbers(), want.entropy.numbers(), 0, atol, "entropy");
  expect_close(got.dw.numbers(), want.dw.numbers(), 0, 2 * atol, "dW");
}

TEST_P(SupportTest, WorkspaceQueryIsWhatTheBackwardUses) {
  const Data d(Case{});
  const Placed placed(memory(), d);
  const Results out(memory(), d);
  ASSERT_TRUE(support_run(placed, out, execution()).ok());
  const SupportProblem p = placed.problem();
  const BackwardOutputs gradients = out.gradients();
  for (const std::size_t budget : {std::size_t{1}, std::size_t{1} << 20}) {
    Execution e = execution();
    e.workspace_budget = budget;
    const Result<WorkspaceSize> size = support_workspace_size(p, Operation::kBackward, gradients, e);
    ASSERT_TRUE(size.ok());
    const Buffer scratch(memory(), size->bytes);
    e.workspace = scratch.data();
    e.workspace_bytes = size->bytes;
    ASSERT_TRUE(support_backward(p, out.inputs(placed), gradients, e).ok());
    EXPECT_TRUE(scratch.guards_intact()) << "written past the workspace";
    e.workspace_bytes -= 1;
    EXPECT_EQ(support_backward(p, out.inputs(placed), gradients, e).code(), StatusCode::kInvalidArgument);
  }
}

TEST_P(SupportTest, BadInputNamesTheArgument) {
  const Data d(Case{});
  const Placed placed(memory(), d);
  const Results out(memory(), d);
  SupportProblem p = placed.problem();
  p.support_ids.dtype = DType::kInt64;
  EXPECT_EQ(message(p, out), "support_ids: expected int32, got int64");
  p = placed.problem();
  p.support_ids.rows = 3;
  EXPECT_EQ(message(p, out), "support_ids: expected [13, K], got [3, 8]");
  p = placed.problem();
  p.support_ids.data = nullptr;
  EXPECT_EQ(message(p, out), "support_ids: expected data for [13, 8], got a null pointer");
  p = placed.problem();
  p.support_ids.data = static_cast<const std::byte*>(p.support_ids.data) + 1;
  EXPECT_EQ(message(p, out), "support_ids: expected data aligned to 4 bytes (int32), got an address 1 bytes past");
  p = placed.problem();
  p.head.out_of_vocab = OutOfVocab::kZero;
  EXPECT_EQ(message(p, out),
            "out_of_vocab: expected \"error\" with candidate sets, got \"zero\": a sampled id is always scored");
  Data bad(Case{});
  bad.ids[static_cast<std::size_t>(5 * 8 + 2)] = 320;
  EXPECT_EQ(message(Placed(memory(), bad).problem(), out),
            "support_ids: expected ids in [0, 320) or -1 as padding, got 320 at row 5, column 2");
  bad.ids[static_cast<std::size_t>(5 * 8 + 2)] = -2;
  EXPECT_EQ(message(Placed(memory(), bad).problem(), out),
            "support_ids: expected ids in [0, 320) or -1 as padding, got -2 at row 5, column 2");
  Data sampled(Case{});
  sampled.targets[4] = 320;
  EXPECT_NE(message(Placed(memory(), sampled).problem(), out).find("targets: expected ids in [0, 320)"),
            std::string::npos);
}

TEST(SupportMemory, ACallWithoutMemoryReportsIt) {
  const std::int64_t n = std::int64_t{1} << 59;  // 2^63 bytes of states, which no buffer can have
  float value = 0;
  std::int32_t target = 0;
  SupportProblem p;
  p.head.hidden = {&value, n, 1, 1, DType::kFloat32};
  p.head.weight = {&value, 1, 1, 1, DType::kFloat32};
  p.head.targets = {&target, n, 0, DType::kInt32};
  p.support_ids = {nullptr, n, 0, 0, DType::kInt32};
  Execution e;
  e.check = false;
  EXPECT_EQ(support_forward(p, {}, e).to_string(),
            "out of memory: memory: expected enough for support_forward, got an allocation that failed");
}

TEST(SupportThreads, EveryPartRunsOnceAndAnExceptionReachesTheCaller) {
  for (std::int64_t bad = -1; bad < 5; ++bad) {
    std::atomic<int> calls[5] = {};
    const auto run = [&] {
      parallel_for(3, 5, 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          ++calls[i];
          if (i == bad) throw std::bad_alloc();
        }
      });
    };
    if (bad >= 0) {
      EXPECT_THROW(run(), std::bad_alloc) << bad;
    } else {
      run();
      for (const auto& called : calls) EXPECT_EQ(called, 1);
    }
  }
}

TEST_P(SupportTest, UncheckedBadIdsMakeTheirRowNaNOnly) {
  Data d(Case{});
  const Results want(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), want, execution()).ok());
  d.ids[static_cast<std::size_t>(5 * 8 + 2)] = 1 << 30;
  d.ids[static_cast<std::size_t>(9 * 8 + 3)] = -2;
  d.targets[7] = 100000;
  Execution e = execution();
  e.check = false;
  const Results got(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), got, e).ok());
  const std::vector<double> logprob = got.logprob.numbers(), good = want.logprob.numbers();
  for (std::size_t i = 0; i < logprob.size(); ++i) {
    if (i == 5 || i == 7 || i == 9) {
      EXPECT_TRUE(std::isnan(logprob[i])) << i;
    } else {
      EXPECT_EQ(logprob[i], good[i]) << i;
    }
  }
}

TEST_P(SupportTest, AllPaddingGivesZeros) {
  Data d(Case{});
  std::fill(d.ids.begin(), d.ids.end(), -1);
  const Results out(memory(), d);
  ASSERT_TRUE(support_run(Placed(memory(), d), out, execution()).ok());
  for (const Values* zeros : {&out.logprob, &out.entropy, &out.lse, &out.dx, &out.dw})
    for (const double x : zeros->numbers()) ASSERT_EQ(x, 0.0);
  for (const std::byte valid : out.valid.bytes()) EXPECT_EQ(valid, std::byte{0});
}

INSTANTIATE_TEST_SUITE_P(Backends, SupportTest, ::testing::ValuesIn(candidate_backends()), testing::backend_name);

}  // namespace
}  // namespace lmhead
