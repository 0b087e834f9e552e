// Timing of CPU backends for `lmhead bench`: cases and one vendor GEMM take turns in one process.
#include <malloc.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <random>

#if LMHEAD_BENCH_ONEDNN
#include <omp.h>

#include <oneapi/dnnl/dnnl.hpp>
#endif

#include "active_mask.h"
#include "bench_calls.h"
#include "core/half.h"
#include "cpu/parallel.h"
#include "machine.h"

namespace lmhead::tools {
namespace {

/// Uninitialised memory: the page faults belong to whoever writes first.
using Buffer = std::unique_ptr<std::byte[]>;
Buffer allocate(std::size_t bytes) { return std::make_unique_for_overwrite<std::byte[]>(bytes); }

/// count values of N(0, deviation^2), by random picks from a table of 2^20 normal ones.
Buffer random_values(std::int64_t count, DType dtype, double deviation, std::uint64_t seed, int threads) {
  constexpr std::size_t kTable = std::size_t{1} << 20;
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal(0.0, deviation);
  std::vector<float> table(kTable);
  for (float& value : table) value = static_cast<float>(normal(random));
  Buffer out = allocate(static_cast<std::size_t>(count) * size_of(dtype));
  parallel_for(threads, count, 1 << 16, [&](std::int64_t begin, std::int64_t end) {
    std::uint64_t state = seed + static_cast<std::uint64_t>(begin) * 0x9e3779b97f4a7c15u;
    for (std::int64_t i = begin; i < end; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const float value = table[state >> 44];
      if (dtype == DType::kFloat32) {
        reinterpret_cast<float*>(out.get())[i] = value;
      } else {
        reinterpret_cast<std::uint16_t*>(out.get())[i] =
            dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
      }
    }
  });
  return out;
}

/// A line of /proc/self/status in MiB.
double status_mib(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.compare(0, key.size(), key) == 0) return std::stod(line.substr(key.size() + 1)) / 1024;
  return std::nan("");
}

/// Growth of the peak resident size while fn runs.
double peak_growth_mib(const std::function<void()>& fn) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts again from the present size
  const double before = status_mib("VmRSS:");
  fn();
  return std::max(0.0, status_mib("VmHWM:") - before);
}

double time_ms(const std::function<void()>& fn) {
  const auto start = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

#if LMHEAD_BENCH_ONEDNN
/// C [N, V] fp32 = X W^T with the weight as [V, H], on all threads.
class VendorGemm {
 public:
  VendorGemm(const BenchRun& run, void* x, void* w) {
    using dnnl::memory;
    const int threads = thread_count(run.threads);
    const auto type = run.dtype == DType::kFloat32 ? memory::data_type::f32 : memory::data_type::bf16;
    const memory::desc xd({run.n, run.h}, type, {run.h, 1}), wd({run.h, run.v_local}, type, {1, run.h}),
        cd({run.n, run.v_local}, memory::data_type::f32, {run.v_local, 1});
    c_ = allocate(static_cast<std::size_t>(run.n * run.v_local) * sizeof(float));
    omp_set_num_threads(threads);
    const dnnl::matmul::primitive_desc descriptor(dnnl::matmul::desc(xd, wd, cd), engine_);
    name_ = descriptor.impl_info_str();
    multiply_ = dnnl::matmul(descriptor);
    arguments_ = {{DNNL_ARG_SRC, memory(xd, engine_, x)},
                  {DNNL_ARG_WEIGHTS, memory(wd, engine_, w)},
                  {DNNL_ARG_DST, memory(cd, engine_, c_.get())}};
  }
  void operator()() {
    multiply_.execute(stream_, arguments_);
    stream_.wait();
  }
  std::string name() const {
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch) +
           " " + name_;
  }

 private:
  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  dnnl::matmul multiply_;
  std::unordered_map<int, dnnl::memory> arguments_;
  Buffer c_;
  std::string name_;
};
#endif

