// Measures a backend's configurations beside its default and keeps the better one.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/half.h"
#include "core/return_if_error.h"
#include "core/tune_device.h"

namespace lmhead {
namespace {

/// A configuration replaces the default when it takes at most this part of its time: less is noise.
constexpr double kWorthwhile = 0.98;
constexpr int kLeastTurns = 3, kMostTurns = 25;
/// Before anything counts: clocks settle.
constexpr double kWarmSeconds = 0.5;
/// Shorter calls are timed several at once.
constexpr double kLeastMs = 2.0;

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const std::size_t half = v.size() / 2;
  return v.size() % 2 == 1 ? v[half] : (v[half - 1] + v[half]) / 2;
}

Status check_request(const TuneRequest& q) {
  for (const auto& [name, value] : {std::pair{"tokens", q.tokens}, {"hidden", q.hidden}, {"vocab", q.vocab}})
    if (value < 1 || value >= std::int64_t{1} << 31)  // so that no product below overflows
      return {StatusCode::kInvalidArgument,
              std::string(name) + ": expected at least 1 and less than 2^31, got " + std::to_string(value)};
  if (q.dtype != DType::kBFloat16 && q.dtype != DType::kFloat16 && q.dtype != DType::kFloat32)
    return {StatusCode::kTypeMismatch,
            std::string("dtype: expected bfloat16, float16 or float32, got ") + to_string(q.dtype)};
  if (!(q.seconds > 0) || !std::isfinite(q.seconds))
    return {StatusCode::kInvalidArgument, "seconds: expected a number > 0, got " + std::to_string(q.seconds)};
  return {};
}

/// A block of normal numbers of a floating type. Random data: products of zeros draw less power and run faster.
std::vector<std::byte> normal_block(DType dtype, float deviation, unsigned seed) {
  // Odd, so that rows differ also where H is a power of two.
  constexpr std::size_t kCount = (std::size_t{1} << 20) + 7;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<std::byte> block(kCount * size_of(dtype));
  for (std::size_t i = 0; i < kCount; ++i) {
    const float value = normal(random);
    const std::uint16_t half = dtype == DType::kBFloat16 ? float_to_bf16(value) : float_to_fp16(value);
    const void* bits = dtype == DType::kFloat32 ? static_cast<const void*>(&value) : &half;
    std::copy_n(static_cast<const std::byte*>(bits), size_of(dtype), block.data() + i * size_of(dtype));
  }
  return block;
}

/// The random problem, its outputs, and one operation on it under any configuration.
class Subject {
 public:
  Subject(const TuneRequest& q, TuneDevice& device) : q_(q), device_(device) {}

