// lmhead verify: every backend of this machine against fp64 on a fixed list of cases.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checks.h"
#include "commands.h"
#include "device.h"
#include "testing/check.h"

namespace lmhead::tools {
namespace {

using testing::Case;
using testing::Data;

constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF16 = DType::kFloat16;

struct Entry {
  Case spec;
  std::vector<std::int64_t> shards = {};
};

/// Data with teeth in each dtype, then each option, then one head of real size.
std::vector<Entry> entries() {
  std::vector<Entry> list;
  for (const DType dtype : {kBf16, kF16, kF32})
    for (const Data data : testing::kAllData)
      list.push_back({{.n = 37, .h = 64, .v = 1025, .data = data, .hidden = dtype, .weight = dtype}});
  for (const DType dtype : {kBf16, kF32}) {
    const Case base{.n = 65, .h = 96, .v = 2056, .data = Data::kPeaked, .hidden = dtype, .weight = dtype};
    const auto with = [&](auto&& change) {
      Case c = base;
      change(c);
      list.push_back({c});
    };
    with([](Case& c) { c.bias = kF32; });
    with([](Case& c) { c.softcap = 30; });
    with([](Case& c) { c.scale = 0.0625; });
    with([](Case& c) { c.temperature = 0.7; });
    with([](Case& c) { c.row_temperature = true; });
    with([](Case& c) { c.ignore_every = 3; });
    with([](Case& c) { c.out_of_vocab = OutOfVocab::kZero, c.outside_every = 5; });
    with([](Case& c) { c.valid_vocab = 2000; });
    with([](Case& c) { c.active = DType::kBool, c.inactive_every = 2; });
    with([](Case& c) { c.zero_every = 4; });
    with([](Case& c) { c.pad = 8; });
    with([](Case& c) { c.upstream = testing::Upstream::kReversed; });
    with([](Case& c) { c.entropy = EntropyMode::kOff; });
    with([](Case& c) { c.entropy = EntropyMode::kMetric; });
    list.push_back({base, {1000, 0, 1056}});
    list.push_back({base, {1028, 1028}});
  }
  list.push_back({{.n = 16, .h = 64, .v = 515, .hidden = kF32, .weight = kBf16}});
  list.push_back({{.n = 16, .h = 64, .v = 515, .hidden = kBf16, .weight = kF32, .compute = kBf16}});
  list.push_back({{.n = 1, .h = 1, .v = 2}});
  list.push_back({{.n = 2, .h = 576, .v = 49152}});  // smollm2-135m
  return list;
}

struct Options {
  std::string backend;
  bool json = false;
};

/// "" when it ran; else why the backend does not run this case.
std::string verify_case(const BackendInfo& backend, const Entry& entry, const Options& options, bool& all_ok) {
  const testing::TestProblem problem(entry.spec);
  testing::RunOptions run;
  run.shards = entry.shards;
  const testing::Outcome outcome = testing::run(backend, problem, run);
  if (outcome.status.code() == StatusCode::kUnsupported) return outcome.status.message();
  const testing::Report report = testing::check(problem, run, outcome, testing::arena(backend.device));
  all_ok = all_ok && report.ok();
  std::string name = entry.spec.name();
  if (!entry.shards.empty()) name += fmt::format(" shards={}", entry.shards.size());
  if (options.json) {
    nlohmann::ordered_json record = {{"backend", backend.name},
                                     {"case", name},
                                     {"logprob_err", report.logprob_err},
                                     {"entropy_err", report.entropy_err},
                                     {"dx_err", report.dx_err},
                                     {"dw_err", report.dw_err},
                                     {"bound", report.bound},
                                     {"dx_bound", report.dx_bound},
                                     {"dw_bound", report.dw_bound},
                                     {"ok", report.ok()}};
    if (!report.ok()) record["failure"] = report.failure;
    fmt::print("{}\n", record.dump());
  } else {
    fmt::print("{:<14} {:<4} {:8.1e} {:8.1e} {:8.1e}   {:8.1e} {:8.1e}   {:8.1e} {:8.1e}  {}\n", backend.name,
               report.ok() ? "ok" : "FAIL", report.logprob_err, report.entropy_err, report.bound, report.dx_err,
               report.dx_bound, report.dw_err, report.dw_bound, name);
    if (!report.ok()) fmt::print("  {}\n", report.failure);
  }
  std::fflush(stdout);
  return {};
}

void verify(const Options& options) {
  const std::vector<BackendInfo> chosen = choose_backends(options.backend);
  if (!options.json)
    fmt::print("{:<14} {:<4} {:>8} {:>8} {:>8}   {:>8} {:>8}   {:>8} {:>8}  {}\n", "backend", "", "logprob", "entropy",
               "bound", "dX", "bound", "dW", "bound", "case (N x H x V)");
  bool all_ok = true;
  for (const BackendInfo& backend : chosen) {
    std::size_t ran = 0, refused = 0;
    std::string reason;
    for (const Entry& entry : entries()) {
      const std::string why = verify_case(backend, entry, options, all_ok);
      why.empty() ? ++ran : ++refused;
      if (!why.empty()) reason = why;
    }
    if (refused > 0) fmt::print(stderr, "{}: {} cases not supported, such as: {}\n", backend.name, refused, reason);
    if (ran == 0) throw failed(backend.name + " ran no case");
  }
  if (!all_ok) throw failed("verify: a result is outside its bound");
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("verify", "Checks every backend of this machine against fp64 and prints the errors");
  auto options = std::make_shared<Options>();
  command->add_option("--backend", options->backend, "Only this one: a name from `lmhead info`, or cuda")
      ->check(not_empty());
  command->add_flag("--json", options->json, "One JSON record a case on stdout");
  command->callback([options] { verify(*options); });
}

}  // namespace lmhead::tools
