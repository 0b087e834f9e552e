// GPU benchmark: forward and forward + backward of the CUDA backends in GEMM units, with errors against
// fp64 on sampled rows. One JSON line a measurement.
//
//   gpu_bench --case N,H,V [--case ...] [--op forward|forward_backward]... [--entropy off|metric|grad]...
//             [--backend sm90|cuda_portable]... [--active F:PATTERN]... [--dtype bfloat16|float16]
//             [--workspace-mib 512] [--cache-mib M]... [--reps 15] [--seconds 4] [--no-check] [--commit ID] [--out
//             FILE]
//
// All candidates of a case and one cuBLASLt product [N, H] x [H, V] with 16-bit output (the unit) run in
// rotation, each between two events, a round queued at once; medians, and for of_dense (the same candidate with all
// rows active) and of_entropy_off medians of the ratios of a round. PATTERN: suffix, runs, scattered.
// --cache-mib: most MiB of exponentials that the forward keeps for the backward (0: none), one candidate each.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "active_mask.h"
#include "core/half.h"
#include "gpu_exact.h"
#include "gpu_rounds.h"
#include "lmhead/lmhead.h"

namespace lmhead::bench {
namespace {

template <class T>
void upload(const Memory& to, const std::vector<T>& from) {
  require(cudaMemcpy(to.as(), from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}
template <class T>
std::vector<T> download(const void* from, std::int64_t count) {
  std::vector<T> host(static_cast<std::size_t>(count));
  require(cudaMemcpy(host.data(), from, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

struct Shape {
  std::int64_t n, h, v;
};
struct Activity {
  double fraction = 1.0;
  std::string pattern = "dense";

  bool dense() const { return pattern == "dense"; }
  /// 1 where a row is active, for every row of any pattern.
  std::vector<std::uint8_t> mask(std::int64_t n) const {
    return dense() ? std::vector<std::uint8_t>(static_cast<std::size_t>(n), 1) : make_mask(n, fraction, pattern);
  }
};

struct Arguments {
  std::vector<Shape> cases;
  std::vector<std::string> ops, entropies, backends;
  std::vector<Activity> activities{{}};
  DType dtype = DType::kBFloat16;
  std::size_t workspace_mib = 512;
  std::vector<std::size_t> cache_mibs;
  int reps = 15;
  double seconds = 4;
  bool check = true;
  std::string commit = "unknown", out, command;
};

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 0; i < argc; ++i) a.command += (i ? " " : "") + std::string(i ? argv[i] : "gpu_bench");
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--no-check") {
      a.check = false;
      continue;
    }
    if (i + 1 >= argc) fail(name + ": expected a value");
    const std::string value = argv[++i];
    if (name == "--case") {
      Shape s{};
      if (std::sscanf(value.c_str(), "%ld,%ld,%ld", &s.n, &s.h, &s.v) != 3)
        fail("--case: expected N,H,V, got " + value);
      a.cases.push_back(s);
    } else if (name == "--op") {
      a.ops.push_back(value);
    } else if (name == "--entropy") {
      a.entropies.push_back(value);
    } else if (name == "--backend") {
      a.backends.push_back(value);
    } else if (name == "--active") {
      const std::size_t colon = value.find(':');
      if (colon == std::string::npos) fail("--active: expected F:PATTERN, got " + value);
      const std::string pattern = value.substr(colon + 1);
      if (pattern != "suffix" && pattern != "runs" && pattern != "scattered")
        fail("--active: expected suffix, runs or scattered, got " + pattern);
      a.activities.push_back({std::stod(value), pattern});
    } else if (name == "--dtype") {
      a.dtype = value == "float16" ? DType::kFloat16 : DType::kBFloat16;
    } else if (name == "--workspace-mib") {
      a.workspace_mib = std::stoul(value);
    } else if (name == "--cache-mib") {
      a.cache_mibs.push_back(std::stoul(value));
    } else if (name == "--reps") {
      a.reps = std::stoi(value);
    } else if (name == "--seconds") {
      a.seconds = std::stod(value);
    } else if (name == "--commit") {
      a.commit = value;
    } else if (name == "--out") {
      a.out = value;
    } else {
      fail("unknown option " + name);
    }
  }
  if (a.ops.empty()) a.ops = {"forward", "forward_backward"};
  if (a.entropies.empty()) a.entropies = {"grad"};
  if (a.backends.empty()) a.backends = {"sm90"};
  if (a.cache_mibs.empty()) a.cache_mibs = {0};
  if (a.cases.empty()) fail("--case: expected at least one N,H,V");
  return a;
}

struct Inputs {
  Shape s;
  DType dtype;
  Memory x, w, targets, dlogprob, dentropy, logprob, entropy, lse, dx, dw;
  std::vector<std::int64_t> ids;
  std::vector<float> a, g;

  Inputs(const Shape& shape, DType type)
      : s(shape),
        dtype(type),
        x(bytes(s.n * s.h, 2)),
        w(bytes(s.v * s.h, 2)),
        targets(bytes(s.n, 8)),
        dlogprob(bytes(s.n, 4)),
        dentropy(bytes(s.n, 4)),
        logprob(bytes(s.n, 4)),
        entropy(bytes(s.n, 4)),
        lse(bytes(s.n, 4)),
        dx(bytes(s.n * s.h, 2)),
        dw(bytes(s.v * s.h, 2)) {
    fill_normal(x.as(), type, s.n * s.h, 1, 1.0f);
    fill_normal(w.as(), type, s.v * s.h, 2, 1.5f / std::sqrt(static_cast<float>(s.h)));
    std::mt19937_64 random(3);
    for (std::int64_t i = 0; i < s.n; ++i) {
      ids.push_back(std::uniform_int_distribution<std::int64_t>(0, s.v - 1)(random));
      a.push_back(std::uniform_real_distribution<float>(-1, 1)(random));
      g.push_back(std::uniform_real_distribution<float>(-0.1f, 0.1f)(random));
    }
    upload(targets, ids);
    upload(dlogprob, a);
    upload(dentropy, g);
  }
  static std::size_t bytes(std::int64_t count, std::size_t size) { return static_cast<std::size_t>(count) * size; }
};

struct Candidate {
  std::string op, entropy, backend;
  Activity activity;
  std::size_t cache_mib = 0;
  std::shared_ptr<Memory> mask, workspace, cache;
  std::size_t extra_bytes = 0, cache_bytes = 0;
  std::function<void()> run;
  std::vector<double> ms;

  EntropyMode mode() const {
    return entropy == "off" ? EntropyMode::kOff : entropy == "metric" ? EntropyMode::kMetric : EntropyMode::kGrad;
  }
};

Problem make_problem(const Inputs& in, const Candidate& c) {
  Problem p;
  p.hidden = {in.x.as(), in.s.n, in.s.h, in.s.h, in.dtype};
  p.weight = {in.w.as(), in.s.v, in.s.h, in.s.h, in.dtype};
  p.targets = {in.targets.as(), in.s.n, 1, DType::kInt64};
  if (c.mask) p.active = {c.mask->as(), in.s.n, 1, DType::kBool};
  p.entropy = c.mode();
  return p;
}

void prepare(const Inputs& in, const Arguments& args, Candidate& c) {
  if (!c.activity.dense()) {
    const std::vector<std::uint8_t> mask = c.activity.mask(in.s.n);
    c.mask = std::make_shared<Memory>(mask.size());
    upload(*c.mask, mask);
  }
  const Problem p = make_problem(in, c);
  Execution e;
  e.backend = c.backend == "sm90" ? "sm90" : "cuda_portable";
  e.device = Device::kCuda;
  e.workspace_budget = args.workspace_mib << 20;
  ForwardOutputs out;
  out.logprob = {in.logprob.as(), in.s.n};
  if (c.mode() != EntropyMode::kOff) out.entropy = {in.entropy.as(), in.s.n};
  out.lse = {in.lse.as(), in.s.n};
  BackwardInputs back;
  back.lse = {in.lse.as(), in.s.n};
  back.dlogprob = {in.dlogprob.as(), in.s.n};
  if (c.mode() == EntropyMode::kGrad) {
    back.entropy = {in.entropy.as(), in.s.n};
    back.dentropy = {in.dentropy.as(), in.s.n};
  }
  BackwardOutputs gradients;
  gradients.hidden = {in.dx.as(), in.s.n, in.s.h, in.s.h, in.dtype};
  gradients.weight = {in.dw.as(), in.s.v, in.s.h, in.s.h, in.dtype};
  const bool backward_too = c.op == "forward_backward";
  const Result<WorkspaceSize> forward_size = workspace_size(p, Operation::kForward, {}, e);
  require(forward_size.status());
  c.extra_bytes = forward_size->bytes;
  if (backward_too) {
    const Result<WorkspaceSize> size = workspace_size(p, Operation::kBackward, gradients, e);
    require(size.status());
    c.extra_bytes = std::max(c.extra_bytes, size->bytes);
  }
  c.workspace = std::make_shared<Memory>(c.extra_bytes);
  e.workspace = c.workspace->as();
  e.workspace_bytes = c.extra_bytes;
  if (c.cache_mib > 0) {
    const Result<std::size_t> size = cache_size(p, c.cache_mib << 20, e);
    require(size.status());
    c.cache_bytes = *size;
    c.cache = std::make_shared<Memory>(c.cache_bytes);
    e.cache = c.cache->as();
    e.cache_bytes = c.cache_bytes;
  }
  c.run = [=] {
    require(forward(p, out, e));
    if (backward_too) require(backward(p, back, gradients, e));
  };
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v[v.size() / 2];
}

/// Median of the ratios of two candidates round by round: what drifts between rounds cancels.
double paired_ratio(const std::vector<double>& ms, const std::vector<double>& of) {
  std::vector<double> ratios(ms.size());
  std::transform(ms.begin(), ms.end(), of.begin(), ratios.begin(), std::divides<>());
  return median(ratios);
}

/// Share of the 128-row tiles that hold an active row: what skipping inactive tiles instead of rows would compute.
double live_tiles(const std::vector<std::uint8_t>& mask) {
  constexpr std::size_t kRows = 128;
  std::size_t live = 0, tiles = 0;
  for (std::size_t begin = 0; begin < mask.size(); begin += kRows, ++tiles) {
    const auto first = mask.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = first + static_cast<std::ptrdiff_t>(std::min(kRows, mask.size() - begin));
    live += std::find(first, last, 1) != last;
  }
  return tiles > 0 ? double(live) / double(tiles) : 1.0;
}

struct Errors {
  double logprob = NAN, entropy = NAN, dx = NAN, dw = NAN;
};

float to_float(std::uint16_t bits, DType dtype) {
  return dtype == DType::kBFloat16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

/// Relative Frobenius error of sampled rows of a 16-bit gradient.
double gradient_error(const void* got, DType dtype, std::int64_t depth, const std::vector<int>& rows,
                      const std::vector<double>& exact) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = download<std::uint16_t>(static_cast<const std::uint16_t*>(got) + rows[i] * depth, depth);
    for (std::size_t k = 0; k < row.size(); ++k) {
      const double want = exact[i * row.size() + k], error = to_float(row[k], dtype) - want;
      difference += error * error;
      norm += want * want;
    }
  }
  return std::sqrt(difference / norm);
}

/// Runs the candidate once into poisoned outputs and compares sampled rows with fp64.
Errors measure_errors(const Inputs& in, const Candidate& c) {
  const Shape& s = in.s;
  for (const Memory* m : {&in.logprob, &in.entropy, &in.lse}) require(cudaMemset(m->as(), 0xff, Inputs::bytes(s.n, 4)));
  require(cudaMemset(in.dx.as(), 0xff, Inputs::bytes(s.n * s.h, 2)));
  require(cudaMemset(in.dw.as(), 0xff, Inputs::bytes(s.v * s.h, 2)));
  require(cudaMemset(c.workspace->as(), 0xff, c.extra_bytes));
  if (c.cache) require(cudaMemset(c.cache->as(), 0xff, c.cache_bytes));
  c.run();
  require(cudaDeviceSynchronize());
  const std::vector<std::uint8_t> mask = c.activity.mask(s.n);
  std::vector<int> rows;
  for (int i = 0; i < 24; ++i) rows.push_back(static_cast<int>(i * (s.n - 1) / std::max<std::int64_t>(23, 1)));
  const auto logprob = download<float>(in.logprob.as(), s.n), entropy = download<float>(in.entropy.as(), s.n),
             lse = download<float>(in.lse.as(), s.n);
  std::vector<double> z = exact_products(in.x.as(), rows, in.w.as(), s.v, s.h, in.dtype);
  const bool with_entropy = c.mode() != EntropyMode::kOff, with_g = c.mode() == EntropyMode::kGrad;
  Errors e{0, with_entropy ? 0.0 : NAN, NAN, NAN};
  const auto worst = [](double& error, double value) {
    if (!(value <= error)) error = value;
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto r = static_cast<std::size_t>(rows[i]);
    double* row = z.data() + static_cast<std::ptrdiff_t>(i) * s.v;
    const double max = *std::max_element(row, row + s.v);
    double sum = 0, weighted = 0;
    for (std::int64_t j = 0; j < s.v; ++j) {
      const double p = std::exp(row[j] - max);
      sum += p;
      weighted += p * (row[j] - max);
    }
    const double row_lse = max + std::log(sum), row_entropy = std::log(sum) - weighted / sum;
    worst(e.logprob, std::abs(logprob[r] - (mask[r] ? row[in.ids[r]] - row_lse : 0.0)));
    if (with_entropy) worst(e.entropy, std::abs(entropy[r] - (mask[r] ? row_entropy : 0.0)));
    for (std::int64_t j = 0; j < s.v; ++j) {
      const double log_p = row[j] - row_lse, p = std::exp(log_p);
      row[j] = mask[r] ? in.a[r] * ((j == in.ids[r]) - p) - (with_g ? in.g[r] * p * (log_p + row_entropy) : 0.0) : 0.0;
    }
  }
  if (c.op != "forward_backward") return e;
  const auto sampled = static_cast<std::int64_t>(rows.size());
  e.dx = gradient_error(in.dx.as(), in.dtype, s.h, rows, exact_combination(z, sampled, in.w.as(), s.v, s.h, in.dtype));
  std::vector<int> columns;
  for (int i = 0; i < 24; ++i) columns.push_back(static_cast<int>(i * (s.v - 1) / 23));
  std::vector<double> dl = exact_products(in.w.as(), columns, in.x.as(), s.n, s.h, in.dtype);
  for (std::size_t j = 0; j < columns.size(); ++j) {
    for (std::size_t i = 0; i < in.ids.size(); ++i) {
      double& value = dl[j * in.ids.size() + i];
      const double log_p = value - lse[i], p = std::exp(log_p);
      value = !mask[i]
                  ? 0.0
                  : in.a[i] * ((columns[j] == in.ids[i]) - p) - (with_g ? in.g[i] * p * (log_p + entropy[i]) : 0.0);
    }
  }
  e.dw =
      gradient_error(in.dw.as(), in.dtype, s.h, columns, exact_combination(dl, sampled, in.x.as(), s.n, s.h, in.dtype));
  return e;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", x);
  return std::isfinite(x) ? text : "null";
}

void run_case(const Arguments& args, const Shape& s, const std::string& device, const std::string& driver,
              std::ostream* file) {
  const Inputs in(s, args.dtype);
  const ProductUnit unit(in.x.as(), in.w.as(), args.dtype, s.n, s.h, s.v);
  std::vector<Candidate> candidates;
  for (const std::string& backend : args.backends)
    for (const std::string& op : args.ops)
      for (const std::string& entropy : args.entropies)
        for (const Activity& activity : args.activities)
          for (const std::size_t cache_mib : args.cache_mibs) {
            Candidate c;
            c.op = op;
            c.entropy = entropy;
            c.backend = backend;
            c.activity = activity;
            c.cache_mib = cache_mib;
            prepare(in, args, c);
            candidates.push_back(std::move(c));
          }
  std::vector<std::function<void()>> runs;
  for (const Candidate& c : candidates) runs.push_back(c.run);
  runs.emplace_back(std::ref(unit));
  const std::vector<std::vector<double>> times = measure_rounds(runs, candidates.size(), args.reps, args.seconds);
  for (std::size_t k = 0; k < candidates.size(); ++k) candidates[k].ms = times[k];
  const std::vector<double>& unit_ms = times.back();
  for (const Candidate& c : candidates) {
    const Errors e = args.check ? measure_errors(in, c) : Errors{};
    const double ms = median(c.ms), gemm = median(unit_ms);
    double of_dense = NAN, of_off = NAN;
    for (const Candidate& d : candidates) {
      if (d.op != c.op || d.backend != c.backend || d.cache_mib != c.cache_mib) continue;
      if (d.entropy == c.entropy && d.activity.dense()) of_dense = paired_ratio(c.ms, d.ms);
      if (d.entropy == "off" && d.activity.pattern == c.activity.pattern && d.activity.fraction == c.activity.fraction)
        of_off = paired_ratio(c.ms, d.ms);
    }
    const std::string line =
        "{\"op\": \"" + c.op + "\", \"backend\": \"" + c.backend + "\", \"n\": " + std::to_string(s.n) +
        ", \"h\": " + std::to_string(s.h) + ", \"v\": " + std::to_string(s.v) + ", \"dtype\": \"" +
        to_string(args.dtype) + "\", \"entropy\": \"" + c.entropy + "\", \"active\": " + number(c.activity.fraction) +
        ", \"pattern\": \"" + c.activity.pattern + "\", \"ms\": " + number(ms) + ", \"gemm_ms\": " + number(gemm) +
        ", \"units\": " + number(ms / gemm) + ", \"of_dense\": " + number(of_dense) +
        ", \"of_entropy_off\": " + number(of_off) + ", \"live_tiles\": " + number(live_tiles(c.activity.mask(s.n))) +
        ", \"rounds\": " + std::to_string(c.ms.size()) +
        ", \"extra_mib\": " + number(static_cast<double>(c.extra_bytes) / 1048576) +
        ", \"workspace_mib\": " + std::to_string(args.workspace_mib) +
        ", \"cache_mib\": " + number(static_cast<double>(c.cache_bytes) / 1048576) +
        ", \"logprob_err\": " + number(e.logprob) + ", \"entropy_err\": " + number(e.entropy) +
        ", \"dx_err\": " + number(e.dx) + ", \"dw_err\": " + number(e.dw) + ", \"device\": \"" + device +
        "\", \"driver\": \"" + driver + "\", \"commit\": \"" + args.commit + "\", \"command\": \"" + args.command +
        "\"}";
    if (file != nullptr) *file << line << "\n" << std::flush;
    std::printf(
        "%-16s %-13s %-6s %4.2f %-9s cache %6.0f MiB %ldx%ldx%ld  %9.3f ms %6.3f units  of dense %5.3f  of off %5.3f  "
        "errors %.2g %.2g %.2g %.2g\n",
        c.op.c_str(), c.backend.c_str(), c.entropy.c_str(), c.activity.fraction, c.activity.pattern.c_str(),
        static_cast<double>(c.cache_bytes) / 1048576, s.n, s.h, s.v, ms, ms / gemm, of_dense, of_off, e.logprob,
        e.entropy, e.dx, e.dw);
    std::fflush(stdout);
  }
  std::printf("unit %ldx%ldx%ld %.3f ms, %.0f TFLOP/s\n", s.n, s.h, s.v, median(unit_ms),
              2.0 * double(s.n) * double(s.h) * double(s.v) / median(unit_ms) / 1e9);
}

int main_of(int argc, char** argv) {
  const Arguments args = parse(argc, argv);
  cudaDeviceProp properties{};
  require(cudaGetDeviceProperties(&properties, 0));
  std::unique_ptr<std::ofstream> file;
  if (!args.out.empty()) file = std::make_unique<std::ofstream>(args.out, std::ios::app);
  for (const Shape& s : args.cases) run_case(args, s, properties.name, driver_version(), file.get());
  return 0;
}

}  // namespace
}  // namespace lmhead::bench

int main(int argc, char** argv) { return lmhead::bench::main_of(argc, argv); }
