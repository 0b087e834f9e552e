// Timing of CUDA backends for `lmhead bench`: cases and one cuBLASLt product take turns on the default stream.
#include <cuda_runtime_api.h>

#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "active_mask.h"
#include "bench_calls.h"
#include "commands.h"
#include "device.h"
#include "gpu_exact.h"
#include "gpu_rounds.h"

namespace lmhead::tools {
namespace {

DeviceBuffer allocate(std::int64_t count, DType dtype) {
  return DeviceBuffer(Device::kCuda, static_cast<std::size_t>(count) * size_of(dtype));
}

DeviceBuffer random_values(std::int64_t count, DType dtype, float deviation, std::uint32_t seed) {
  DeviceBuffer buffer = allocate(count, dtype);
  bench::fill_normal(buffer.data(), dtype, count, seed, deviation);
  return buffer;
}

template <class T>
DeviceBuffer uploaded(const std::vector<T>& values) {
  DeviceBuffer buffer(Device::kCuda, values.size() * sizeof(T));
  buffer.upload(values.data(), values.size() * sizeof(T));
  return buffer;
}

std::vector<std::int64_t> random_targets(std::int64_t n, std::int64_t v) {
  std::mt19937_64 random(4);
  std::uniform_int_distribution<std::int64_t> id(0, v - 1);
  std::vector<std::int64_t> targets(static_cast<std::size_t>(n));
  for (std::int64_t& target : targets) target = id(random);
  return targets;
}

std::string device_name() {
  int ordinal = 0;
  cudaDeviceProp properties{};
  if (cudaGetDevice(&ordinal) != cudaSuccess || cudaGetDeviceProperties(&properties, ordinal) != cudaSuccess)
    throw failed("no usable CUDA device");
  return properties.name;
}

}  // namespace

BenchResult measure_cuda(const BenchRun& run) {
  const auto as_floats = [](const DeviceBuffer& b) { return static_cast<float*>(b.data()); };
  const DeviceBuffer hidden = random_values(run.n * run.h, run.dtype, 1.0f, 1);
  const DeviceBuffer weight =
      random_values(run.v_local * run.h, run.dtype, 1.5f / std::sqrt(static_cast<float>(run.h)), 2);
  const DeviceBuffer upstream = random_values(2 * run.n, DType::kFloat32, 1.0f, 3);
  const DeviceBuffer targets = uploaded(random_targets(run.n, run.v_local));
  const DeviceBuffer rows = allocate(3 * run.n, DType::kFloat32),
                     state = allocate(kStateWidth * run.n, DType::kFloat32);
  const bool backward =
      std::any_of(run.cases.begin(), run.cases.end(), [](const BenchCase& c) { return c.op == "forward_backward"; });
  const DeviceBuffer dx = allocate(backward ? run.n * run.h : 0, run.dtype),
                     dw = allocate(backward ? run.v_local * run.h : 0, run.dtype);
  BenchTensors tensors{hidden.data(),
                       weight.data(),
                       static_cast<const std::int64_t*>(targets.data()),
                       {},
                       as_floats(upstream),
                       as_floats(rows),
                       as_floats(state),
                       dx.data(),
                       dw.data()};
  BenchResult result;
  std::vector<DeviceBuffer> masks;
  for (const BenchCase& c : run.cases) {
    const std::vector<std::uint8_t> mask = bench::make_mask(run.n, c.active, c.pattern);
    result.active.push_back(active_share(mask));
    masks.push_back(uploaded(mask));
    tensors.active.push_back(static_cast<const std::uint8_t*>(masks.back().data()));
  }
  Execution execution;
  execution.backend = run.backend.c_str();
  execution.device = Device::kCuda;
  execution.workspace_budget = run.workspace_budget;
  BenchCalls call(run, tensors, execution);
  std::size_t workspace_bytes = 0;
  for (std::size_t k = 0; k < run.cases.size(); ++k) {
    const WorkspaceSize size = call.workspace(k);
    result.extra_mib.push_back(static_cast<double>(size.bytes) / 0x1p20);  // a call allocates nothing else
    result.accumulator_mib.push_back(static_cast<double>(size.accumulator) / 0x1p20);
    workspace_bytes = std::max(workspace_bytes, size.bytes);
  }
  const DeviceBuffer workspace(Device::kCuda, workspace_bytes);
  call.use_workspace(workspace.data(), workspace_bytes);

  // The unit is 16-bit for fp32 problems too, so that their records compare.
  const bool narrow = run.dtype != DType::kFloat32;
  const DType unit_type = narrow ? run.dtype : DType::kBFloat16;
  const bench::ProductUnit unit(narrow ? hidden.data() : nullptr, narrow ? weight.data() : nullptr, unit_type, run.n,
                                run.h, run.v_local);
  std::vector<std::function<void()>> turns;
  for (std::size_t k = 0; k < run.cases.size(); ++k) turns.emplace_back([&call, k] { call(k); });
  turns.emplace_back(std::ref(unit));
  result.case_ms = bench::measure_rounds(turns, turns.size() - 1, run.reps, std::numeric_limits<double>::infinity());
  result.gemm_ms = std::move(result.case_ms.back());
  result.case_ms.pop_back();
  result.gemm = std::string("cuBLASLt ") + to_string(unit_type);
  result.device = device_name();
  result.driver = bench::driver_version();
  result.backend = last_backend();
  return result;
}

}  // namespace lmhead::tools
