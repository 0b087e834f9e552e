// lmhead tune: measures the configurations of a head's backend and keeps the better ones.
#include <fmt/core.h>

#include <CLI/CLI.hpp>

#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "checks.h"
#include "commands.h"
#include "device.h"
#include "head_table.h"
#include "lmhead/tuning.h"

namespace lmhead::tools {
namespace {

struct Options {
  std::string head, dtype = "bfloat16", entropy = "grad", backend = "auto";
  std::int64_t hidden = 0, vocab = 0, tp = 1;
  std::vector<std::int64_t> tokens;
  double seconds = 40;
  int threads = 0;
  bool inference_only = false, dry_run = false, json = false;
};

const char* name_of(Operation operation) { return operation == Operation::kBackward ? "backward" : "forward"; }

void print(const TuneResult& r, const TuneRequest& q, bool json) {
  if (json) {
    nlohmann::ordered_json out = {{"backend", r.backend},
                                  {"op", name_of(r.operation)},
                                  {"tokens", q.tokens},
                                  {"bucket", r.bucket},
                                  {"h", q.hidden},
                                  {"v", q.vocab},
                                  {"dtype", to_string(q.dtype)},
                                  {"configuration", r.configuration},
                                  {"turns", r.turns},
                                  {"times", nlohmann::ordered_json::array()},
                                  {"file", r.file.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(r.file)}};
    for (const TunedTime& t : r.times)
      out["times"].push_back({{"configuration", t.configuration}, {"ms", t.ms}, {"of_default", t.of_default}});
    fmt::print("{}\n", out.dump());
  } else {
    fmt::print("{:<9} N {:<8} {:<14}", name_of(r.operation), q.tokens, r.configuration);
    for (const TunedTime& t : r.times) fmt::print("  {} {:.3f} ms ({:.3f})", t.configuration, t.ms, t.of_default);
    fmt::print("\n");
  }
}

void run(const Options& o) {
  const Head head = head_or_sizes(o.head, o.hidden, o.vocab);
  if (head.v % o.tp != 0)
    throw bad_input(fmt::format("--tp: expected a divisor of the vocabulary {}, got {}", head.v, o.tp));
  const BackendChoice choice = choose_backend(o.backend);
  TuneRequest q;
  q.hidden = head.h, q.vocab = head.v / o.tp, q.softcap = head.softcap, q.logit_scale = head.logit_scale;
  q.dtype = o.dtype == "float32" ? DType::kFloat32 : o.dtype == "float16" ? DType::kFloat16 : DType::kBFloat16;
  q.entropy = o.entropy == "off"      ? EntropyMode::kOff
              : o.entropy == "metric" ? EntropyMode::kMetric
                                      : EntropyMode::kGrad;
  q.backend = choice.backend.c_str(), q.device = choice.device, q.threads = o.threads,
  q.inference_only = o.inference_only, q.save = !o.dry_run;
  std::vector<std::int64_t> tokens = o.tokens;
  if (tokens.empty())
    tokens = choice.device == Device::kCuda ? std::vector<std::int64_t>{2048, 8192, 16384, 32768}
                                            : std::vector<std::int64_t>{512, 2048};
  // Long problems need the time; short ones have their turns in less.
  double all = 0;
  for (const std::int64_t n : tokens) all += static_cast<double>(n);
  std::string file, warning;
  bool any = false;
  for (const std::int64_t n : tokens) {
    q.tokens = n;
    q.seconds = o.seconds / (o.inference_only ? 1 : 2) * static_cast<double>(n) / all;  // of one operation
    const Result<std::vector<TuneResult>> results = tune(q);
    require_ok(results.status());
    for (const TuneResult& r : *results) {
      print(r, q, o.json);
      any = true, file = r.file, warning = r.warning;
    }
  }
  if (!any) fmt::print(stderr, "lmhead: this backend has one configuration: there is nothing to tune\n");
  if (!warning.empty()) fmt::print(stderr, "lmhead: warning: not saved: {}\n", warning);
  if (!o.json && !file.empty()) fmt::print("saved in {}\n", file);
}

}  // namespace

void add_tune(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("tune", "Measure a backend's configurations for a head and keep the better ones");
  auto o = std::make_shared<Options>();
  const auto one_of = [](std::vector<std::string> names) { return CLI::IsMember(std::move(names)); };
  command->add_option("--head", o->head, "A name of shapes/heads.txt, such as nemotron-super");
  command->add_option("--hidden", o->hidden, "Hidden width H")->check(integer_from(1));
  command->add_option("--vocab", o->vocab, "Vocabulary V")->check(integer_from(1));
  command
      ->add_option("--tokens", o->tokens,
                   "Rows N; several: each is tuned (2048,8192,16384,32768 on a GPU, 512,2048 on a CPU)")
      ->delimiter(',')
      ->check(integer_from(1));
  command->add_option("--tp", o->tp, "Vocabulary shards: tunes for one, of V / tp")
      ->check(integer_from(1))
      ->capture_default_str();
  command->add_option("--entropy", o->entropy, "off, metric, grad")
      ->check(one_of({"off", "metric", "grad"}))
      ->capture_default_str();
  command->add_option("--dtype", o->dtype, "bfloat16, float16, float32")
      ->check(one_of({"bfloat16", "float16", "float32"}))
      ->capture_default_str();
  command->add_option("--backend", o->backend, "A name from `lmhead info`, cuda or auto")->capture_default_str();
  command->add_option("--threads", o->threads, "CPU threads (0: all)")->check(non_negative_int());
  command->add_option("--seconds", o->seconds, "Time for measuring, about")
      ->check(number_from(0, 1e9, "POSITIVE", true))
      ->capture_default_str();
  command->add_flag("--inference-only", o->inference_only, "Tune the forward alone");
  command->add_flag("--dry-run", o->dry_run, "Measure and print, save nothing");
  command->add_flag("--json", o->json, "One JSON record a choice");
  command->callback([o] { run(*o); });
}

}  // namespace lmhead::tools
