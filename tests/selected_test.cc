// Log-probs of selected ids on every backend: values over shards, gradients in the dense backward, errors.
#include "candidates.h"

namespace lmhead {
namespace {

using testing::expect_close;
using testing::Values;
using Case = testing::CandidateCase;
using Data = testing::CandidateData;
using Placed = testing::PlacedCandidates;
using Results = testing::CandidateResults;

class SelectedTest : public testing::CandidateTest {
 protected:
  /// The ids' logits are read by the one candidate backend of the device, whichever backend makes the dense part.
  Execution reader() const {
    Execution e = execution();
    e.backend = "auto";
    return e;
  }
  Status dense_forward(const Problem& p, const ForwardOutputs& out) const {
    const Execution e = execution();
    return with_workspace(e, workspace_size(p, Operation::kForward, {}, e),
                          [&](const Execution& with) { return forward(p, out, with); });
  }
  Status read_logits(const SelectedProblem& p, const Matrix& logits, std::optional<bool> check = true) const {
    Execution e = reader();
    e.check = check;
    return with_workspace(e, selected_workspace_size(p, e),
                          [&](const Execution& with) { return selected_logits(p, logits, with); });
  }
  /// fp64 runs on the CPU; a dense backend may refuse a type, but not bf16.
  bool runs(DType dtype) const {
    if (dtype == DType::kFloat64) return backend().name == "reference";
    return dtype == DType::kBFloat16 || dtype == DType::kFloat16 || backend().name != "sm90";
  }
};

TEST_P(SelectedTest, LogitsOverShardsMinusLse) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64})
    for (const std::int64_t h : {48, 37, 4096}) {
      if (!runs(dtype) || (h == 37 && backend().name == "sm90") || (h == 4096 && dtype != DType::kBFloat16)) continue;
      Case c;
      c.dtype = dtype;
      c.h = h;
      c.n = h == 4096 ? 70 : 13;  // more rows than a block holds at a time
      c.k = h == 4096 ? 65 : 8;
      c.bias = true;
      c.softcap = 6.0;
      const Data d(c);
      const Placed placed(memory(), d);
      const Values ids(memory(), DType::kInt64,
                       testing::as_bytes(std::vector<std::int64_t>(d.ids.begin(), d.ids.end())));
      const auto n = static_cast<std::size_t>(c.n), k = static_cast<std::size_t>(c.k);
      Problem whole = placed.problem().head;
      whole.entropy = EntropyMode::kOff;
      const Results out(memory(), d);
      ASSERT_TRUE(dense_forward(whole, {out.logprob.vector(), {}, out.lse.vector()}).ok());
      const std::vector<double> logprob = out.logprob.numbers(), lse = out.lse.numbers();
      // The dense definition of a logit in fp64.
      std::vector<double> want(n * k);
      for (std::size_t e = 0; e < n * k; ++e) {
        const auto i = static_cast<std::int64_t>(e / k);
        const std::int64_t id = d.ids[e];
        if (id < 0 || d.targets[e / k] == -100) continue;
        double r = d.at(d.bias, id);
        for (std::int64_t at = 0; at < c.h; ++at) r += d.at(d.hidden, i * c.h + at) * d.at(d.weight, id * c.h + at);
        want[e] = *c.softcap * std::tanh(r / *c.softcap) / c.temperature - lse[e / k];
      }
      for (const std::vector<std::int64_t>& cuts : {std::vector<std::int64_t>{0, c.v}, {0, 40, 40, c.v}}) {
        const auto shards = static_cast<std::int64_t>(cuts.size()) - 1;
        for (const bool wide : {false, true}) {  // int64, as torch.topk gives them, and int32
          const ConstMatrix list = wide ? ids.rows(c.n, c.k) : placed.ids.rows(c.n, c.k);
          const Values logits(memory(), d.result, shards * c.n * c.k), selected(memory(), d.result, c.n * c.k);
          for (std::int64_t s = 0; s < shards; ++s) {
            const auto at = static_cast<std::size_t>(s);
            const SelectedProblem p{placed.problem(cuts[at], cuts[at + 1]).head, list};
            const Status status = read_logits(p, logits.matrix(c.n, c.k, s * c.n));
            ASSERT_TRUE(status.ok()) << status.to_string();
          }
          ASSERT_TRUE(selected_combine({whole, list}, logits.rows(shards * c.n, c.k), out.lse.view(),
                                       out.logprob.view(), selected.matrix(c.n, c.k), reader())
                          .ok());
          const double tolerance = dtype == DType::kFloat64 ? 1e-12 : c.h > 1000 ? 1e-5 : 4e-6;
          const std::vector<double> got = selected.numbers();
          for (std::size_t e = 0; e < n * k; ++e) {
            if (d.ids[e] == d.targets[e / k]) {  // of the dense projection, whose bound other tests hold
              EXPECT_EQ(got[e], logprob[e / k]);
              continue;
            }
            EXPECT_TRUE(std::abs(got[e] - want[e]) <= tolerance)
                << to_string(dtype) << " H=" << h << " " << e << ": " << got[e] << ", expected " << want[e];
          }
        }
      }
    }
}

