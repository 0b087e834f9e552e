#include "testing/check.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <numeric>

#include "testing/parallel.h"

namespace lmhead::testing {
namespace {

/// Rows of dW that are compared: all of a small one, else every target and 256 spread evenly.
std::vector<std::int64_t> weight_rows_to_check(const TestProblem& p) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(p.spec.v));
  std::iota(rows.begin(), rows.end(), 0);
  if (p.spec.v * p.spec.h <= std::int64_t{1} << 23) return rows;
  std::vector<std::int64_t> picked;
  for (std::int64_t i = 0; i < p.spec.n; ++i)
    if (const std::int64_t id = p.targets.id(i); id >= 0 && id < p.spec.v) picked.push_back(id);
  for (std::int64_t k = 0; k < 256; ++k) picked.push_back(k * (p.spec.v - 1) / 255);
  std::sort(picked.begin(), picked.end());
  picked.erase(std::unique(picked.begin(), picked.end()), picked.end());
  return picked;
}

double norm(const double* v, std::int64_t size) {
  double sum = 0;
  for (std::int64_t i = 0; i < size; ++i) sum += v[i] * v[i];
  return std::sqrt(sum);
}

double distance(const double* a, const double* b, std::int64_t size) {
  double sum = 0;
  for (std::int64_t i = 0; i < size; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

/// Where one column holds all the mass, dl is a difference like 1 - p of equal numbers and the exact
/// gradient may be 1e-40: no relative bound can hold there.
bool is_saturated(const TestProblem& p) {
  return p.spec.data == Data::kOneHot || p.spec.data == Data::kAligned || p.valid() == 1;
}

class Checker {
 public:
  Checker(const TestProblem& p, const RunOptions& options, const Outcome& outcome, Arena& arena)
      : p_(p), options_(options), got_(outcome), arena_(arena), fp64_(p.result() == DType::kFloat64) {}

  Report run() {
    if (!got_.ok()) {
      fail("%s", got_.message().c_str());
      return report_;
    }
    const std::vector<double> products = exact_products(p_);
    exact_ = score(p_, products);
    vendor_ = fp64_ ? exact_ : score(p_, vendor_products(p_, arena_));
    rows("logprob", got_.logprob, exact_.logprob, vendor_.logprob, report_.logprob_err);
    for (std::int64_t i = 0; i < p_.spec.n; ++i)
      if (!(got_.logprob[i] <= 0)) fail("logprob of row %ld is %.9g, above 0", static_cast<long>(i), got_.logprob[i]);
    if (!got_.entropy.empty()) {
      rows("entropy", got_.entropy, exact_.entropy, vendor_.entropy, report_.entropy_err);
      for (std::int64_t i = 0; i < p_.spec.n; ++i)
        if (!(got_.entropy[i] >= 0)) fail("entropy of row %ld is %.9g, below 0", static_cast<long>(i), got_.entropy[i]);
    }
    if (!got_.dx.empty() || !got_.dw.empty() || !got_.db.empty()) gradients();
    return report_;
  }

 private:
  __attribute__((format(printf, 2, 3))) void fail(const char* format, ...) {
    if (!report_.failure.empty()) return;  // the first one is enough
    char text[512];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    report_.failure = std::string(text) + " [" + p_.spec.name() + "]";
  }

  void rows(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
            const std::vector<double>& vendor, double& largest) {
    double baseline = 0;
    for (std::int64_t i = 0; i < p_.spec.n; ++i) baseline = std::max(baseline, std::abs(vendor[i] - exact[i]));
    std::int64_t worst = -1;
    double worst_ratio = 1;
    for (std::int64_t i = 0; i < p_.spec.n; ++i) {
      if (!p_.is_active(i)) {
        if (!(got[i] == 0)) fail("%s of inactive row %ld is %.9g, not 0", name, static_cast<long>(i), got[i]);
        continue;
      }
      const double size = std::max({std::abs(exact_.max[i]), std::abs(exact_.target[i]), std::abs(exact[i])});
      const double bound = fp64_ ? 1e-11 * (1 + size) : 4 * baseline + 1e-6 + 0x1p-22 * size;
      const double error = std::abs(got[i] - exact[i]);
      report_.bound = std::max(report_.bound, bound);
      largest = !(error <= largest) ? error : largest;
      if (!(error <= worst_ratio * bound)) {
        worst = i;
        worst_ratio = error / bound;
      }
    }
    if (worst >= 0)
      fail("%s of row %ld: expected %.9g, got %.9g, error %.3g is %.3g x the bound (baseline's error %.3g)", name,
           static_cast<long>(worst), exact[worst], got[worst], std::abs(got[worst] - exact[worst]), worst_ratio,
           baseline);
  }

  double promised(std::int64_t i) const {
    return 1e-6 +
           0x1p-22 * std::max({std::abs(exact_.max[i]), std::abs(exact_.target[i]), std::abs(exact_.logprob[i])});
  }

  /// What an error of the promised size (fp64: 1e-12) in every log p does to the gradients: norms of
  /// the rows of dX, and of dW as a whole.
  struct Slack {
    std::vector<double> dx;
    double dw;
    double dx_size, dw_size;  ///< norms that gradients of upstreams of this size have when nothing cancels
  };
  Slack log_prob_slack(const TestProblem& used, const std::vector<std::int64_t>& picked) const {
    const std::int64_t n = p_.spec.n, h = p_.spec.h, v = p_.valid();
    std::vector<double> w(static_cast<std::size_t>(v)), columns(w.size()), column_sizes(w.size());
    Slack slack{std::vector<double>(static_cast<std::size_t>(n)), 0, 0, 0};
    const auto length = [h](const HostTensor& t, std::int64_t i) {
      double sum = 0;
      for (std::int64_t k = 0; k < h; ++k) sum += t.at(i, k) * t.at(i, k);
      return std::sqrt(sum);
    };
    parallel_ranges(v, 4 * v * h, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t j = begin; j < end; ++j) w[j] = length(p_.weight, j);
    });
    for (std::int64_t i = 0; i < n; ++i) {
      const double a = std::abs(used.a(i)), g = std::abs(used.g(i));
      if (!p_.is_active(i) || (a == 0 && g == 0)) continue;
      const double step = fp64_ ? 1e-12 : promised(i), slope = std::abs(p_.spec.scale) / p_.temperature(i);
      const double length_x = length(p_.hidden, i);
      double row = 0;
      for (std::int64_t j = 0; j < v; ++j) {
        const double log_p = exact_.z[i * v + j] - exact_.lse[i], prob = std::exp(log_p);
        if (prob == 0) continue;
        const double dl = slope * prob * (a + g * (1 + std::abs(log_p + exact_.entropy[i])));
        row += dl * w[j];
        columns[j] += step * dl * length_x;
        column_sizes[j] += dl * length_x;
      }
      slack.dx[i] = step * row;
      slack.dx_size += row * row;
    }
    for (const std::int64_t j : picked) slack.dw_size += j < v ? column_sizes[j] * column_sizes[j] : 0;
    slack.dx_size = std::sqrt(slack.dx_size);
    slack.dw_size = std::sqrt(slack.dw_size);
    for (const std::int64_t j : picked)
      if (j < v) slack.dw += columns[j] * columns[j];
    slack.dw = std::sqrt(slack.dw);
    return slack;
  }

  void gradients() {
    TestProblem used = p_;
    if (!options_.use_dlogprob) used.dlogprob = {};
    if (!options_.use_dentropy) used.dentropy = {};
    const std::vector<std::int64_t> picked = weight_rows_to_check(p_);
    const std::vector<double> dl = logit_gradients(used, exact_);
    const Gradients exact = exact_gradients(used, dl, picked);
    std::vector<Gradients> floors;
    if (!fp64_) {
      const bool wide = options_.fp32_gradients || options_.accumulate || !options_.shards.empty();
      const DType result = p_.result();
      const auto add = [&](const std::vector<double>& from) {
        floors.push_back(floor_gradients(used, from, picked, arena_, wide ? result : p_.spec.hidden,
                                         wide ? result : p_.spec.weight,
                                         wide || !p_.spec.bias ? result : *p_.spec.bias));
      };
      if (p_.compute() == DType::kFloat32) {
        // Rounding dl is no floor here: what limits fp32 inputs is fp32 logits and arithmetic. Where few
        // rows carry the error one instance of it says little, so the largest of three counts.
        for (const Arithmetic arithmetic : {Arithmetic::kSaved, Arithmetic::kFp32})
          add(logit_gradients(used, vendor_, arithmetic));
        add(logit_gradients(used, exact_, Arithmetic::kSaved));
      } else {
        add(dl);
      }
    }
    const Slack slack = log_prob_slack(used, picked);
    const bool loose = is_saturated(p_) || fp64_;
    const double dx_slack = loose ? norm(slack.dx.data(), p_.spec.n) : 0, dw_slack = loose ? slack.dw : 0;
    const std::int64_t n = p_.spec.n, h = p_.spec.h, count = static_cast<std::int64_t>(picked.size());
    if (!got_.dx.empty()) {
      compare("dX", got_.dx, exact.dx, floors, &Gradients::dx, n, h, dx_slack, slack.dx_size, report_.dx_err,
              report_.dx_bound);
      single_rows(got_.dx, exact.dx, floors, slack.dx);
      for (std::int64_t i = 0; i < n; ++i)
        if ((!p_.is_active(i) || (used.a(i) == 0 && used.g(i) == 0)) && !(norm(&got_.dx[i * h], h) == 0))
          fail("dX of row %ld, which has no gradient, is not 0", static_cast<long>(i));
    }
    double sum_slack = 0;  // one fp32 rounding a row when db is summed
    for (const std::int64_t j : picked) {
      double sum = 0;
      for (std::int64_t i = 0; i < n && j < p_.valid(); ++i) sum += std::abs(dl[i * p_.valid() + j]);
      sum_slack += sum * sum;
    }
    sum_slack = 0x1p-23 * std::sqrt(sum_slack);
    std::vector<double> dw, db;
    for (const std::int64_t j : picked) {
      if (!got_.dw.empty()) dw.insert(dw.end(), got_.dw.begin() + j * h, got_.dw.begin() + (j + 1) * h);
      if (!got_.db.empty()) db.push_back(got_.db[j]);
    }
    if (!dw.empty())
      compare("dW", dw, exact.dw, floors, &Gradients::dw, count, h, dw_slack, slack.dw_size, report_.dw_err,
              report_.dw_bound);
    if (!db.empty())
      compare("db", db, exact.db, floors, &Gradients::db, 1, count, dw_slack + sum_slack, 0, report_.db_err,
              report_.db_bound);
    for (std::int64_t r = 0; r < count; ++r) {
      if (picked[r] < p_.valid()) continue;
      if (!dw.empty() && !(norm(&dw[r * h], h) == 0))
        fail("dW of padding column %ld is not 0", static_cast<long>(picked[r]));
      if (!db.empty() && !(db[r] == 0)) fail("db of padding column %ld is not 0", static_cast<long>(picked[r]));
    }
  }

  void compare(const char* name, const std::vector<double>& got, const std::vector<double>& exact,
               const std::vector<Gradients>& floors, std::vector<double> Gradients::*member, std::int64_t rows,
               std::int64_t cols, double slack, double natural, double& error, double& bound) {
    const std::int64_t size = rows * cols;
    const double whole = norm(exact.data(), size);
    double floor = 0;
    for (const Gradients& f : floors) floor = std::max(floor, distance((f.*member).data(), exact.data(), size));
    const double absolute = (fp64_ ? 1e-10 * whole : 1.25 * floor) + slack;
    const double off = distance(got.data(), exact.data(), size);
    // Of a gradient that cancels to nothing (equal weights, one-hot rows) the report gives the errors
    // relative to a thousandth of what it would be without the cancellation.
    const double unit = std::max(whole, 1e-3 * natural);
    error = unit > 0 ? off / unit : off;
    bound = unit > 0 ? absolute / unit : absolute;
    std::int64_t worst = 0;
    double worst_off = -1;
    for (std::int64_t i = 0; i < rows; ++i) {
      const double row = norm(&exact[i * cols], cols), row_off = distance(&got[i * cols], &exact[i * cols], cols);
      if (row > 0 && !(row_off / row <= worst_off)) worst = i, worst_off = row_off / row;
    }
    if (!(off <= absolute))
      fail("%s: relative error %.4g, bound %.4g, worst row %ld (%.4g)", name, error, bound, static_cast<long>(worst),
           worst_off);
  }

  /// One wrong row in a large batch hardly moves the norm of the whole.
  void single_rows(const std::vector<double>& got, const std::vector<double>& exact,
                   const std::vector<Gradients>& floors, const std::vector<double>& slack) {
    const std::int64_t n = p_.spec.n, h = p_.spec.h;
    double worst_floor = fp64_ ? 1e-9 : 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const double row = norm(&exact[i * h], h);
      if (row == 0) continue;
      for (const Gradients& f : floors)
        worst_floor = std::max(worst_floor, distance(&f.dx[i * h], &exact[i * h], h) / row);
    }
    for (std::int64_t i = 0; i < n; ++i) {
      const double row = norm(&exact[i * h], h), off = distance(&got[i * h], &exact[i * h], h);
      if (!(off <= 4 * worst_floor * row + slack[i]))
        fail("dX: row %ld has relative error %.4g, the floor's worst row %.4g", static_cast<long>(i), off / row,
             worst_floor);
    }
  }

  const TestProblem& p_;
  const RunOptions& options_;
  const Outcome& got_;
  Arena& arena_;
  const bool fp64_;
  Scores exact_, vendor_;
  Report report_;
};

}  // namespace

Report check(const TestProblem& problem, const RunOptions& options, const Outcome& outcome, Arena& arena) {
  return Checker(problem, options, outcome, arena).run();
}

}  // namespace lmhead::testing
