// What `lmhead bench` measures, shared by its front end and one measuring back end a device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lmhead/lmhead.h"

namespace lmhead::tools {

/// One measured way to run the problem. All cases of a run take turns, and ratios are of neighbours.
struct BenchCase {
  std::string op;       ///< "forward" or "forward_backward"
  EntropyMode entropy;  ///< kOff, kMetric, kGrad
  double active;        ///< share of active rows asked for
  std::string pattern;  ///< "dense", "suffix", "runs", "scattered"
};

struct BenchRun {
  std::int64_t n, h, v_local, vocab_size;  ///< rows and weight rows here, after tp and cp
  std::optional<double> softcap;
  double logit_scale = 1.0;
  DType dtype;
  std::string backend;
  int threads, reps;
  std::size_t workspace_budget;
  std::vector<BenchCase> cases;
};

/// Times in ms, one a turn; entry i of every case belongs to the same turn.
struct BenchResult {
  std::vector<std::vector<double>> case_ms;
  std::vector<double> gemm_ms;  ///< empty where no library multiplies this type
  std::string gemm;             ///< what ran it
  std::vector<double> extra_mib, accumulator_mib, active;
  std::string backend;         ///< the one that ran, never "auto"
  std::string device, driver;  ///< model of the CPU or GPU; "" without a driver
};

/// Median of a, and of the turn-by-turn ratios a / b.
double median(std::vector<double> values);
double median_ratio(const std::vector<double>& a, const std::vector<double>& b);

/// Wall-clock measurement of a CPU backend. extra_mib is the growth of the process's peak resident size.
BenchResult measure_cpu(const BenchRun& run);
/// Events on the default stream. extra_mib is the workspace. Ends the program when it runs out of device memory.
BenchResult measure_cuda(const BenchRun& run);

}  // namespace lmhead::tools