// Gradients of a loss over selected log-probs, the target's and the entropy, against central sums of the definition
// in fp64.
TEST_P(SelectedTest, GradientsAreThoseOfTheDenseDefinition) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    if (!runs(dtype)) continue;
    for (const bool capped : {false, true}) {
      Case c;
      c.dtype = dtype;
      c.v = 1500;  // more than one tile
      c.bias = true;
      if (capped) c.softcap = 6.0, c.scale = 0.8;
      Data d(c);
      // Slots: the row's ids (with repeats and padding), then its target.
      const std::int64_t k = c.k + 1;
      std::vector<std::int64_t> ids(static_cast<std::size_t>(c.n * k));
      std::vector<double> upstream(ids.size()), total(static_cast<std::size_t>(c.n));
      std::mt19937 rng(5);
      std::normal_distribution<double> normal;
      for (std::int64_t i = 0; i < c.n; ++i)
        for (std::int64_t j = 0; j < k; ++j) {
          const auto at = static_cast<std::size_t>(i * k + j);
          ids[at] = j == c.k ? d.targets[static_cast<std::size_t>(i)] : d.ids[static_cast<std::size_t>(i * c.k + j)];
          if (i == 5 && j == 2) ids[at] = 7;
          if (ids[at] == -100) ids[at] = -1;
          // fp32 numbers; row 5: total exactly 0
          upstream[at] = i == 5 ? (j == 0 ? 1.0 : j == 2 ? -1.0 : 0.0) : static_cast<float>(normal(rng));
          if (ids[at] == -1) upstream[at] = 0;
          total[static_cast<std::size_t>(i)] += upstream[at];
        }
      store_float(d.dentropy.data(), d.result, 5, 0);  // nothing but its selected ids moves row 5
      const auto stored = [&](const std::vector<double>& numbers) {
        std::vector<std::byte> bytes(numbers.size() * size_of(d.result));
        for (std::size_t i = 0; i < numbers.size(); ++i)
          store_float(bytes.data(), d.result, static_cast<std::int64_t>(i), numbers[i]);
        return bytes;
      };
      const Placed placed(memory(), d);
      const Results out(memory(), d);
      const Problem p = placed.problem().head;
      ASSERT_TRUE(dense_forward(p, {out.logprob.vector(), out.entropy.vector(), out.lse.vector()}).ok());
      const Values id_list(memory(), DType::kInt64, testing::as_bytes(ids)), logits(memory(), d.result, c.n * k),
          at_ids(memory(), d.result, stored(upstream)), sums(memory(), d.result, stored(total));
      ASSERT_TRUE(read_logits({p, id_list.rows(c.n, k)}, logits.matrix(c.n, k)).ok());
      BackwardInputs in{out.lse.view(), out.entropy.view(), sums.view(), placed.dentropy.view(), {}};
      in.selected = {id_list.rows(c.n, k), logits.rows(c.n, k), at_ids.rows(c.n, k)};
      const BackwardOutputs gradients = out.gradients();
      const Execution e = execution();
      const auto differentiate = [&] {
        const Status status =
            with_workspace(e, workspace_size(p, Operation::kBackward, gradients, e),
                           [&](const Execution& with) { return lmhead::backward(p, in, gradients, with); });
        ASSERT_TRUE(status.ok()) << status.to_string();
      };
      differentiate();

      // Beside the exact ones the floor: dl rounded once to the type in which it is multiplied.
      std::vector<double> dx(static_cast<std::size_t>(c.n * c.h)), dw(static_cast<std::size_t>(c.v * c.h)),
          db(static_cast<std::size_t>(c.v)), floor_dx(dx), floor_dw(dw);
      for (std::int64_t i = 0; i < c.n; ++i) {
        if (d.targets[static_cast<std::size_t>(i)] == -100) continue;
        std::vector<double> z(static_cast<std::size_t>(c.v)), slope(z.size());
        double max = -INFINITY, sum = 0, entropy = 0, a = 0;
        for (std::int64_t j = 0; j < c.v; ++j) {
          double r = d.at(d.bias, j);
          for (std::int64_t h = 0; h < c.h; ++h) r += d.at(d.hidden, i * c.h + h) * d.at(d.weight, j * c.h + h);
          r *= c.scale;
          const double t = c.softcap ? std::tanh(r / *c.softcap) : 0;
          z[static_cast<std::size_t>(j)] = (c.softcap ? *c.softcap * t : r) / c.temperature;
          slope[static_cast<std::size_t>(j)] = c.scale / c.temperature * (1 - t * t);
          max = std::max(max, z[static_cast<std::size_t>(j)]);
        }
        for (double v : z) sum += std::exp(v - max);
        const double lse = max + std::log(sum), g = d.upstream(d.dentropy, i);
        for (double v : z) entropy -= std::exp(v - lse) * (v - lse);
        for (std::int64_t j = 0; j < k; ++j) a += upstream[static_cast<std::size_t>(i * k + j)];
        for (std::int64_t j = 0; j < c.v; ++j) {
          double s = 0;
          for (std::int64_t slot = 0; slot < k; ++slot)
            if (ids[static_cast<std::size_t>(i * k + slot)] == j) s += upstream[static_cast<std::size_t>(i * k + slot)];
          const double lp = z[static_cast<std::size_t>(j)] - lse, prob = std::exp(lp);
          const double dl = (s - a * prob - g * prob * (lp + entropy)) * slope[static_cast<std::size_t>(j)];
          std::uint64_t once = 0;
          store_float(&once, dtype, 0, dl);
          const double rounded = load_float(&once, dtype, 0);
          db[static_cast<std::size_t>(j)] += dl;
          for (std::int64_t h = 0; h < c.h; ++h) {
            const auto x = static_cast<std::size_t>(i * c.h + h), w = static_cast<std::size_t>(j * c.h + h);
            dx[x] += dl * d.at(d.weight, j * c.h + h);
            dw[w] += dl * d.at(d.hidden, i * c.h + h);
            floor_dx[x] += rounded * d.at(d.weight, j * c.h + h);
            floor_dw[w] += rounded * d.at(d.hidden, i * c.h + h);
          }
        }
      }
      const std::string name = std::string(to_string(dtype)) + (capped ? " capped" : "");
      if (dtype == DType::kBFloat16) {
        const auto relative = [](const std::vector<double>& got, const std::vector<double>& want) {
          double error = 0, size = 0;
          for (std::size_t i = 0; i < want.size(); ++i)
            error += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
          return std::sqrt(error / size);
        };
        const double dx_error = relative(out.dx.numbers(), dx), dw_error = relative(out.dw.numbers(), dw);
        EXPECT_TRUE(dx_error <= 1.25 * relative(floor_dx, dx)) << name << " " << dx_error;
        EXPECT_TRUE(dw_error <= 1.25 * relative(floor_dw, dw)) << name << " " << dw_error;
      } else {
        const double rtol = dtype == DType::kFloat64 ? 1e-11 : 2e-5, atol = dtype == DType::kFloat64 ? 1e-11 : 1e-5;
        expect_close(out.dx.numbers(), dx, rtol, atol, name + " dX");
        expect_close(out.dw.numbers(), dw, rtol, atol, name + " dW");
        expect_close(out.db.numbers(), db, rtol, atol, name + " db");
      }
      const std::vector<std::byte> first = out.dw.bytes();
      differentiate();
      EXPECT_EQ(out.dw.bytes(), first) << name << ": another run, other bits";
    }
  }
}

