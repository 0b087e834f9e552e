// lmhead pack: which sequences share a packed row, and how full the rows are.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "checks.h"
#include "commands.h"
#include "lengths_file.h"
#include "lmhead/layout.h"
#include "lmhead/packing.h"
#include "output_file.h"
#include "pack_plot.h"

namespace lmhead::tools {
namespace {

struct Options {
  std::string lengths, quantiles, set, algorithm = "mffd", precision = "none", plot;
  std::int64_t capacity = 0, count = 0, tp = 1, cp = 1, dp = 1, min_bins = 0;
  std::uint64_t seed = 0;
  std::optional<std::int64_t> sequence_multiple, total_multiple;
  bool fp8 = false, truncate = false, allow_empty = false, allow_oversize = false, json = false;
};

template <class T>
T value_of(Result<T> result) {
  require_ok(result.status());
  return std::move(result).value();
}

PackingOptions packing_options(const Options& options) {
  LayoutOptions layout{options.tp, options.cp, value_of(precision_from_name(options.precision))};
  if (options.fp8) layout.precision = Precision::kFp8;
  PackingOptions packing;
  packing.algorithm = value_of(packing_algorithm_from_name(options.algorithm));
  packing.min_bins = options.min_bins;
  packing.bin_multiple = options.dp;
  packing.sequence_multiple = options.sequence_multiple.value_or(value_of(sequence_alignment(layout)));
  packing.total_multiple = options.total_multiple.value_or(value_of(total_alignment(layout)));
  packing.allow_empty = options.allow_empty;
  packing.allow_oversize = options.allow_oversize;
  return packing;
}

std::vector<std::int64_t> input(const Options& options) {
  if (options.lengths.empty() == options.quantiles.empty())
    throw bad_input("LENGTHS: expected either a file of lengths or --quantiles with --set and --count");
  std::vector<std::int64_t> lengths = options.quantiles.empty()
                                          ? read_lengths(options.lengths)
                                          : draw_lengths(options.quantiles, options.set, options.count, options.seed);
  if (options.truncate)
    for (std::int64_t& length : lengths) length = std::min(length, options.capacity);
  return lengths;
}

nlohmann::ordered_json report(const Options& options, const PackingOptions& packing, const PackingMetrics& metrics) {
  return {{"algorithm", to_string(packing.algorithm)},
          {"capacity", options.capacity},
          {"sequence_multiple", packing.sequence_multiple},
          {"total_multiple", packing.total_multiple},
          {"dp", options.dp},
          {"sequences", metrics.sequences},
          {"tokens", metrics.tokens},
          {"footprint", metrics.footprint},
          {"num_bins", metrics.bins},
          {"empty_bins", metrics.empty_bins},
          {"lower_bound", metrics.lower_bound},
          {"waste", metrics.waste},
          {"utilization", metrics.utilization},
          {"balance", metrics.balance}};
}

void run(const Options& options) {
  const PackingOptions packing = packing_options(options);
  for (const std::string* input : {&options.lengths, &options.quantiles})
    require_other_file(options.plot, *input, "the lengths");
  const std::vector<std::int64_t> lengths = input(options);
  std::optional<OutputFile> plot;
  if (!options.plot.empty()) {
    remove_on_interrupt();
    plot.emplace(options.plot);
  }
  const Bins bins = value_of(pack(lengths, options.capacity, packing));
  const PackingMetrics metrics = value_of(packing_metrics(lengths, options.capacity, bins, packing));
  if (plot) {
    plot->write(packing_svg(lengths, options.capacity, bins, metrics, packing.algorithm));
    plot->commit();
  }
  if (options.json) {
    nlohmann::ordered_json object = {{"bins", bins}};
    object.update(report(options, packing, metrics));
    fmt::print("{}\n", object.dump());
    return;
  }
  const auto line = [](const char* name, const std::string& value) { fmt::print("{:<14}{}\n", name, value); };
  line("algorithm", to_string(packing.algorithm));
  line("sequences", fmt::format("{}, {} tokens", metrics.sequences, metrics.tokens));
  line("bins", fmt::format("{} of {} tokens{}", metrics.bins, options.capacity,
                           metrics.empty_bins > 0 ? fmt::format(", {} empty", metrics.empty_bins) : ""));
  line("lower bound", fmt::format("{} (waste {:.3f} %)", metrics.lower_bound, 100 * metrics.waste));
  line("footprint", fmt::format("{} tokens in steps of {} a sequence, {} a bin", metrics.footprint,
                                packing.sequence_multiple, packing.total_multiple));
  line("utilization", fmt::format("{:.3f} %", 100 * metrics.utilization));
  line("balance", fmt::format("{:.4f}", metrics.balance));
  if (options.dp > 1)
    line("per rank",
         fmt::format("{} bins on each of {}; bin i on rank i % {}", metrics.bins / options.dp, options.dp, options.dp));
}

}  // namespace

void add_pack(CLI::App& app) {
  CLI::App* command = app.add_subcommand("pack", "Pack sequences into rows by their lengths");
  auto options = std::make_shared<Options>();
  command->add_option("LENGTHS", options->lengths,
                      ".txt or - (one a line), .tsv (column length), .jsonl (field length)");
  command->add_option("--capacity", options->capacity, "Tokens a bin")->required();
  command->add_option("--algorithm", options->algorithm, "mffd, ffd, bfd, concatenative, balanced (mffd)");
  command->add_option("--tp", options->tp, "Tensor-parallel ranks (1)");
  command->add_option("--cp", options->cp, "Context-parallel ranks (1)");
  CLI::Option* precision = command->add_option("--precision", options->precision, "none, fp8 or mxfp8 (none)");
  command->add_flag("--fp8", options->fp8, "Same as --precision fp8")->excludes(precision);
  command->add_option("--sequence-multiple", options->sequence_multiple, "Padding of a sequence (that of --tp, --cp)");
  command->add_option("--total-multiple", options->total_multiple,
                      "Padding of a bin (that of --tp, --cp, --precision)");
  command->add_option("--dp", options->dp, "Data-parallel ranks: the number of bins is a multiple of it (1)");
  command->add_option("--min-bins", options->min_bins, "At least this many bins (0)");
  command->add_flag("--allow-empty", options->allow_empty, "Further bins stay empty instead of taking sequences");
  command->add_flag("--allow-oversize", options->allow_oversize, "A longer sequence gets its own bin");
  command->add_flag("--truncate", options->truncate, "Cut lengths to the capacity first");
  CLI::Option* quantiles =
      command->add_option("--quantiles", options->quantiles, "Draw lengths from this table (shapes/lengths.tsv)");
  CLI::Option* set = command->add_option("--set", options->set, "Row of the table")->needs(quantiles);
  CLI::Option* count = command->add_option("--count", options->count, "Lengths to draw")->needs(quantiles);
  command->add_option("--seed", options->seed, "Seed of the draw (0)")->needs(quantiles);
  quantiles->needs(set)->needs(count);
  command->add_flag("--json", options->json, "One JSON object on stdout, with the bins");
  command->add_option("--plot", options->plot, "Write a picture of the bins to this .svg file")->check(not_empty());
  command->callback([options] { run(*options); });
}

}  // namespace lmhead::tools
