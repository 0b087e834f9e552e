// Sharded heads against one rank: bits over equal shards, ragged and empty shards, reductions, traffic, faults.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/element.h"
#include "lmhead/parallel.h"
#include "rank_threads.h"

namespace lmhead {
namespace {

using testing::run_ranks;

/// Hidden, weight, ids and upstream gradients on the host, logits of standard deviation 3.
struct Data {
  std::int64_t n, h, v;
  DType dtype;
  std::vector<std::byte> hidden, weight;
  std::vector<std::int64_t> targets;
  std::vector<float> a, g;

  Data(std::int64_t rows, std::int64_t width, std::int64_t vocab, DType type = DType::kBFloat16)
      : n(rows), h(width), v(vocab), dtype(type) {
    std::mt19937 rng(static_cast<unsigned>(n * 31 + h * 7 + v));
    std::normal_distribution<double> normal;
    hidden.resize(static_cast<std::size_t>(n * h) * size_of(dtype));
    weight.resize(static_cast<std::size_t>(v * h) * size_of(dtype));
    for (std::int64_t i = 0; i < n * h; ++i) store_float(hidden.data(), dtype, i, normal(rng));
    for (std::int64_t i = 0; i < v * h; ++i)
      store_float(weight.data(), dtype, i, normal(rng) * 3 / std::sqrt(double(h)));
    for (std::int64_t i = 0; i < n; ++i) {
      targets.push_back(i == 0 ? 0 : i == 1 ? v - 1 : static_cast<std::int64_t>(rng() % static_cast<unsigned>(v)));
      a.push_back(static_cast<float>(normal(rng)));
      g.push_back(static_cast<float>(normal(rng)));
    }
  }