TEST_P(SelectedTest, BadInputNamesTheArgument) {
  Data d(Case{});
  const Values logits(memory(), DType::kFloat32, 13 * 8);
  const Matrix out = logits.matrix(13, 8);
  d.ids[40] = 320;
  const Placed placed(memory(), d);
  SelectedProblem p{placed.problem().head, placed.ids.rows(13, 8)};
  EXPECT_EQ(read_logits(p, out).message(),
            "ids: expected ids in [0, 320) or -1 as padding, got 320 at row 5, column 0");
  EXPECT_EQ(read_logits(p, logits.matrix(13, 7)).message(), "logits: expected [13, 8], got [13, 7]");
  EXPECT_EQ(selected_combine(p, logits.rows(13, 8), {nullptr, 13}, {nullptr, 13}, out, execution()).message(),
            "lse: expected data for [13], got a null pointer");
  p.ids.dtype = DType::kInt16;
  EXPECT_EQ(read_logits(p, out).message(), "ids: expected int32 or int64, got int16");
  EXPECT_EQ(std::to_integer<int>(logits.bytes()[0]), 0xff) << "nothing is written on an error";
}

TEST_P(SelectedTest, UncheckedBadIdsAreNaN) {
  Data d(Case{});
  d.ids[40] = 320;
  d.ids[50] = -2;
  const Placed placed(memory(), d);
  const SelectedProblem p{placed.problem().head, placed.ids.rows(13, 8)};
  const Values logits(memory(), DType::kFloat32, 13 * 8), zeros(memory(), DType::kFloat32, std::vector<std::byte>(52)),
      selected(memory(), DType::kFloat32, 13 * 8);
  ASSERT_TRUE(read_logits(p, logits.matrix(13, 8), false).ok());
  ASSERT_TRUE(
      selected_combine(p, logits.rows(13, 8), zeros.view(), zeros.view(), selected.matrix(13, 8), reader()).ok());
  const std::vector<double> got = selected.numbers();
  for (std::size_t e = 0; e < got.size(); ++e) EXPECT_EQ(std::isnan(got[e]), e == 40 || e == 50) << e;
}

LMHEAD_TEST_EVERY_BACKEND(SelectedTest);

}  // namespace
}  // namespace lmhead