  Status prepare() {
    const auto n = static_cast<std::size_t>(q_.tokens), h = static_cast<std::size_t>(q_.hidden),
               v = static_cast<std::size_t>(q_.vocab), element = size_of(q_.dtype);
    void *x{}, *w{}, *ids{}, *a{}, *g{}, *logprob{}, *entropy{}, *lse{}, *dx{}, *dw{};
    LMHEAD_RETURN_IF_ERROR(take(&x, n * h * element));
    LMHEAD_RETURN_IF_ERROR(take(&w, v * h * element));
    LMHEAD_RETURN_IF_ERROR(take(&ids, n * sizeof(std::int64_t)));
    for (void** row : {&a, &g, &logprob, &entropy, &lse}) LMHEAD_RETURN_IF_ERROR(take(row, n * sizeof(float)));
    if (!q_.inference_only) {
      LMHEAD_RETURN_IF_ERROR(take(&dx, n * h * element));
      LMHEAD_RETURN_IF_ERROR(take(&dw, v * h * element));
    }
    const auto fill = [&](void* to, std::size_t bytes, const auto& block) {
      return device_.fill(to, bytes, block.data(), block.size() * sizeof(block[0]));
    };
    LMHEAD_RETURN_IF_ERROR(fill(x, n * h * element, normal_block(q_.dtype, 1.0f, 1)));
    LMHEAD_RETURN_IF_ERROR(
        fill(w, v * h * element, normal_block(q_.dtype, 1.5f / std::sqrt(static_cast<float>(q_.hidden)), 2)));
    LMHEAD_RETURN_IF_ERROR(fill(a, n * sizeof(float), normal_block(DType::kFloat32, 1.0f, 3)));
    LMHEAD_RETURN_IF_ERROR(fill(g, n * sizeof(float), normal_block(DType::kFloat32, 0.1f, 4)));
    std::mt19937_64 random(5);
    std::vector<std::int64_t> targets(n);
    for (std::int64_t& id : targets) id = std::uniform_int_distribution<std::int64_t>(0, q_.vocab - 1)(random);
    LMHEAD_RETURN_IF_ERROR(fill(ids, n * sizeof(std::int64_t), targets));

    problem_.hidden = {x, q_.tokens, q_.hidden, q_.hidden, q_.dtype};
    problem_.weight = {w, q_.vocab, q_.hidden, q_.hidden, q_.dtype};
    problem_.targets = {ids, q_.tokens, 1, DType::kInt64};
    problem_.entropy = q_.entropy;
    problem_.softcap = q_.softcap;
    problem_.logit_scale = q_.logit_scale;
    outputs_.logprob = {logprob, q_.tokens};
    outputs_.lse = {lse, q_.tokens};
    if (q_.entropy != EntropyMode::kOff) outputs_.entropy = {entropy, q_.tokens};
    inputs_.lse = {lse, q_.tokens};
    inputs_.dlogprob = {a, q_.tokens};
    if (q_.entropy == EntropyMode::kGrad) {
      inputs_.entropy = {entropy, q_.tokens};
      inputs_.dentropy = {g, q_.tokens};
    }
    execution_.backend = q_.backend;
    execution_.device = q_.device;
    execution_.threads = q_.threads;
    execution_.configuration = kDefaultConfiguration;
    execution_.check = false;
    if (q_.inference_only) return {};
    gradients_.hidden = {dx, q_.tokens, q_.hidden, q_.hidden, q_.dtype};
    gradients_.weight = {dw, q_.vocab, q_.hidden, q_.hidden, q_.dtype};
    return {};
  }

  Result<Call> plan(Operation operation) {
    execution_.configuration = kDefaultConfiguration;  // others exist for one operation alone
    return plan_call(problem_, execution_, operation);
  }

  Status reserve(Operation operation, std::span<const Configuration> list) {
    std::size_t most = 0;
    for (const Configuration& c : list) {
      execution_.configuration = c.name;
      Result<WorkspaceSize> size = workspace_size(problem_, operation, gradients_, execution_);
      if (!size.ok()) return size.status();
      most = std::max(most, size->bytes);
    }
    if (most <= execution_.workspace_bytes) return {};
    LMHEAD_RETURN_IF_ERROR(take(&execution_.workspace, most));
    execution_.workspace_bytes = most;
    return {};
  }

  Status run(Operation operation, const char* configuration) {
    execution_.configuration = configuration;
    return operation == Operation::kBackward ? backward(problem_, inputs_, gradients_, execution_)
                                             : forward(problem_, outputs_, execution_);
  }

 private:
  Status take(void** data, std::size_t bytes) {
    Result<void*> memory = device_.allocate(bytes);
    if (memory.ok()) *data = *memory;
    return memory.status();
  }

