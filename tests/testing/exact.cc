#include "testing/exact.h"

#include <algorithm>
#include <cmath>

#include "core/element.h"
#include "testing/parallel.h"

namespace lmhead::testing {
namespace {

/// The first `rows` rows of a tensor as the compute type sees them.
template <class T>
std::vector<T> decoded(const HostTensor& tensor, std::int64_t rows, DType compute) {
  std::vector<T> values(static_cast<std::size_t>(rows * tensor.cols));
  parallel_ranges(rows, 8 * rows * tensor.cols, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t k = 0; k < tensor.cols; ++k)
        values[i * tensor.cols + k] = static_cast<T>(round_to(compute, tensor.at(i, k)));
  });
  return values;
}

std::vector<float> transposed(const std::vector<float>& m, std::int64_t rows, std::int64_t cols) {
  std::vector<float> t(m.size());
  parallel_ranges(cols, 4 * rows * cols, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j)
      for (std::int64_t i = 0; i < rows; ++i) t[j * rows + i] = m[i * cols + j];
  });
  return t;
}

double dot(const double* a, const double* b, std::int64_t n) {
  double sum[8] = {};
  std::int64_t k = 0;
  for (; k + 8 <= n; k += 8)
    for (int lane = 0; lane < 8; ++lane) sum[lane] += a[k + lane] * b[k + lane];
  for (; k < n; ++k) sum[0] += a[k] * b[k];
  return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}

}  // namespace

std::vector<double> exact_products(const TestProblem& p) {
  const std::int64_t n = p.spec.n, h = p.spec.h, v = p.valid();
  const std::vector<double> x = decoded<double>(p.hidden, n, p.compute());
  std::vector<double> products(static_cast<std::size_t>(n * v));
  parallel_ranges(v, 2 * n * v * h, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> w(static_cast<std::size_t>(h));
    for (std::int64_t j = begin; j < end; ++j) {
      for (std::int64_t k = 0; k < h; ++k) w[k] = round_to(p.compute(), p.weight.at(j, k));
      for (std::int64_t i = 0; i < n; ++i) products[i * v + j] = dot(&x[i * h], w.data(), h);
    }
  });
  return products;
}

std::vector<double> vendor_products(const TestProblem& p, Arena& arena) {
  const std::int64_t n = p.spec.n, h = p.spec.h, v = p.valid();
  const std::vector<float> c = arena.multiply(p.compute(), decoded<float>(p.hidden, n, p.compute()),
                                              decoded<float>(p.weight, v, p.compute()), n, v, h);
  return {c.begin(), c.end()};
}

Scores score(const TestProblem& p, const std::vector<double>& products) {
  const std::int64_t n = p.spec.n, v = p.valid();
  const auto rows = static_cast<std::size_t>(n);
  Scores s{std::vector<double>(products.size()),
           std::vector<double>(rows),
           std::vector<double>(rows),
           std::vector<double>(rows),
           std::vector<double>(rows),
           std::vector<double>(rows)};
  std::vector<double> bias(static_cast<std::size_t>(v));
  for (std::int64_t j = 0; j < v && !p.bias.absent(); ++j) bias[j] = p.bias.at(j);
  parallel_ranges(n, 60 * n * v, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      if (!p.is_active(i)) continue;
      double* z = &s.z[i * v];
      const double t = p.temperature(i);
      double max = -INFINITY, sum = 0, weighted = 0;
      for (std::int64_t j = 0; j < v; ++j) {
        const double r = p.spec.scale * (products[i * v + j] + bias[j]);
        z[j] = (p.spec.softcap ? *p.spec.softcap * std::tanh(r / *p.spec.softcap) : r) / t;
        max = std::max(max, z[j]);
      }
      for (std::int64_t j = 0; j < v; ++j) {
        const double e = std::exp(z[j] - max);
        sum += e;
        if (e > 0) weighted += e * (z[j] - max);
      }
      const std::int64_t id = p.targets.id(i);
      const bool inside = id >= 0 && id < v;
      s.max[i] = max;
      s.target[i] = inside ? z[id] : 0;
      s.lse[i] = max + std::log(sum);
      s.logprob[i] = inside ? (z[id] - max) - std::log(sum) : 0;
      s.entropy[i] = std::log(sum) - weighted / sum;
    }
  });
  return s;
}

namespace {

/// One row of dl with every operation in T.
template <class T>
void logit_gradient_row(const TestProblem& p, std::int64_t i, const double* z, double lse, double entropy, double* dl) {
  const T a = static_cast<T>(p.a(i)), g = static_cast<T>(p.g(i)), t = static_cast<T>(p.temperature(i));
  const T slope = static_cast<T>(p.spec.scale) / t, cap = static_cast<T>(p.spec.softcap.value_or(1));
  for (std::int64_t j = 0; j < p.valid(); ++j) {
    const T log_p = static_cast<T>(z[j]) - static_cast<T>(lse), prob = std::exp(log_p);
    T dz = a * ((j == p.targets.id(i) ? T(1) : T(0)) - prob);
    if (prob > 0) dz -= g * prob * (log_p + static_cast<T>(entropy));
    const T saturation = p.spec.softcap ? static_cast<T>(z[j]) * t / cap : T(0);
    dl[j] = dz * slope * (1 - saturation * saturation);
  }
}

}  // namespace