/// The tensors of one run and the calls on them.
class Bench {
 public:
  explicit Bench(const BenchRun& run)
      : run_(run),
        hidden_(random_values(run.n * run.h, run.dtype, 1.0, 1, run.threads)),
        weight_(
            random_values(run.v_local * run.h, run.dtype, 1.5 / std::sqrt(static_cast<double>(run.h)), 2, run.threads)),
        upstream_(random_values(2 * run.n, DType::kFloat32, 1.0, 3, run.threads)),
        targets_(static_cast<std::size_t>(run.n)),
        rows_(static_cast<std::size_t>(3 * run.n)),
        state_(static_cast<std::size_t>(kStateWidth * run.n)) {
    std::mt19937_64 random(4);
    std::uniform_int_distribution<std::int64_t> id(0, run.v_local - 1);
    for (std::int64_t& target : targets_) target = id(random);
    for (const BenchCase& c : run.cases) backward_ |= c.op == "forward_backward";
    if (backward_) {
      // Written once, so that their pages count as outputs and not as memory of the call.
      dx_ = random_values(run.n * run.h, run.dtype, 1.0, 5, run.threads);
      dw_ = random_values(run.v_local * run.h, run.dtype, 1.0, 6, run.threads);
    }
    for (const BenchCase& c : run.cases) masks_.push_back(bench::make_mask(run.n, c.active, c.pattern));
    // Freed blocks go back to the system at once, or a case would reuse pages of the one before unseen.
    ::mallopt(M_MMAP_THRESHOLD, 1 << 20);
  }

  BenchResult measure() {
    Execution execution;
    execution.backend = run_.backend.c_str();
    execution.threads = run_.threads;
    execution.workspace_budget = run_.workspace_budget;
    BenchCalls call(run_, tensors(), execution);
    BenchResult result;
    result.case_ms.resize(run_.cases.size());
    std::size_t workspace_bytes = 0;
    for (std::size_t k = 0; k < run_.cases.size(); ++k) {
      result.extra_mib.push_back(peak_growth_mib([&] { call(k); }));
      const WorkspaceSize size = call.workspace(k);
      result.accumulator_mib.push_back(static_cast<double>(size.accumulator) / 0x1p20);
      workspace_bytes = std::max(workspace_bytes, size.bytes);
      result.active.push_back(active_share(masks_[k]));
    }
    std::vector<std::byte> scratch(workspace_bytes);
    call.use_workspace(scratch.data(), scratch.size());
    std::vector<std::function<void()>> turns;
    for (std::size_t k = 0; k < run_.cases.size(); ++k) turns.emplace_back([&call, k] { call(k); });
#if LMHEAD_BENCH_ONEDNN
    std::optional<VendorGemm> gemm;
    if (run_.dtype != DType::kFloat16) {
      gemm.emplace(run_, hidden_.get(), weight_.get());
      result.gemm = gemm->name();
      turns.emplace_back([&gemm] { (*gemm)(); });
      result.gemm_ms.resize(static_cast<std::size_t>(run_.reps));
    }
#endif
    for (const auto& turn : turns) turn();  // warm
    for (std::vector<double>& ms : result.case_ms) ms.resize(static_cast<std::size_t>(run_.reps));
    for (std::size_t rep = 0; rep < static_cast<std::size_t>(run_.reps); ++rep)
      for (std::size_t i = 0; i < turns.size(); ++i) {
        // Another order each time, every second one backwards: whoever follows the GEMM finds its output in the caches.
        const std::size_t k = (rep / 2 + (rep % 2 == 0 ? i : turns.size() - 1 - i)) % turns.size();
        const double ms = time_ms(turns[k]);
        (k < run_.cases.size() ? result.case_ms[k] : result.gemm_ms)[rep] = ms;
      }
    result.backend = last_backend();
    result.device = cpu_model() + ", " + cpu_extension();
    return result;
  }

 private:
  BenchTensors tensors() {
    BenchTensors t{
        hidden_.get(), weight_.get(), targets_.data(), {},       reinterpret_cast<const float*>(upstream_.get()),
        rows_.data(),  state_.data(), dx_.get(),       dw_.get()};
    for (const std::vector<std::uint8_t>& mask : masks_) t.active.push_back(mask.empty() ? nullptr : mask.data());
    return t;
  }

  const BenchRun& run_;
  Buffer hidden_, weight_, upstream_, dx_, dw_;
  std::vector<std::int64_t> targets_;
  std::vector<float> rows_, state_;
  std::vector<std::vector<std::uint8_t>> masks_;
  bool backward_ = false;
};

}  // namespace

BenchResult measure_cpu(const BenchRun& run) { return Bench(run).measure(); }

}  // namespace lmhead::tools
