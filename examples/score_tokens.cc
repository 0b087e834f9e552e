#include <cstdio>
#include <vector>

#include "lmhead/lmhead.h"

int main() {
  const std::int64_t n = 2, h = 4, v = 8;  // tokens, hidden width, vocabulary
  std::vector<float> hidden = {0, 0, 0, 0, 1, 2, 3, 4}, weight(v * h), logprob(n), entropy(n);
  for (std::int64_t j = 0; j < v; ++j) weight[j * h] = static_cast<float>(j);
  std::vector<std::int32_t> targets = {5, 7};
  lmhead::Problem problem;
  problem.hidden = {hidden.data(), n, h, h, lmhead::DType::kFloat32};
  problem.weight = {weight.data(), v, h, h, lmhead::DType::kFloat32};
  problem.targets = {targets.data(), n, 1, lmhead::DType::kInt32};
  problem.entropy = lmhead::EntropyMode::kMetric;
  const lmhead::Status status = lmhead::forward(problem, {{logprob.data(), n}, {entropy.data(), n}, {}});
  if (!status.ok()) return std::fprintf(stderr, "%s\n", status.message().c_str()), 1;
  for (std::int64_t i = 0; i < n; ++i) std::printf("logprob %.4f  entropy %.4f\n", logprob[i], entropy[i]);
}