std::vector<double> logit_gradients(const TestProblem& p, const Scores& s, Arithmetic arithmetic) {
  const std::int64_t n = p.spec.n, v = p.valid();
  std::vector<double> dl(static_cast<std::size_t>(n * v));
  parallel_ranges(n, 30 * n * v, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> z(static_cast<std::size_t>(v));
    for (std::int64_t i = begin; i < end; ++i) {
      if (!p.is_active(i) || (p.a(i) == 0 && p.g(i) == 0)) continue;
      if (arithmetic == Arithmetic::kExact) {
        logit_gradient_row<double>(p, i, &s.z[i * v], s.lse[i], s.entropy[i], &dl[i * v]);
        continue;
      }
      for (std::int64_t j = 0; j < v; ++j) z[j] = static_cast<float>(s.z[i * v + j]);
      const double lse = static_cast<float>(s.lse[i]), entropy = static_cast<float>(s.entropy[i]);
      arithmetic == Arithmetic::kSaved ? logit_gradient_row<double>(p, i, z.data(), lse, entropy, &dl[i * v])
                                       : logit_gradient_row<float>(p, i, z.data(), lse, entropy, &dl[i * v]);
    }
  });
  return dl;
}

Gradients exact_gradients(const TestProblem& p, const std::vector<double>& dl,
                          const std::vector<std::int64_t>& weight_rows) {
  const std::int64_t n = p.spec.n, h = p.spec.h, v = p.valid(), picked = static_cast<std::int64_t>(weight_rows.size());
  Gradients out{std::vector<double>(static_cast<std::size_t>(n * h)),
                std::vector<double>(static_cast<std::size_t>(picked * h)),
                std::vector<double>(static_cast<std::size_t>(picked))};
  // Each thread owns a range of H, so that dx has one writer; the weight is decoded column by column.
  parallel_ranges(h, 2 * n * v * h, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> w(static_cast<std::size_t>(end - begin));
    for (std::int64_t j = 0; j < v; ++j) {
      for (std::int64_t k = begin; k < end; ++k) w[k - begin] = round_to(p.compute(), p.weight.at(j, k));
      for (std::int64_t i = 0; i < n; ++i) {
        const double d = dl[i * v + j];
        if (d == 0) continue;
        double* row = &out.dx[i * h];
        for (std::int64_t k = begin; k < end; ++k) row[k] += d * w[k - begin];
      }
    }
  });
  const std::vector<double> x = decoded<double>(p.hidden, n, p.compute());
  parallel_ranges(picked, 2 * n * picked * h, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const std::int64_t j = weight_rows[r];
      if (j >= v) continue;
      for (std::int64_t i = 0; i < n; ++i) {
        const double d = dl[i * v + j];
        if (d == 0) continue;  // a row that is not active may hold NaN
        out.db[r] += d;
        for (std::int64_t k = 0; k < h; ++k) out.dw[r * h + k] += d * x[i * h + k];
      }
    }
  });
  return out;
}

Gradients floor_gradients(const TestProblem& p, const std::vector<double>& dl,
                          const std::vector<std::int64_t>& weight_rows, Arena& arena, DType dx_type, DType dw_type,
                          DType db_type) {
  const std::int64_t n = p.spec.n, h = p.spec.h, v = p.valid(), picked = static_cast<std::int64_t>(weight_rows.size());
  std::vector<float> d(dl.size()), dt(static_cast<std::size_t>(picked * n));
  for (std::size_t i = 0; i < dl.size(); ++i) d[i] = static_cast<float>(round_to(p.compute(), dl[i]));
  std::vector<float> x = decoded<float>(p.hidden, n, p.compute());
  for (std::int64_t i = 0; i < n; ++i)
    if (!p.is_active(i)) std::fill_n(x.begin() + i * h, h, 0.0f);
  Gradients out;
  out.db.resize(static_cast<std::size_t>(picked));
  for (std::int64_t r = 0; r < picked; ++r) {
    float sum = 0;
    for (std::int64_t i = 0; i < n && weight_rows[r] < v; ++i) {
      dt[r * n + i] = d[i * v + weight_rows[r]];
      sum += dt[r * n + i];
    }
    out.db[r] = round_to(db_type, sum);
  }
  const auto rounded = [](const std::vector<float>& values, DType type) {
    std::vector<double> result(values.size());
    for (std::size_t i = 0; i < values.size(); ++i) result[i] = round_to(type, values[i]);
    return result;
  };
  const std::vector<float> w = decoded<float>(p.weight, v, p.compute());
  out.dx = rounded(arena.multiply(p.compute(), d, transposed(w, v, h), n, h, v), dx_type);
  out.dw = rounded(arena.multiply(p.compute(), dt, transposed(x, n, h), picked, h, n), dw_type);
  return out;
}

}  // namespace lmhead::testing