  const TuneRequest& q_;
  TuneDevice& device_;
  Problem problem_;
  ForwardOutputs outputs_;
  BackwardInputs inputs_;
  BackwardOutputs gradients_;
  Execution execution_;
};

/// Turns of all configurations, every second one backwards, after a warm-up with the default.
Result<TuneResult> measure(const TuneRequest& q, Subject& subject, TuneDevice& device, Operation operation,
                           std::span<const Configuration> list) {
  int calls = 1;
  const auto time = [&](const char* name) {
    return device.time([&]() -> Status {
      for (int i = 0; i < calls; ++i) LMHEAD_RETURN_IF_ERROR(subject.run(operation, name));
      return {};
    });
  };
  const double warm = std::min(kWarmSeconds, q.seconds / 4);
  double last = 0;
  const Clock::time_point start = Clock::now();
  do {
    Result<double> ms = time(list.front().name);
    if (!ms.ok()) return ms.status();
    last = *ms;
  } while (seconds_since(start) < warm);
  calls = std::clamp(static_cast<int>(kLeastMs / std::max(last, 1e-3)), 1, 1000);

  std::vector<std::vector<double>> ms(list.size());
  const Clock::time_point begin = Clock::now();
  int turns = 0;
  for (; turns < kLeastTurns || (turns < kMostTurns && seconds_since(begin) < q.seconds); ++turns)
    for (std::size_t k = 0; k < list.size(); ++k) {
      const std::size_t at = turns % 2 == 0 ? k : list.size() - 1 - k;
      Result<double> t = time(list[at].name);
      if (!t.ok()) return t.status();
      ms[at].push_back(*t / calls);
    }

  TuneResult result{"", operation, token_bucket(q.tokens), list.front().name, {}, turns, "", ""};
  double best = kWorthwhile;
  for (std::size_t k = 0; k < list.size(); ++k) {
    std::vector<double> ratios;
    for (std::size_t i = 0; i < ms[k].size(); ++i) ratios.push_back(ms[k][i] / ms[0][i]);
    result.times.push_back({list[k].name, median(ms[k]), median(ratios)});
    // By both measures: paired ratios alone mislead when a few turns were disturbed.
    const TunedTime& t = result.times.back();
    if (k > 0 && t.of_default <= best && t.ms <= kWorthwhile * result.times.front().ms) {
      best = t.of_default;
      result.configuration = list[k].name;
    }
  }
  return result;
}

Result<std::vector<TuneResult>> run_tune(const TuneRequest& q) {
  LMHEAD_RETURN_IF_ERROR(check_request(q));
#if LMHEAD_HAS_CUDA
  const std::unique_ptr<TuneDevice> device = q.device == Device::kCuda ? cuda::tune_device() : host_tune_device();
#else
  if (q.device == Device::kCuda)
    return Status(StatusCode::kUnsupported, "device: expected the CPU (built without CUDA), got CUDA");
  const std::unique_ptr<TuneDevice> device = host_tune_device();
#endif
  Subject subject(q, *device);
  LMHEAD_RETURN_IF_ERROR(subject.prepare());
  std::vector<TuneResult> results;
  TuningTable table;
  const TuningSource* source = nullptr;
  bool has_forward = false;
  for (const Operation operation : {Operation::kForward, Operation::kBackward}) {
    if (operation == Operation::kBackward && q.inference_only) break;
    Result<Call> call = subject.plan(operation);
    if (!call.ok()) return call.status();
    const Implementation& implementation = *call->implementation;
    if (implementation.configurations == nullptr) continue;
    const std::span<const Configuration> list = implementation.configurations(operation);
    if (list.size() < 2) continue;
    Result<const TuningSource*> found = implementation.tuning_source();
    if (!found.ok()) return found.status();
    source = *found;
    if (operation == Operation::kBackward && !has_forward) {  // lse and entropy come from a forward
      LMHEAD_RETURN_IF_ERROR(subject.reserve(Operation::kForward, implementation.configurations(Operation::kForward)));
      LMHEAD_RETURN_IF_ERROR(subject.run(Operation::kForward, kDefaultConfiguration));
    }
    LMHEAD_RETURN_IF_ERROR(subject.reserve(operation, list));
    Result<TuneResult> result = measure(q, subject, *device, operation, list);
    if (!result.ok()) return result.status();
    has_forward = true;
    result->backend = implementation.name;
    table[tuning_key(call->problem, operation)] = result->configuration;
    results.push_back(*std::move(result));
  }
  if (source == nullptr) return results;
  adopt_tuning(*source, table);
  if (!q.save) return results;
  const std::filesystem::path file = tuning_file(*source);
  const Status saved = write_tuning(file, *source, table);
  for (TuneResult& result : results)
    (saved.ok() ? result.file : result.warning) = saved.ok() ? file.string() : saved.message();
  return results;
}

}  // namespace

Result<std::vector<TuneResult>> tune(const TuneRequest& request) {
  return guarded("tune", [&] { return run_tune(request); });
}

}  // namespace lmhead
