// The loops compiled once per instruction set: error bounds of 2^x and tanh over their whole range, and
// every compiled set against plain fp64 on ragged sizes and data with teeth.
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "cpu/gemm.h"
#include "cpu/tile_kernels.h"

namespace lmhead {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

class TileKernelsTest : public testing::TestWithParam<const TileKernels*> {
 protected:
  void SetUp() override {
    if (!kernels().runs_here()) GTEST_SKIP() << kernels().name << " does not run on this machine";
  }
  const TileKernels& kernels() const { return *GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(EverySet, TileKernelsTest,
                         testing::ValuesIn(all_tile_kernels().begin(), all_tile_kernels().end()), [](const auto& p) {
                           std::string name = p.param->name;
                           std::erase(name, '-');
                           return name;
                         });

using Function = void (*)(const float*, float*, std::int64_t);

/// Largest relative error over the values that `visit` hands out in blocks.
template <class Exact>
double worst_error(Function fn, const std::vector<float>& x, Exact&& exact) {
  std::vector<float> y(x.size());
  fn(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  double worst = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double e = exact(static_cast<double>(x[i])), error = std::fabs(y[i] - e) / std::fabs(e);
    if (!(error <= worst)) worst = error;  // NaN wins
  }
  return worst;
}

/// Every fp32 number of [low, high), of one sign, whose bits are a multiple of `step`.
std::vector<float> numbers(float low, float high, std::uint32_t step) {
  std::vector<float> x;
  const auto first = std::bit_cast<std::uint32_t>(low), last = std::bit_cast<std::uint32_t>(high);
  for (std::uint64_t b = std::min(first, last); b < std::max(first, last); b += step)
    x.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(b)));
  return x;
}

TEST_P(TileKernelsTest, Exp2KeepsItsBoundOverTheWholeRange) {
  const auto exact = [](double v) { return std::exp2(v); };
  // All numbers of two octaves of the argument: every residue of the polynomial with both signs of n.
  EXPECT_LE(worst_error(kernels().exp2, numbers(-1.0f, -2.0f, 1), exact), kExp2MaxRelativeError);
  EXPECT_LE(worst_error(kernels().exp2, numbers(0.5f, 1.0f, 1), exact), kExp2MaxRelativeError);
  // A thinned walk over all the others, from the smallest number to the ends.
  EXPECT_LE(worst_error(kernels().exp2, numbers(-0.0f, -126.0f, 977), exact), kExp2MaxRelativeError);
  EXPECT_LE(worst_error(kernels().exp2, numbers(0.0f, 127.49f, 977), exact), kExp2MaxRelativeError);
}

TEST_P(TileKernelsTest, Exp2AtItsEnds) {
  const std::vector<float> x = {0.0f,
                                -0.0f,
                                1.0f,
                                -1.0f,
                                127.0f,
                                -126.0f,
                                128.0f,
                                129.0f,
                                1e30f,
                                kInf,
                                -kInf,
                                -126.001f,
                                -127.0f,
                                -1e30f,
                                kNaN,
                                -kNaN,
                                std::bit_cast<float>(0x7fffffffu)};
  std::vector<float> y(x.size());
  kernels().exp2(x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  const std::vector<float> expected = {1, 1, 2, 0.5f, 0x1p127f, 0x1p-126f, kInf, kInf, kInf, kInf, 0, 0, 0, 0};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(y[i], expected[i]) << "2^" << x[i];
  for (std::size_t i = expected.size(); i < x.size(); ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
}

TEST_P(TileKernelsTest, TanhKeepsItsBoundOverTheWholeRange) {
  const auto exact = [](double v) { return std::tanh(v); };
  EXPECT_LE(worst_error(kernels().tanh, numbers(0.25f, 2.0f, 7), exact), kTanhMaxRelativeError);
  EXPECT_LE(worst_error(kernels().tanh, numbers(-0.25f, -2.0f, 7), exact), kTanhMaxRelativeError);
  EXPECT_LE(worst_error(kernels().tanh, numbers(0x1p-126f, kInf, 4001), exact), kTanhMaxRelativeError);
  const float ends[3] = {kInf, -kInf, kNaN};
  float y[3];
  kernels().tanh(ends, y, 3);
  EXPECT_EQ(y[0], 1.0f);
  EXPECT_EQ(y[1], -1.0f);
  EXPECT_TRUE(std::isnan(y[2]));
}

/// fp64 state of the same products.
SoftmaxStateT<double> exact_state(const std::vector<float>& products, const float* bias, const LogitMap& map,
                                  std::int64_t target) {
  SoftmaxStateT<double> s = empty_state<double>();
  for (std::size_t j = 0; j < products.size(); ++j) {
    double z = (static_cast<double>(products[j]) + (bias != nullptr ? bias[j] : 0.0f)) * map.factor;
    if (map.softcap) z = map.amplitude * std::tanh(z);
    s = merge(s, {z, z == -INFINITY ? 0.0 : 1.0, 0.0, static_cast<std::int64_t>(j) == target ? z : INFINITY});
  }
  return s;
}

std::vector<float> normal(std::int64_t n, float deviation, float offset, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw(offset, deviation);
  std::vector<float> x(static_cast<std::size_t>(n));
  for (float& v : x) v = draw(random);
  return x;
}

const LogitMap kMaps[] = {{1, 0, false}, {0.7f, 0, false}, {-0.5f, 0, false}, {1 / 30.0f, 30, true}, {0.25f, 3, true}};

TEST_P(TileKernelsTest, SegmentStateAgreesWithFp64) {
  for (const std::int64_t n : {1, 7, 8, 15, 16, 17, 63, 64, 65, 200, 1023, 1024})
    for (const float deviation : {0.0f, 1.0f, 8.0f, 40.0f})
      for (const float offset : {0.0f, -120.0f, 1000.0f, -1000.0f})
        for (const LogitMap& map : kMaps)
          for (const bool biased : {false, true}) {
            std::vector<float> products = normal(n, deviation, offset, 1), bias = normal(n, 1, 0, 2);
            const float* b = biased ? bias.data() : nullptr;
            const std::int64_t target = n / 2;
            SCOPED_TRACE(testing::Message()
                         << n << " columns, deviation " << deviation << ", offset " << offset << ", factor "
                         << map.factor << (map.softcap ? ", softcap" : "") << (biased ? ", bias" : ""));
            const SoftmaxStateT<double> e = exact_state(products, b, map, target);
            const RowResult<double> want = finish(e, true);
            const SoftmaxState s = kernels().segment_state(products.data(), n, b, map, target);
            const RowResult<float> got = finish(s, true);
            const auto bound = [&](double value) {
              return 1e-6 + 0x1p-22 * std::max({std::fabs(e.max), std::fabs(e.target), std::fabs(value)});
            };
            ASSERT_TRUE(std::fabs(got.logprob - want.logprob) <= bound(want.logprob))
                << n << " " << got.logprob << " " << want.logprob;
            ASSERT_TRUE(std::fabs(got.entropy - want.entropy) <= bound(want.entropy))
                << n << " " << got.entropy << " " << want.entropy;
            ASSERT_TRUE(got.logprob <= 0) << got.logprob;
            const SoftmaxState none = kernels().segment_state(products.data(), 0, b, map, target);
            ASSERT_EQ(none.sum, 0.0f);
          }
}

TEST_P(TileKernelsTest, SegmentStateOfNonFiniteLogits) {
  for (const std::int64_t n : {1, 16, 37, 1024}) {
    const std::vector<float> all(static_cast<std::size_t>(n), -kInf);
    std::vector<float> x = all;
    SoftmaxState s = kernels().segment_state(x.data(), n, nullptr, {}, 0);
    EXPECT_EQ(s.sum, 0.0f);
    EXPECT_EQ(s.max, -kInf);
    EXPECT_EQ(s.target, -kInf);
    x = all;
    x[static_cast<std::size_t>(n - 1)] = -3;  // one finite column holds all the mass
    s = kernels().segment_state(x.data(), n, nullptr, {}, n - 1);
    EXPECT_EQ(s.max, -3.0f);
    EXPECT_EQ(s.sum, 1.0f);
    EXPECT_EQ(s.weighted, 0.0f);
    EXPECT_EQ(s.target, -3.0f);
    for (const float poison : {kNaN, kInf})
      for (const std::int64_t at : {std::int64_t{0}, n / 2, n - 1}) {
        x = all;
        x[static_cast<std::size_t>(at)] = poison;
        EXPECT_TRUE(std::isnan(kernels().segment_state(x.data(), n, nullptr, {}, -1).sum)) << n << " " << at;
        x = normal(n, 1, 0, 3);
        x[static_cast<std::size_t>(at)] = poison;
        EXPECT_TRUE(std::isnan(kernels().segment_state(x.data(), n, nullptr, {}, -1).sum)) << n << " " << at;
      }
  }
}

TEST_P(TileKernelsTest, LogitGradientAgreesWithFp64) {
  for (const std::int64_t n : {1, 15, 16, 17, 200, 1024})
    for (const float deviation : {1.0f, 8.0f})
      for (const LogitMap& map : kMaps)
        for (const bool biased : {false, true})
          for (const float g : {0.0f, 0.7f}) {
            const std::vector<float> products = normal(n, deviation, 0, 4), bias = normal(n, 1, 0, 5);
            const float* b = biased ? bias.data() : nullptr;
            for (const std::int64_t target : {std::int64_t{-1}, std::int64_t{0}, n / 2, n - 1}) {
              const RowResult<double> r = finish(exact_state(products, b, map, 0), true);
              const RowGradient row{map, static_cast<float>(r.lse), static_cast<float>(r.entropy), 1.3f, g, 0.4f};
              std::vector<float> dl(static_cast<std::size_t>(n) + 1, 123.0f);
              kernels().logit_gradient(products.data(), n, b, row, target, DType::kFloat32, dl.data());
              EXPECT_EQ(dl.back(), 123.0f) << "wrote past the end";
              double error = 0, size = 0;
              for (std::int64_t j = 0; j < n; ++j) {
                const auto k = static_cast<std::size_t>(j);
                const double x = (static_cast<double>(products[k]) + (biased ? bias[k] : 0.0f)) * map.factor;
                const double z = map.softcap ? map.amplitude * std::tanh(x) : x, p = std::exp(z - row.lse);
                double want = -p * (row.a + row.g * (z - row.lse + row.entropy));
                if (j == target) want += row.a;
                want *= row.slope * (map.softcap ? 1 / std::pow(std::cosh(x), 2) : 1.0);
                error += std::pow(dl[k] - want, 2), size += std::pow(want, 2);
              }
              // A row that is its own target cancels to rounding: compare with a size of 1 then.
              ASSERT_TRUE(std::sqrt(error) <= 4e-6 * std::max(std::sqrt(size), 1.0))
                  << n << " " << target << " " << error;
              for (const DType type : {DType::kBFloat16, DType::kFloat16}) {
                std::vector<std::uint16_t> low(static_cast<std::size_t>(n) + 1, 0x7b7b);
                kernels().logit_gradient(products.data(), n, b, row, target, type, low.data());
                EXPECT_EQ(low.back(), 0x7b7b) << "wrote past the end";
                for (std::int64_t j = 0; j < n; ++j) {
                  const auto k = static_cast<std::size_t>(j);
                  ASSERT_EQ(load_float(low.data(), type, j), round_to(type, dl[k])) << "rounded twice";
                }
              }
            }
          }
}

TEST_P(TileKernelsTest, LogitGradientOfNoMass) {
  // p = 0 for -inf and for logits far below; the entropy term must not make it NaN.
  std::vector<float> x = {-kInf, -500, 0, -kInf, 1}, dl(5);
  const RowGradient row{{}, 1.3132617f, 0.5822f, 1, 1, 1};
  kernels().logit_gradient(x.data(), 5, nullptr, row, 2, DType::kFloat32, dl.data());
  EXPECT_EQ(dl[0], 0.0f);
  EXPECT_EQ(dl[1], 0.0f);
  EXPECT_EQ(dl[3], 0.0f);
  EXPECT_TRUE(std::isfinite(dl[2]) && dl[2] != 0);
}

TEST_P(TileKernelsTest, ConversionsMatchThePlainOnes) {
  const DType types[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
  std::vector<float> x = normal(301, 3, 0, 6);
  for (const float v :
       {0.0f, -0.0f, kInf, -kInf, kNaN, 65504.0f, 65520.0f, 1e-7f, 6e-8f, 2e-8f, 3.4e38f, 1e-40f, -1e-5f})
    x.push_back(v);
  x.push_back(std::bit_cast<float>(0xffffffffu));  // a NaN whose rounding would carry into the sign
  const auto n = static_cast<std::int64_t>(x.size());
  for (const DType from : types)
    for (const DType to : types) {
      std::vector<std::byte> in(x.size() * 4), out(x.size() * 4 + 4, std::byte{0x5a});
      for (std::int64_t i = 0; i < n; ++i) store_float(in.data(), from, i, x[static_cast<std::size_t>(i)]);
      kernels().convert(in.data(), from, out.data(), to, n);
      EXPECT_EQ(out[x.size() * size_of(to)], std::byte{0x5a}) << "wrote past the end";
      for (std::int64_t i = 0; i < n; ++i) {
        const double want = round_to(to, load_float(in.data(), from, i)), got = load_float(out.data(), to, i);
        ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : want == got)
            << to_string(from) << " to " << to_string(to) << ": " << want << " " << got;
      }
    }
  // Every 16-bit pattern.
  for (const DType from : {DType::kBFloat16, DType::kFloat16}) {
    std::vector<std::uint16_t> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    std::vector<float> out(all.size());
    kernels().convert(all.data(), from, out.data(), DType::kFloat32, 65536);
    for (std::int64_t i = 0; i < 65536; ++i) {
      const double want = load_float(all.data(), from, i), got = out[static_cast<std::size_t>(i)];
      ASSERT_TRUE(std::isnan(want) ? std::isnan(got) : want == got) << to_string(from) << " " << i;
    }
  }
}

TEST_P(TileKernelsTest, ColumnSums) {
  const std::int64_t rows = 37, stride = 50;
  for (const std::int64_t cols : {1, 16, 45}) {
    std::vector<float> m = normal(rows * stride, 1, 0, 7), sums = normal(cols, 1, 0, 8), want = sums;
    sums.push_back(5);
    for (std::int64_t j = 0; j < cols; ++j)
      for (std::int64_t i = 0; i < rows; ++i)
        want[static_cast<std::size_t>(j)] += m[static_cast<std::size_t>(i * stride + j)];
    kernels().add_column_sums(m.data(), DType::kFloat32, rows, cols, stride, sums.data());
    for (std::int64_t j = 0; j < cols; ++j)
      EXPECT_NEAR(sums[static_cast<std::size_t>(j)], want[static_cast<std::size_t>(j)], 1e-4);
    EXPECT_EQ(sums.back(), 5.0f);
  }
}

/// C = A B in fp64 against a library's, and the same bits for rows and columns taken alone.
void check_gemm(DType type, const std::function<void(const GemmShape&, const void*, const void*, float*)>& multiply) {
  for (const bool trans_a : {false, true})
    for (const bool trans_b : {false, true})
      for (const auto [m, n, k] : {std::array<std::int64_t, 3>{2, 2, 1},
                                   {3, 17, 33},
                                   {61, 70, 259},
                                   {130, 530, 40},
                                   {130, 40, 300},
                                   {16, 64, 2100}}) {
        GemmShape s{m, n, k, type, type, trans_a, trans_b, (trans_a ? m : k) + 3, (trans_b ? k : n) + 5, n + 7, false};
        const std::vector<float> af = normal((trans_a ? k : m) * s.lda, 1, 0, 9),
                                 bf = normal((trans_b ? n : k) * s.ldb, 1, 0, 10);
        std::vector<std::byte> a(af.size() * size_of(type)), b(bf.size() * size_of(type));
        for (std::size_t i = 0; i < af.size(); ++i) store_float(a.data(), type, static_cast<std::int64_t>(i), af[i]);
        for (std::size_t i = 0; i < bf.size(); ++i) store_float(b.data(), type, static_cast<std::int64_t>(i), bf[i]);
        const float untouched = 77;
        std::vector<float> c(static_cast<std::size_t>(m * s.ldc), untouched);
        for (const bool accumulate : {false, true}) {
          s.accumulate = accumulate;
          multiply(s, a.data(), b.data(), c.data());
          for (std::int64_t i = 0; i < m; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              double want = 0, size = 0;
              for (std::int64_t p = 0; p < k; ++p) {
                const double term = load_float(a.data(), type, trans_a ? p * s.lda + i : i * s.lda + p) *
                                    load_float(b.data(), type, trans_b ? j * s.ldb + p : p * s.ldb + j);
                want += term, size += std::fabs(term);
              }
              want *= accumulate ? 2 : 1;
              // k roundings of partial sums below `size`, as a random walk of four deviations.
              const double bound =
                  0x1p-24 * (accumulate ? 2 : 1) * size * (4 + 4 * std::sqrt(static_cast<double>(k)) / 3);
              const float got = c[static_cast<std::size_t>(i * s.ldc + j)];
              ASSERT_TRUE(std::fabs(got - want) <= bound) << m << " " << n << " " << k << " " << got << " " << want;
            }
            for (std::int64_t j = n; j < s.ldc; ++j) ASSERT_EQ(c[static_cast<std::size_t>(i * s.ldc + j)], untouched);
          }
        }
        // The last two rows and columns alone: the same bits.
        GemmShape part = s;
        part.m = part.n = 2, part.ldc = 2;
        float corner[4], twice[4];
        const std::int64_t a_at = (m - 2) * (trans_a ? 1 : s.lda), b_at = (n - 2) * (trans_b ? s.ldb : 1);
        part.accumulate = false;
        multiply(part, a.data() + static_cast<std::size_t>(a_at) * size_of(type),
                 b.data() + static_cast<std::size_t>(b_at) * size_of(type), corner);
        std::memcpy(twice, corner, sizeof twice);
        part.accumulate = true;
        multiply(part, a.data() + static_cast<std::size_t>(a_at) * size_of(type),
                 b.data() + static_cast<std::size_t>(b_at) * size_of(type), twice);
        for (std::int64_t i = 0; i < 2; ++i)
          for (std::int64_t j = 0; j < 2; ++j)
            ASSERT_EQ(twice[i * 2 + j], c[static_cast<std::size_t>((m - 2 + i) * s.ldc + n - 2 + j)])
                << m << " " << n << " " << k;
      }
}

TEST_P(TileKernelsTest, OwnGemm) {
  for (const DType type : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    check_gemm(type, [&](const GemmShape& s, const void* a, const void* b, float* c) {
      // A byte behind a line: the alignment inside then takes all that is meant for it.
      constexpr std::align_val_t kLine{64};
      const std::size_t bytes = kernels().gemm_scratch_bytes + 1;
      const auto release = [](void* memory) { ::operator delete(memory, kLine); };
      const std::unique_ptr<void, decltype(release)> scratch(::operator new(bytes, kLine), release);
      std::memset(scratch.get(), 0xff, bytes);
      kernels().gemm(s, a, b, c, static_cast<std::byte*>(scratch.get()) + 1);
    });
}

/// One product with scratch memory that starts as NaN.
void multiply_with(const GemmLibrary& library, const GemmShape& s, const void* a, const void* b, void* c) {
  const SingleThreaded single;
  std::vector<std::byte> scratch(library.scratch_bytes(s) + 64, std::byte{0xff});
  void* at = scratch.data();
  std::size_t space = scratch.size();
  std::align(64, 1, at, space);
  library.multiply(s, a, b, c, at, space);
}

TEST(GemmLibrary, ChosenOneForBf16) {
  const GemmLibrary& library = gemm_library(DType::kBFloat16);
  SCOPED_TRACE(library.describe(DType::kBFloat16));
  check_gemm(DType::kBFloat16,
             [&](const GemmShape& s, const void* a, const void* b, float* c) { multiply_with(library, s, a, b, c); });
}

TEST(GemmLibrary, NarrowOutputIsTheFp32OneRoundedOnce) {
  const GemmLibrary& library = gemm_library(DType::kBFloat16);
  for (const auto [m, n, k] : {std::array<std::int64_t, 3>{2, 3, 5}, {70, 61, 40}, {130, 64, 512}, {33, 100, 700}}) {
    GemmShape s{m, n, k, DType::kBFloat16, DType::kBFloat16, true, false, m + 3, n + 5, n, false};
    if (!library.narrow_output(s)) GTEST_SKIP() << library.describe(DType::kBFloat16) << " has fp32 output only";
    const std::vector<float> af = normal(k * s.lda, 1, 0, 13), bf = normal(k * s.ldb, 1, 0, 14);
    std::vector<std::uint16_t> a(af.size()), b(bf.size()), low(static_cast<std::size_t>(m * n));
    tile_kernels().convert(af.data(), DType::kFloat32, a.data(), DType::kBFloat16, std::ssize(af));
    tile_kernels().convert(bf.data(), DType::kFloat32, b.data(), DType::kBFloat16, std::ssize(bf));
    std::vector<float> c(low.size());
    multiply_with(library, s, a.data(), b.data(), c.data());
    s.narrow_output = true;
    multiply_with(library, s, a.data(), b.data(), low.data());
    for (std::size_t i = 0; i < c.size(); ++i) {
      // Either neighbour of a sum that lies, to the order of its additions, half way between two.
      const double bound = 0x1.01p-8 * std::fabs(c[i]) + 0x1p-20 * std::sqrt(static_cast<double>(k));
      ASSERT_TRUE(std::fabs(bf16_to_float(low[i]) - c[i]) <= bound)
          << m << " " << n << " " << k << ": " << bf16_to_float(low[i]) << " " << c[i];
    }
  }
}

TEST(GemmLibrary, LogitsOfARowDependOnNoOtherRow) {
  for (const DType type : {DType::kBFloat16, DType::kFloat32})
    for (const std::int64_t h : {7, 100, 576, 1100, 2100}) {
      constexpr std::int64_t kRows = 130, kCols = 2048;
      const std::vector<float> xf = normal(kRows * h, 1, 0, 11), wf = normal(kCols * h, 1, 0, 12);
      std::vector<std::byte> x(xf.size() * size_of(type)), w(wf.size() * size_of(type));
      tile_kernels().convert(xf.data(), DType::kFloat32, x.data(), type, std::ssize(xf));
      tile_kernels().convert(wf.data(), DType::kFloat32, w.data(), type, std::ssize(wf));
      for (const std::int64_t n : {1, 2, 17, 100, 128, 129, 300, 1025, 2048}) {
        const auto logits = [&](std::int64_t first, std::int64_t m) {
          std::vector<float> c(static_cast<std::size_t>(m * n));
          multiply_with(invariant_gemm(type, n), {m, n, h, type, type, false, true, h, h, n, false},
                        x.data() + static_cast<std::size_t>(first * h) * size_of(type), w.data(), c.data());
          return c;
        };
        const std::vector<float> all = logits(0, kRows);
        for (const std::int64_t m : {2, 3, 8, 16, 17, 33, 64, 127})
          for (const std::int64_t first : {std::int64_t{0}, kRows - m}) {
            const std::vector<float> part = logits(first, m);
            ASSERT_EQ(std::memcmp(part.data(), all.data() + first * n, part.size() * sizeof(float)), 0)
                << to_string(type) << " h " << h << " n " << n << ": " << m << " rows from " << first;
          }
      }
    }
}

}  // namespace
}  // namespace lmhead
