#include "machine.h"

#include <sched.h>

#include <fstream>
#include <thread>

namespace lmhead::tools {
namespace {

/// Value of the first /proc/cpuinfo line "KEY : VALUE", or "".
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const auto colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return {};
}

}  // namespace

std::string cpu_model() {
  const std::string model = cpuinfo("model name");
  return model.empty() ? "unknown CPU" : model;
}

int usable_cpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  const unsigned count = std::thread::hardware_concurrency();
  return count > 0 ? static_cast<int>(count) : 1;
}

std::string cpu_extension() {
  std::string flags(" ");
  flags += cpuinfo("flags") + " ";
  const auto has = [&](const char* flag) { return flags.find(std::string(" ") + flag + " ") != std::string::npos; };
  if (has("amx_bf16")) return "AMX-BF16";
  if (has("avx512_bf16")) return "AVX512-BF16";
  if (has("avx512f")) return "AVX512";
  if (has("avx2")) return "AVX2";
  return "baseline";
}

}  // namespace lmhead::tools
