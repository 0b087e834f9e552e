// What `lmhead score` computes and shows: per-row results, per-sequence figures, and how they came about.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "batch_file.h"

namespace lmhead::tools {

/// Means over the scored rows of some sequence (or of all), in nats. Without a scored row they are absent.
struct Figures {
  std::int64_t rows = 0;
  std::int64_t scored = 0;
  std::optional<double> mean_logprob;
  std::optional<double> mean_entropy;     ///< also absent when entropy was not asked for
  std::optional<double> perplexity;       ///< exp(-mean_logprob)
  std::optional<std::int64_t> least_row;  ///< the row with the lowest log-prob
};

struct Scores {
  std::vector<float> logprob;  ///< [N] nats; 0 for rows that score nothing
  std::vector<float> entropy;  ///< [N] nats; empty when not asked for
  std::vector<Figures> sequences;
  Figures total;

  // How they were computed.
  std::string batch, model, tensor, weight_dtype, hidden_dtype, backend, version;
  std::int64_t vocab = 0, width = 0;
  double temperature = 1.0, logit_scale = 1.0;
  std::optional<double> softcap;
  int threads = 0;
  double seconds = 0.0;  ///< the library's calls alone, without reading, checking and writing
};

/// Fills sequences and total from logprob and entropy.
void summarise(const Batch& batch, Scores& scores);

/// JSON lines: each token when `tokens`, each sequence, then one summary. See docs/command.md.
std::string to_json_lines(const Batch& batch, const Scores& scores, bool tokens);
/// A short table for people.
std::string to_table(const Scores& scores);

}  // namespace lmhead::tools
