#include "scores.h"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>

namespace lmhead::tools {
namespace {

using nlohmann::ordered_json;

Figures figures(const Batch& batch, const Scores& scores, std::int64_t begin, std::int64_t end) {
  Figures out;
  out.rows = end - begin;
  double logprob = 0.0, entropy = 0.0;
  for (std::int64_t i = begin; i < end; ++i) {
    if (batch.targets[i] == kIgnoreIndex) continue;
    ++out.scored;
    logprob += scores.logprob[i];
    if (!scores.entropy.empty()) entropy += scores.entropy[i];
    if (!out.least_row || scores.logprob[i] < scores.logprob[*out.least_row]) out.least_row = i;
  }
  if (out.scored == 0) return out;
  out.mean_logprob = logprob / static_cast<double>(out.scored);
  out.perplexity = std::exp(-*out.mean_logprob);
  if (!scores.entropy.empty()) out.mean_entropy = entropy / static_cast<double>(out.scored);
  return out;
}

template <class T>
ordered_json or_null(const std::optional<T>& value) {
  return value ? ordered_json(*value) : ordered_json(nullptr);
}

/// A float in the fewest digits that read back as the same float.
double shortest(float value) { return std::stod(fmt::format("{}", value)); }

void put_figures(ordered_json& line, const Figures& f) {
  line["rows"] = f.rows;
  line["scored"] = f.scored;
  line["mean_logprob"] = or_null(f.mean_logprob);
  line["perplexity"] = or_null(f.perplexity);
  line["mean_entropy"] = or_null(f.mean_entropy);
}

std::string number(const std::optional<double>& value, int digits) {
  return value ? fmt::format("{:.{}f}", *value, digits) : "-";
}

}  // namespace

void summarise(const Batch& batch, Scores& scores) {
  scores.sequences.clear();
  for (std::size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s)
    scores.sequences.push_back(figures(batch, scores, batch.cu_seqlens[s], batch.cu_seqlens[s + 1]));
  scores.total = figures(batch, scores, 0, batch.rows());
}

std::string to_json_lines(const Batch& batch, const Scores& scores, bool tokens) {
  std::string out;
  for (std::size_t s = 0; s < scores.sequences.size(); ++s) {
    const std::int64_t begin = batch.cu_seqlens[s];
    if (tokens) {
      for (std::int64_t i = begin; i < batch.cu_seqlens[s + 1]; ++i) {
        const bool scored = batch.targets[i] != kIgnoreIndex;
        ordered_json line = {
            {"type", "token"}, {"row", i}, {"sequence", s}, {"position", i - begin}, {"scored", scored}};
        line["target"] = scored ? ordered_json(batch.targets[i]) : ordered_json(nullptr);
        line["logprob"] = shortest(scores.logprob[i]);
        if (!scores.entropy.empty()) line["entropy"] = shortest(scores.entropy[i]);
        out += line.dump() + "\n";
      }
    }
    ordered_json line = {{"type", "sequence"}, {"sequence", s}, {"begin", begin}};
    put_figures(line, scores.sequences[s]);
    line["lowest_logprob_row"] = or_null(scores.sequences[s].least_row);
    out += line.dump() + "\n";
  }
  ordered_json line = {{"type", "summary"}, {"sequences", scores.sequences.size()}};
  put_figures(line, scores.total);
  line["batch"] = scores.batch;
  line["model"] = scores.model;
  line["tensor"] = scores.tensor;
  line["vocab"] = scores.vocab;
  line["hidden"] = scores.width;
  line["weight_dtype"] = scores.weight_dtype;
  line["hidden_dtype"] = scores.hidden_dtype;
  line["temperature"] = scores.temperature;
  line["softcap"] = or_null(scores.softcap);
  line["logit_scale"] = scores.logit_scale;
  line["backend"] = scores.backend;
  line["threads"] = scores.threads;
  line["seconds"] = scores.seconds;
  line["version"] = scores.version;
  return out + line.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

std::string to_table(const Scores& scores) {
  constexpr std::size_t kShown = 40;
  std::string out = fmt::format("{:>8} {:>8} {:>8} {:>13} {:>11} {:>13}\n", "sequence", "rows", "scored",
                                "mean logprob", "perplexity", "mean entropy");
  const auto row = [&](const std::string& name, const Figures& f) {
    out += fmt::format("{:>8} {:>8} {:>8} {:>13} {:>11} {:>13}\n", name, f.rows, f.scored, number(f.mean_logprob, 4),
                       number(f.perplexity, 2), number(f.mean_entropy, 4));
  };
  for (std::size_t s = 0; s < scores.sequences.size() && s < kShown; ++s) row(std::to_string(s), scores.sequences[s]);
  if (scores.sequences.size() > kShown) out += fmt::format("     ... {} more\n", scores.sequences.size() - kShown);
  row("all", scores.total);
  out += fmt::format("{} [{}, {}] {}, backend {}, {} threads, {:.3f} s\n", scores.tensor, scores.vocab, scores.width,
                     scores.weight_dtype, scores.backend, scores.threads, scores.seconds);
  return out;
}

}  // namespace lmhead::tools
