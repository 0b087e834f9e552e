// lmhead bench: time, GEMM units and memory of a backend on one head shape.
#include "bench.h"

#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "checks.h"
#include "commands.h"
#include "device.h"
#include "head_table.h"
#include "machine.h"

namespace lmhead::tools {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::vector<std::string> ops = {"forward"}, entropies = {"metric"}, patterns = {"suffix"};
  std::vector<double> active = {1.0};
  std::string head, dtype = "bfloat16", backend = "cpu", baseline, command;
  std::int64_t hidden = 0, vocab = 0, tokens = 4096, tp = 1, cp = 1;
  double workspace_mib = 0;
  int threads = 0, reps = 7;
  bool json = false;
};

EntropyMode entropy_mode(const std::string& name) {
  return name == "off" ? EntropyMode::kOff : name == "metric" ? EntropyMode::kMetric : EntropyMode::kGrad;
}
const char* name_of(EntropyMode mode) {
  return mode == EntropyMode::kOff ? "off" : mode == EntropyMode::kMetric ? "metric" : "grad";
}

/// First or last line that a command prints, without its end; "" when it fails.
std::string output_of(const std::string& command, bool last_line = false) {
  std::string text;
  FILE* pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  char part[4096];
  for (std::size_t got; (got = std::fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, got);
  if (::pclose(pipe) != 0) return {};
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return last_line ? text.substr(text.rfind('\n') + 1) : text.substr(0, text.find('\n'));
}

BenchRun make_run(const Options& o) {
  BenchRun run{};
  const Head head = head_or_sizes(o.head, o.hidden, o.vocab);
  if (o.tokens % o.cp != 0)
    throw bad_input(fmt::format("--cp: expected a divisor of --tokens {}, got {}", o.tokens, o.cp));
  if (head.v % o.tp != 0)
    throw bad_input(fmt::format("--tp: expected a divisor of the vocabulary {}, got {}", head.v, o.tp));
  run.n = o.tokens / o.cp, run.h = head.h, run.v_local = head.v / o.tp, run.vocab_size = head.v;
  run.softcap = head.softcap, run.logit_scale = head.logit_scale;
  run.dtype = o.dtype == "float32" ? DType::kFloat32 : o.dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
  run.threads = o.threads, run.reps = o.reps;
  run.workspace_budget = static_cast<std::size_t>(o.workspace_mib * 0x1p20);
  for (const std::string& op : o.ops)
    for (const std::string& entropy : o.entropies)
      for (const double active : o.active) {
        const std::vector<std::string> dense = {"dense"};
        for (const std::string& pattern : active >= 1 ? dense : o.patterns)
          run.cases.push_back({op, entropy_mode(entropy), active, pattern});
      }
  return run;
}

/// The case of the same op that differs from `c` in entropy (off) or in the mask (dense) alone.
std::optional<std::size_t> find_case(const BenchRun& run, const BenchCase& c, EntropyMode entropy,
                                     const std::string& pattern, double active) {
  for (std::size_t k = 0; k < run.cases.size(); ++k) {
    const BenchCase& other = run.cases[k];
    if (other.op == c.op && other.entropy == entropy && other.pattern == pattern && other.active == active) return k;
  }
  return {};
}

Json run_baseline(const Options& o, const BenchRun& run, const BenchCase& c) {
  const std::string command =
      fmt::format("{} --op {} --tokens {} --hidden {} --vocab {} --dtype {} --entropy {} --threads {} --reps {}",
                  o.baseline, c.op, run.n, run.h, run.v_local, o.dtype, name_of(c.entropy),
                  o.threads > 0 ? o.threads : usable_cpus(), std::max(3, o.reps / 2));
  Json record = Json::parse(output_of(command, true), nullptr, false);
  if (!record.is_object() || !record.contains("ms"))
    throw failed(
        "--baseline: expected a command that prints a JSON object with name, ms and extra_mib, got none from: " +
        command);
  return record;
}

/// What `lmhead info` says of a backend.
std::string description_of(const std::string& name) {
  for (const BackendInfo& info : backends())
    if (info.name == name) return info.description;
  return {};
}

Json make_record(const Options& o, const BenchRun& run, const BenchResult& result, std::size_t k) {
  const BenchCase& c = run.cases[k];
  const double ms = median(result.case_ms[k]);
  const double gemms = c.op == "forward" ? 1 : 4;
  Json r = {{"op", c.op},
            {"backend", result.backend},
            {"n", run.n},
            {"h", run.h},
            {"v", run.v_local},
            {"dtype", o.dtype},
            {"entropy", name_of(c.entropy)},
            {"active", result.active[k]},
            {"pattern", c.pattern},
            {"ms", ms},
            {"gemm_ms", nullptr},
            {"units", nullptr}};
  if (!result.gemm_ms.empty()) {
    r["gemm_ms"] = median(result.gemm_ms);
    r["units"] = median_ratio(result.case_ms[k], result.gemm_ms);
  }
  r["tflops"] = gemms * 2 * static_cast<double>(run.n) * static_cast<double>(run.h) * static_cast<double>(run.v_local) *
                result.active[k] / ms * 1e-9;
  const auto ratio = [&](std::optional<std::size_t> other) {
    return other && *other != k ? Json(median_ratio(result.case_ms[k], result.case_ms[*other])) : Json();
  };
  r["of_entropy_off"] = ratio(find_case(run, c, EntropyMode::kOff, c.pattern, c.active));
  r["of_dense"] = ratio(find_case(run, c, c.entropy, "dense", 1.0));
  r["extra_mib"] = result.extra_mib[k];
  r["accumulator_mib"] = result.accumulator_mib[k];
  for (const char* error : {"logprob_err", "entropy_err", "dx_err", "dw_err"}) r[error] = nullptr;  // lmhead verify
  r["baseline"] = r["baseline_ms"] = r["baseline_extra_mib"] = nullptr;
  if (!o.baseline.empty() && c.pattern == "dense") {
    const Json baseline = run_baseline(o, run, c);
    r["baseline"] = baseline.value("name", o.baseline);
    r["baseline_ms"] = baseline["ms"];
    r["baseline_extra_mib"] = baseline.value("extra_mib", Json());
  }
  r["threads"] = !result.driver.empty() ? Json() : Json(o.threads > 0 ? o.threads : usable_cpus());
  r["tp"] = o.tp, r["cp"] = o.cp, r["reps"] = o.reps;
  r["device"] = result.device;
  r["kernel"] = description_of(result.backend);
  r["gemm"] = result.gemm.empty() ? Json() : Json(result.gemm);
  r["driver"] = result.driver.empty() ? Json() : Json(result.driver);
  const std::string commit = output_of("git rev-parse --short=12 HEAD 2>/dev/null");
  r["commit"] = commit.empty() ? Json() : Json(commit);
  r["command"] = o.command;
  return r;
}

std::string cell(const Json& value, const char* format) {
  return value.is_null() ? "-" : fmt::format(fmt::runtime(format), value.get<double>());
}

void print_table(const std::vector<Json>& records) {
  const Json& first = records.front();
  fmt::print("{} on {}\n{}\nGEMM unit: {}, {} ms\nN {}  H {}  V {}  {}{}\n\n", first["backend"].get<std::string>(),
             first["device"].get<std::string>(), first["kernel"].get<std::string>(),
             first["gemm"].is_null() ? "none" : first["gemm"].get<std::string>(), cell(first["gemm_ms"], "{:.4g}"),
             first["n"].get<std::int64_t>(), first["h"].get<std::int64_t>(), first["v"].get<std::int64_t>(),
             first["dtype"].get<std::string>(),
             first["threads"].is_null() ? "" : fmt::format("  threads {}", first["threads"].get<int>()));
  fmt::print("{:<17} {:<7} {:<10} {:>6} {:>10} {:>7} {:>8} {:>7} {:>8} {:>10} {:>12} {:>13}\n", "op", "entropy",
             "pattern", "active", "ms", "units", "TFLOP/s", "of off", "of dense", "extra MiB", "baseline ms",
             "baseline MiB");
  for (const Json& r : records)
    fmt::print("{:<17} {:<7} {:<10} {:>6} {:>10} {:>7} {:>8} {:>7} {:>8} {:>10} {:>12} {:>13}\n",
               r["op"].get<std::string>(), r["entropy"].get<std::string>(), r["pattern"].get<std::string>(),
               cell(r["active"], "{:.2f}"), cell(r["ms"], "{:.4g}"), cell(r["units"], "{:.3f}"),
               cell(r["tflops"], "{:.3f}"), cell(r["of_entropy_off"], "{:.3f}"), cell(r["of_dense"], "{:.3f}"),
               cell(r["extra_mib"], "{:.1f}"), cell(r["baseline_ms"], "{:.0f}"),
               cell(r["baseline_extra_mib"], "{:.0f}"));
}

void run_bench(const Options& o) {
  const BackendChoice choice = choose_backend(o.backend);
  BenchRun run = make_run(o);
  run.backend = choice.backend;
#if LMHEAD_HAS_CUDA
  const BenchResult result = choice.device == Device::kCuda ? measure_cuda(run) : measure_cpu(run);
#else
  const BenchResult result = measure_cpu(run);
#endif
  std::vector<Json> records;
  for (std::size_t k = 0; k < run.cases.size(); ++k) {
    records.push_back(make_record(o, run, result, k));
    if (o.json) fmt::print("{}\n", records.back().dump());
  }
  if (!o.json) print_table(records);
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return std::nan("");
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double median_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios(a.size());
  for (std::size_t i = 0; i < a.size(); ++i) ratios[i] = a[i] / b[i];
  return median(ratios);
}

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Time, GEMM units and memory of a backend on one head shape");
  auto o = std::make_shared<Options>();
  const auto one_of = [](std::vector<std::string> names) { return CLI::IsMember(std::move(names)); };
  command->add_option("--op", o->ops, "forward, forward_backward (several: they take turns)")
      ->delimiter(',')
      ->check(one_of({"forward", "forward_backward"}))
      ->default_str("forward");
  command->add_option("--head", o->head, "A name of shapes/heads.txt, such as smollm2-135m");
  command->add_option("--hidden", o->hidden, "Hidden width H")->check(integer_from(1));
  command->add_option("--vocab", o->vocab, "Vocabulary V")->check(integer_from(1));
  command->add_option("--tokens", o->tokens, "Rows N")->check(integer_from(1))->capture_default_str();
  command->add_option("--entropy", o->entropies, "off, metric, grad (several: they take turns)")
      ->delimiter(',')
      ->check(one_of({"off", "metric", "grad"}))
      ->default_str("metric");
  command->add_option("--dtype", o->dtype, "bfloat16, float16, float32")
      ->check(one_of({"bfloat16", "float16", "float32"}))
      ->capture_default_str();
  command->add_option("--backend", o->backend, "A name from `lmhead info`, cuda or auto")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads (0: all)")->check(non_negative_int());
  command->add_option("--reps", o->reps, "Turns")->check(positive_int())->capture_default_str();
  command->add_option("--active", o->active, "Shares of active rows, such as 1,0.64 (1 is dense)")
      ->delimiter(',')
      ->check(number_from(0, 1, "SHARE"))
      ->default_str("1");
  command->add_option("--pattern", o->patterns, "Where active rows lie: suffix, runs, scattered")
      ->delimiter(',')
      ->check(one_of({"suffix", "runs", "scattered"}))
      ->default_str("suffix");
  command->add_option("--tp", o->tp, "Vocabulary shards: measures one, of V / tp")
      ->check(integer_from(1))
      ->capture_default_str();
  command->add_option("--cp", o->cp, "Context shards: measures one, of N / cp")
      ->check(integer_from(1))
      ->capture_default_str();
  command->add_option("--workspace-mib", o->workspace_mib, "Workspace budget (0: the backend's default)")
      ->check(number_from(0, 0x1p40, "NONNEGATIVE"));
  command->add_option(
      "--baseline", o->baseline,
      "Command of another way to do the same, such as 'python3 benchmarks/torch_plain.py': called with --op, "
      "--tokens, --hidden, --vocab, --dtype, --entropy, --threads, --reps, it prints {\"name\", \"ms\", "
      "\"extra_mib\"}");
  command->add_flag("--json", o->json, "One JSON record a line");
  command->callback([o, command] {
    o->command = "lmhead bench";
    for (const CLI::Option* option : command->get_options()) {
      if (option->count() == 0 || option->get_name() == "--help") continue;
      o->command += " " + option->get_name();
      if (option->get_items_expected_max() == 0) continue;
      std::string values;
      for (const std::string& value : option->results()) values += (values.empty() ? "" : ",") + value;
      o->command += values.find(' ') == std::string::npos ? " " + values : " '" + values + "'";
    }
    run_bench(*o);
  });
}

}  // namespace lmhead::tools
