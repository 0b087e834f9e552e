// Runs one problem on one backend through the public calls, with every guard on: outputs and workspace
// start as NaN, guard bytes surround them, cells between strided outputs and all inputs must survive.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lmhead/lmhead.h"
#include "lmhead/tuning.h"
#include "testing/problem.h"

namespace lmhead::testing {

struct RunOptions {
  int threads = 0;
  std::optional<bool> check = std::nullopt;
  std::size_t workspace_budget = 0;
  std::string configuration = "auto";  ///< of the operations that have it; the others take their default
  bool own_workspace = true;           ///< false: nullptr, the call allocates (CPU only)
  /// Sizes of the vocabulary shards; empty: the one-shot forward. Shards run forward_partial, combine
  /// and one backward each; the parts of dX are summed on the host.
  std::vector<std::int64_t> shards = {};
  bool backward = true;
  bool use_dlogprob = true, use_dentropy = true;
  bool want_dx = true, want_dw = true, want_db = true;
  bool fp32_gradients = false;   ///< dX, dW and db in the result type instead of the input's
  bool accumulate = false;       ///< implies fp32_gradients; the buffers start at prefill()
  std::size_t cache_budget = 0;  ///< > 0: the forward fills a poisoned cache of at most this size, per shard
  int backwards = 1;             ///< how often the backward runs, into the same outputs
  std::int64_t out_pad = 0;      ///< elements between the rows and the elements of outputs
};

/// What accumulation starts from: element i of a gradient.
inline double prefill(std::int64_t i) { return static_cast<double>(i % 7) - 3.0; }

/// Results on the host, rows without padding.
struct Outcome {
  Status status;
  std::string violation;        ///< a guard that was broken, or ""
  std::vector<double> states;   ///< [S * N, 4] with shards
  std::size_t cache_bytes = 0;  ///< of all shards
  std::vector<double> logprob, entropy, lse, dx, dw, db;

  bool ok() const { return status.ok() && violation.empty(); }
  std::string message() const { return status.ok() ? violation : status.to_string(); }
};

Outcome run(const BackendInfo& backend, const TestProblem& problem, const RunOptions& options = {});

/// Bit for bit, so that NaN equals itself and -0 differs from 0.
bool same_bits(const std::vector<double>& a, const std::vector<double>& b);
/// "" or the first place where they differ.
std::string first_difference(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace lmhead::testing
