// lmhead info: version, machine, backends and why one is not available.
#include <CLI/CLI.hpp>
#include <fmt/core.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "lmhead/lmhead.h"
#include "machine.h"

namespace lmhead::tools {
namespace {

const char* device_name(Device device) { return device == Device::kCpu ? "cpu" : "cuda"; }

/// The first available backend for a device: what "auto" takes for a problem that it supports.
std::string first_choice(Device device) {
  for (const BackendInfo& backend : backends())
    if (backend.available && backend.device == device) return backend.name;
  return {};
}

void print_json() {
  nlohmann::ordered_json out = {{"version", version()},
                                {"cpu", cpu_model()},
                                {"cpu_extension", cpu_extension()},
                                {"cpus", usable_cpus()},
                                {"auto_cpu", first_choice(Device::kCpu)},
                                {"auto_cuda", nullptr},
                                {"backends", nlohmann::ordered_json::array()}};
  if (const std::string cuda = first_choice(Device::kCuda); !cuda.empty()) out["auto_cuda"] = cuda;
  for (const BackendInfo& backend : backends())
    out["backends"].push_back({{"name", backend.name},
                               {"device", device_name(backend.device)},
                               {"available", backend.available},
                               {"description", backend.description}});
  fmt::print("{}\n", out.dump());
}

void print_text() {
  fmt::print("lmhead {}\ncpu     {}, {}, {} usable\n\n", version(), cpu_model(), cpu_extension(), usable_cpus());
  fmt::print("{:<14} {:<5} {:<4} {}\n", "backend", "on", "use", "what");
  for (const BackendInfo& backend : backends()) {
    const char* use = !backend.available ? "no" : first_choice(backend.device) == backend.name ? "auto" : "yes";
    fmt::print("{:<14} {:<5} {:<4} {}\n", backend.name, device_name(backend.device), use, backend.description);
  }
}

}  // namespace

void add_info(CLI::App& app) {
  CLI::App* command = app.add_subcommand("info", "Version, machine, backends and why one is not available");
  auto json = std::make_shared<bool>(false);
  command->add_flag("--json", *json, "One JSON object on stdout");
  command->callback([json] { *json ? print_json() : print_text(); });
}

}  // namespace lmhead::tools