  Problem problem(VocabShard shard, EntropyMode entropy = EntropyMode::kGrad) const {
    Problem p;
    p.hidden = {hidden.data(), n, h, h, dtype};
    p.weight = {weight.data() + static_cast<std::size_t>(shard.start * h) * size_of(dtype), shard.size, h, h, dtype};
    p.targets = {targets.data(), n, 1, DType::kInt64};
    p.vocab_start = shard.start;
    p.vocab_size = v;
    p.entropy = entropy;
    return p;
  }
};

struct Results {
  std::vector<float> logprob, entropy, lse;
  explicit Results(std::int64_t n)
      : logprob(static_cast<std::size_t>(n), std::numeric_limits<float>::quiet_NaN()), entropy(logprob), lse(logprob) {}
  ForwardOutputs outputs(bool with_entropy = true) {
    const auto view = [](std::vector<float>& v) {
      return Vector{v.data(), static_cast<std::int64_t>(v.size()), 1, DType::kFloat32};
    };
    return {view(logprob), with_entropy ? view(entropy) : Vector{}, view(lse)};
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

std::vector<const char*> cpu_backends() {
  std::vector<const char*> names;
  for (const BackendInfo& b : backends())
    if (b.available && b.device == Device::kCpu) names.push_back(b.name.c_str());
  return names;
}

TEST(VocabShard, CutsAsTorchChunkDoes) {
  const auto cut = [](std::int64_t v, int ranks) {
    std::string text;
    for (int r = 0; r < ranks; ++r) {
      const VocabShard s = vocab_shard(v, r, ranks);
      text += std::to_string(s.start) + "+" + std::to_string(s.size) + " ";
    }
    return text;
  };
  EXPECT_EQ(cut(8, 4), "0+2 2+2 4+2 6+2 ");
  EXPECT_EQ(cut(50257, 3), "0+16753 16753+16753 33506+16751 ");
  EXPECT_EQ(cut(5, 4), "0+2 2+2 4+1 5+0 ");
  EXPECT_EQ(cut(1, 3), "0+1 1+0 1+0 ");
}

TEST(ShardedForward, EqualShardsGiveTheBitsOfOneRankInOneGather) {
  const Data data(13, 16, 8 * 1100);  // octants longer than a segment
  for (const char* backend : cpu_backends()) {
    Execution execution;
    execution.backend = backend;
    Results one(data.n);
    ASSERT_TRUE(forward(data.problem({0, data.v}), one.outputs(), execution).ok());
    for (const int ranks : {1, 2, 4, 8}) {
      for (const bool check : {true, false}) {
        Execution how = execution;
        how.check = check;
        const auto statuses = run_ranks(ranks, [&](Communicator& tp) -> Status {
          Results mine(data.n);
          LMHEAD_RETURN_IF_ERROR(
              sharded_forward(data.problem(vocab_shard(data.v, tp.rank(), ranks)), tp, mine.outputs(), how));
          EXPECT_TRUE(same_bits(mine.logprob, one.logprob)) << backend << " tp " << ranks;
          EXPECT_TRUE(same_bits(mine.entropy, one.entropy)) << backend << " tp " << ranks;
          EXPECT_TRUE(same_bits(mine.lse, one.lse)) << backend << " tp " << ranks;
          EXPECT_EQ(tp.traffic().all_gathers, 1);
          EXPECT_EQ(tp.traffic().exchanges, check ? 1 : 0);
          EXPECT_EQ(tp.traffic().bytes_sent, (ranks - 1) * (16 * data.n + (check ? 512 : 0)));
          EXPECT_EQ(tp.traffic().all_reduces + tp.traffic().reduce_scatters, 0);
          return {};
        });
        for (const Status& s : statuses) EXPECT_TRUE(s.ok()) << s.to_string();
      }
    }
  }
}

TEST(ShardedForward, OneBadRankFailsEveryRankAndTheGroupStaysUsable) {
  const Data data(5, 8, 24);
  const Data longer(6, 8, 24);
  struct Fault {
    const char* message;
    std::function<void(Problem&)> edit;
  };
  std::vector<std::int64_t> bad = data.targets;
  bad[3] = 24;
  std::vector<std::int64_t> other = data.targets;
  other[2] = (other[2] + 1) % 24;
  const Fault faults[] = {
      {"targets: expected ids in [0, 24)", [&](Problem& p) { p.targets.data = bad.data(); }},
      {"ranks disagree on N",
       [&](Problem& p) {
         p = longer.problem({12, 12});
       }},
      {"ranks disagree on temperature: expected the same on all ranks, got 1 on rank 0 and 2 on rank 1",
       [](Problem& p) { p.temperature = 2; }},
      {"ranks disagree on softcap", [](Problem& p) { p.softcap = 30; }},
      {"ranks disagree on the entropy mode", [](Problem& p) { p.entropy = EntropyMode::kMetric; }},
      {"ranks disagree on targets", [&](Problem& p) { p.targets.data = other.data(); }},
      {"vocab_start: expected 12 on rank 1", [](Problem& p) { p.vocab_start = 11; }},
      {"vocab_size: expected the global vocabulary", [](Problem& p) { p.vocab_size.reset(), p.vocab_start = 0; }},
      {"vocab_size: expected the sum of all shards 23", [](Problem& p) { p.weight.rows = 11; }},
  };
  for (const Fault& fault : faults) {
    const auto statuses = run_ranks(2, [&](Communicator& tp) -> Status {
      Problem p = data.problem(vocab_shard(data.v, tp.rank(), 2));
      if (tp.rank() == 1) fault.edit(p);
      Results mine(p.hidden.rows);
      const Status status = sharded_forward(p, tp, mine.outputs());
      for (const float value : mine.logprob) EXPECT_TRUE(std::isnan(value)) << "a partial result";
      const Problem good = data.problem(vocab_shard(data.v, tp.rank(), 2));
      Results again(data.n);
      EXPECT_TRUE(sharded_forward(good, tp, again.outputs()).ok());
      return status;
    });
    for (const Status& s : statuses) EXPECT_NE(s.message().find(fault.message), std::string::npos) << s.to_string();
    EXPECT_EQ(statuses[0].code(), StatusCode::kCommunication) << fault.message;
  }
}

}  // namespace
}  // namespace lmhead
