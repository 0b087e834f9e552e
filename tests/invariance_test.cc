// What must not change a bit: threads, batch size, position, masks, workspace, shards, neighbours.
#include "testing.h"

#include <algorithm>
#include <thread>

namespace lmhead {
namespace {

using testing::Case;
using testing::Data;
using testing::Outcome;
using testing::RunOptions;
using testing::TestProblem;

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF16 = DType::kFloat16;

/// Rows `rows` of a problem as a problem of their own.
TestProblem pick_rows(const TestProblem& from, const std::vector<std::int64_t>& rows) {
  TestProblem to = from;
  const auto pick = [&](testing::HostTensor& tensor, const testing::HostTensor& source) {
    if (source.absent()) return;
    const std::int64_t stride = source.row_stride == 0 ? 1 : source.row_stride;
    tensor = testing::HostTensor(source.dtype, static_cast<std::int64_t>(rows.size()), source.cols, stride);
    for (std::size_t i = 0; i < rows.size(); ++i)
      for (std::int64_t k = 0; k < source.cols; ++k) {
        if (is_floating(source.dtype)) {
          tensor.set(static_cast<std::int64_t>(i), k, source.at(rows[i], k));
        } else {
          tensor.set_id(static_cast<std::int64_t>(i), source.id(rows[i]));
        }
      }
  };
  to.spec.n = static_cast<std::int64_t>(rows.size());
  pick(to.hidden, from.hidden);
  pick(to.targets, from.targets);
  pick(to.active, from.active);
  pick(to.row_temperature, from.row_temperature);
  pick(to.dlogprob, from.dlogprob);
  pick(to.dentropy, from.dentropy);
  return to;
}

class Invariance : public testing::BackendTest {
 protected:
  /// The forward of `part`, whose rows are `rows` of the problem of `whole`, has the same bits.
  void expect_rows(const Outcome& whole, const Outcome& part, const std::vector<std::int64_t>& rows,
                   const std::string& what) const {
    if (!part.ok()) return;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<std::size_t>(rows[i]);
      ASSERT_EQ(part.logprob[i], whole.logprob[row]) << what << ", row " << row << " at place " << i;
      ASSERT_EQ(part.entropy[i], whole.entropy[row]) << what << ", row " << row << " at place " << i;
      ASSERT_EQ(part.lse[i], whole.lse[row]) << what << ", row " << row << " at place " << i;
    }
  }
  void expect_same_forward(const Outcome& a, const Outcome& b, const std::string& what) const {
    EXPECT_EQ(testing::first_difference(a.logprob, b.logprob), "") << "logprob, " << what;
    EXPECT_EQ(testing::first_difference(a.entropy, b.entropy), "") << "entropy, " << what;
    EXPECT_EQ(testing::first_difference(a.lse, b.lse), "") << "lse, " << what;
  }
  /// Tiles of the fast backends are 256 rows and 1024 or 2048 columns; K is cut at 1024.
  std::vector<Case> cases() const {
    const bool fast = backend().name != "reference";
    std::vector<Case> list;
    for (const DType dtype : {kBf16, kF16, kF32}) {
      list.push_back({.n = fast ? 600 : 60,
                      .h = 72,
                      .v = fast ? 4200 : 1100,
                      .data = Data::kPeaked,
                      .hidden = dtype,
                      .weight = dtype,
                      .row_temperature = true});
      list.push_back(
          {.n = fast ? 270 : 20, .h = fast ? 1160 : 130, .v = 1025, .hidden = dtype, .weight = dtype, .bias = kF32});
    }
    return list;
  }
};

TEST_P(Invariance, Configuration) {
  std::vector<std::string> names = configurations(backend().name, Operation::kForward);
  for (const std::string& name : configurations(backend().name, Operation::kBackward))
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  ASSERT_EQ(names.front(), kDefaultConfiguration);
  std::vector<Case> list = cases();
  list.push_back({.n = backend().name == "reference" ? 40 : 2600,
                  .h = 64,
                  .v = 2050,
                  .active = DType::kBool,
                  .inactive_every = 3});
  for (const Case& spec : list) {
    const TestProblem problem(spec);
    const Outcome by_default = run(problem, {.configuration = kDefaultConfiguration});
    for (const std::string& name : names) {
      const Outcome other = run(problem, {.configuration = name});
      expect_same_forward(by_default, other, name);
      EXPECT_EQ(testing::first_difference(by_default.dx, other.dx), "") << "dx, " << name;
      EXPECT_EQ(testing::first_difference(by_default.dw, other.dw), "") << "dw, " << name;
      EXPECT_EQ(testing::first_difference(by_default.db, other.db), "") << "db, " << name;
    }
  }
}

TEST_P(Invariance, ThreadCount) {
  if (backend().device != Device::kCpu) GTEST_SKIP() << "threads are a CPU matter";
  for (const Case& c : cases()) {
    const TestProblem problem(c);
    const Outcome one = run(problem, {.threads = 1});
    for (const int threads : {2, 3, 0}) {
      const Outcome many = run(problem, {.threads = threads});
      expect_same_forward(one, many, std::to_string(threads) + " threads");
      EXPECT_EQ(testing::first_difference(one.dx, many.dx), "") << threads << " threads " << c.name();
      EXPECT_EQ(testing::first_difference(one.dw, many.dw), "") << threads << " threads " << c.name();
      EXPECT_EQ(testing::first_difference(one.db, many.db), "") << threads << " threads " << c.name();
    }
  }
}

TEST_P(Invariance, BatchSizeAndPosition) {
  if (!testing::is_batch_invariant(backend())) GTEST_SKIP() << backend().name << " promises run-to-run bits only";
  for (const Case& c : cases()) {
    const TestProblem problem(c);
    const Outcome whole = run(problem, {.backward = false});
    if (refused(whole, problem)) continue;
    const auto check = [&](const std::vector<std::int64_t>& rows, const std::string& what) {
      expect_rows(whole, run(pick_rows(problem, rows), {.backward = false}), rows, what + " " + c.name());
    };
    for (const std::int64_t row : {std::int64_t{0}, c.n / 2, c.n - 1}) check({row}, "alone");
    check({c.n - 1, 0}, "two");
    std::vector<std::int64_t> reversed, front, back;
    for (std::int64_t i = 0; i < c.n; ++i) {
      reversed.push_back(c.n - 1 - i);
      (i < c.n / 3 ? front : back).push_back(i);
    }
    check(reversed, "reversed");
    check(front, "first third");
    check(back, "the rest");
    check(std::vector<std::int64_t>(33, 1), "33 copies");
  }
}

TEST_P(Invariance, ActiveMaskKeepsTheBitsOfTheDenseCall) {
  if (!testing::is_batch_invariant(backend())) GTEST_SKIP() << backend().name << " promises run-to-run bits only";
  for (Case c : cases()) {
    const Outcome dense = run(TestProblem(c), {.backward = false});
    for (const int every : {2, 3, 50}) {
      c.active = DType::kBool;
      c.inactive_every = every;
      const TestProblem masked(c);
      const Outcome part = run(masked, {.backward = false});
      if (!part.ok()) continue;
      for (std::int64_t i = 0; i < c.n; ++i) {
        ASSERT_EQ(part.logprob[i], masked.is_active(i) ? dense.logprob[i] : 0.0) << "row " << i << " " << c.name();
        ASSERT_EQ(part.entropy[i], masked.is_active(i) ? dense.entropy[i] : 0.0) << "row " << i << " " << c.name();
      }
    }
  }
}

TEST_P(Invariance, EqualShardsGiveTheBitsOfOne) {
  if (!testing::is_batch_invariant(backend())) GTEST_SKIP() << backend().name << " promises run-to-run bits only";
  for (const DType dtype : {kBf16, kF16, kF32}) {
    for (const std::int64_t v : {2056, 8 * 1024, 8 * 1100}) {
      const TestProblem problem({.n = 21,
                                 .h = 48,
                                 .v = v,
                                 .data = Data::kPeaked,
                                 .hidden = dtype,
                                 .weight = dtype,
                                 .bias = kF32,
                                 .valid_vocab = v - 5,
                                 .ignore_every = 6});
      const Outcome one_shot = run(problem, {.backward = false});
      for (const std::int64_t ranks : {1, 2, 4, 8}) {
        const RunOptions options{.shards = std::vector<std::int64_t>(static_cast<std::size_t>(ranks), v / ranks),
                                 .backward = false};
        expect_same_forward(one_shot, run(problem, options), std::to_string(ranks) + " shards " + problem.spec.name());
      }
    }
  }
}

TEST_P(Invariance, RowStrides) {
  if (!testing::is_batch_invariant(backend())) GTEST_SKIP() << backend().name << " promises run-to-run bits only";
  for (Case c : cases()) {
    const Outcome dense = run(TestProblem(c), {.backward = false});
    for (const std::int64_t pad : {1, 8, 64}) {
      c.pad = pad;
      const TestProblem strided(c);
      const Outcome out = run(strided, {.backward = false});
      if (out.ok()) expect_same_forward(dense, out, "strided " + c.name());
    }
  }
}

TEST_P(Invariance, WorkspaceSize) {
  if (!testing::is_batch_invariant(backend())) GTEST_SKIP() << backend().name << " promises run-to-run bits only";
  for (const Case& c : cases()) {
    const TestProblem problem(c);
    const Outcome large = run(problem, {.backward = false});
    for (const std::size_t budget : {std::size_t{1} << 20, std::size_t{3} << 20})
      expect_same_forward(large, run(problem, {.workspace_budget = budget, .backward = false}), "small workspace");
  }
}

TEST_P(Invariance, WorkspaceStaysWithinItsBudget) {
  for (const DType dtype : {kBf16, kF32}) {
    for (const std::int64_t n : {std::int64_t{1}, std::int64_t{4096}, std::int64_t{1} << 20}) {
      // Only the query runs: the pointers are never read.
      Problem p;
      void* somewhere = &p;
      p.hidden = {somewhere, n, 4096, 4096, dtype};
      p.weight = {somewhere, 151936, 4096, 4096, dtype};
      p.targets = {somewhere, n, 1, DType::kInt64};
      p.entropy = EntropyMode::kGrad;
      for (const std::size_t mib : {0, 32, 512}) {
        Execution e;
        e.backend = backend().name.c_str();
        e.device = backend().device;
        e.workspace_budget = mib << 20;
        BackwardOutputs gradients;
        gradients.hidden = {somewhere, n, 4096, 4096, dtype};
        gradients.weight = {somewhere, 151936, 4096, 4096, dtype};
        for (const Operation op : {Operation::kForward, Operation::kForwardPartial, Operation::kBackward}) {
          const Result<WorkspaceSize> size = workspace_size(p, op, gradients, e);
          if (!size.ok() && size.status().code() == StatusCode::kUnsupported && backend().name == "sm90" &&
              dtype == kF32)
            continue;
          ASSERT_TRUE(size.ok()) << size.status().to_string();
          const std::size_t budget = mib != 0 ? mib << 20 : backend().device == Device::kCpu ? 64u << 20 : 512u << 20;
          EXPECT_LE(size->accumulator, size->bytes);
          EXPECT_LE(size->bytes - size->accumulator, budget)
              << "n " << n << " " << to_string(dtype) << " operation " << static_cast<int>(op) << " budget " << mib;
          const std::size_t most = static_cast<std::size_t>(std::max<std::int64_t>(n, 151936)) * 4096 * 4;
          EXPECT_LE(size->accumulator, op == Operation::kBackward && dtype == kBf16 ? most : 0u);
        }
      }
    }
  }
}

TEST_P(Invariance, ConcurrentCallsShareInputs) {
  for (const DType dtype : {kBf16, kF32}) {
    const TestProblem problem({.n = 70,
                               .h = 64,
                               .v = 1500,
                               .data = Data::kPeaked,
                               .hidden = dtype,
                               .weight = dtype,
                               .bias = kF32,
                               .ignore_every = 9});
    const Outcome alone = run(problem);
    std::vector<Outcome> together(4);
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < together.size(); ++t)
      threads.emplace_back([&, t] {
        together[t] = testing::run(backend(), problem, {.threads = static_cast<int>(t % 3)});
        if (together[t].ok() && last_backend() != backend().name)
          together[t].violation = "last_backend is not of this thread";
      });
    for (std::thread& thread : threads) thread.join();
    for (const Outcome& out : together) {
      if (refused(out, problem)) continue;
      EXPECT_TRUE(out.ok()) << out.message();
      expect_same_forward(alone, out, "concurrent");
      EXPECT_EQ(testing::first_difference(alone.dx, out.dx), "");
      EXPECT_EQ(testing::first_difference(alone.dw, out.dw), "");
    }
  }
}

LMHEAD_TEST_EVERY_BACKEND(Invariance);

}  // namespace
}  // namespace lmhead
