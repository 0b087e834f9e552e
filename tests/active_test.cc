// Work only where the loss looks: the products that a mask saves, counted.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "cpu/gemm.h"
#include "lmhead/lmhead.h"

namespace lmhead {
namespace {

constexpr std::int64_t kRows = 512, kHidden = 64, kVocab = 2048;

struct Data {
  Data()
      : hidden(kRows * kHidden), weight(kVocab * kHidden), targets(kRows), lse(kRows), entropy(kRows), logprob(kRows) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (float& x : hidden) x = normal(rng);
    for (float& w : weight) w = normal(rng) * 0.2f;
    for (std::int32_t& y : targets) y = static_cast<std::int32_t>(rng() % kVocab);
  }
  Problem problem() const {
    Problem p;
    p.hidden = {hidden.data(), kRows, kHidden, kHidden, DType::kFloat32};
    p.weight = {weight.data(), kVocab, kHidden, kHidden, DType::kFloat32};
    p.targets = {targets.data(), kRows, 1, DType::kInt32};
    p.entropy = EntropyMode::kGrad;
    return p;
  }
  Status forward(const Problem& p) {
    Execution e;
    e.backend = "cpu";
    const auto out = [](std::vector<float>& v) { return Vector{v.data(), kRows, 1, DType::kFloat32}; };
    return lmhead::forward(p, {out(logprob), out(entropy), out(lse)}, e);
  }
  Status backward(const Problem& p, const std::vector<float>& upstream, std::vector<float>& dx,
                  std::vector<float>& dw) {
    Execution e;
    e.backend = "cpu";
    const auto in = [](const std::vector<float>& v) { return ConstVector{v.data(), kRows, 1, DType::kFloat32}; };
    dx.assign(hidden.size(), NAN);
    dw.assign(weight.size(), NAN);
    return lmhead::backward(p, {in(lse), in(entropy), in(upstream), in(upstream)},
                            {{dx.data(), kRows, kHidden, kHidden, DType::kFloat32},
                             {dw.data(), kVocab, kHidden, kHidden, DType::kFloat32},
                             {}},
                            e);
  }

  std::vector<float> hidden, weight;
  std::vector<std::int32_t> targets;
  std::vector<float> lse, entropy, logprob;
};

std::int64_t counted(const std::function<Status()>& call) {
  const std::int64_t before = multiply_adds();
  const Status status = call();
  EXPECT_TRUE(status.ok()) << status.to_string();
  return multiply_adds() - before;
}

constexpr std::int64_t kOneProduct = kRows * kHidden * kVocab;

TEST(Active, DenseCallsDoOneAndThreeProducts) {
  Data d;
  const Problem p = d.problem();
  std::vector<float> upstream(kRows, 1.0f), dx, dw;
  EXPECT_EQ(counted([&] { return d.forward(p); }), kOneProduct);
  EXPECT_EQ(counted([&] { return d.backward(p, upstream, dx, dw); }), 3 * kOneProduct);
}

TEST(Active, ScatteredMaskHalvesEveryProduct) {
  Data d;
  std::vector<std::uint8_t> mask(kRows);
  for (std::size_t i = 0; i < mask.size(); ++i) mask[i] = i % 2;
  Problem p = d.problem();
  p.active = {mask.data(), kRows, 1, DType::kBool};
  std::vector<float> upstream(kRows, 1.0f), dx, dw;
  EXPECT_EQ(counted([&] { return d.forward(p); }), kOneProduct / 2);
  EXPECT_EQ(counted([&] { return d.backward(p, upstream, dx, dw); }), 3 * kOneProduct / 2);
}

TEST(Active, RowsWithoutAnUpstreamGradientAreDroppedByThemselves) {
  Data d;
  const Problem p = d.problem();
  ASSERT_TRUE(d.forward(p).ok());
  // Half of the advantages of a GRPO step are exactly zero when their group agrees.
  std::vector<float> upstream(kRows), dx, dw;
  for (std::size_t i = 0; i < upstream.size(); ++i)
    upstream[i] = i / 16 % 2 == 0 ? 0.0f : 0.01f * static_cast<float>(i);
  EXPECT_EQ(counted([&] { return d.backward(p, upstream, dx, dw); }), 3 * kOneProduct / 2);
  for (std::size_t i = 0; i < upstream.size(); ++i) {
    const bool zero = upstream[i] == 0.0f;
    for (std::size_t k = 0; k < static_cast<std::size_t>(kHidden); ++k)
      ASSERT_EQ(dx[i * kHidden + k] == 0.0f, zero) << "row " << i;
  }
}

TEST(Active, NothingActiveRunsNoProduct) {
  Data d;
  const std::vector<std::int32_t> mask(kRows, 0);
  Problem p = d.problem();
  p.active = {mask.data(), kRows, 1, DType::kInt32};
  std::vector<float> upstream(kRows, 1.0f), dx, dw;
  EXPECT_EQ(counted([&] { return d.forward(p); }), 0);
  EXPECT_EQ(counted([&] { return d.backward(p, upstream, dx, dw); }), 0);
  for (float v : d.logprob) ASSERT_EQ(v, 0.0f);
  for (float v : dx) ASSERT_EQ(v, 0.0f);
  for (float v : dw) ASSERT_EQ(v, 0.0f);
}

}  // namespace
}  // namespace lmhead
