#include "gpu_rounds.h"

#include <chrono>
#include <cmath>
#include <fstream>
#include <utility>

#include "cuda/product.h"
#include "gpu_exact.h"

namespace lmhead::bench {
namespace {

constexpr std::size_t kUnitWorkspace = std::size_t{64} << 20;

std::size_t bytes16(std::int64_t count) { return static_cast<std::size_t>(count) * 2; }

struct EventPair {
  cudaEvent_t begin = nullptr, end = nullptr;
  EventPair() {
    require(cudaEventCreate(&begin));
    require(cudaEventCreate(&end));
  }
  EventPair(const EventPair&) = delete;
  EventPair& operator=(const EventPair&) = delete;
  ~EventPair() {
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
  }
};

}  // namespace

ProductUnit::ProductUnit(const void* hidden, const void* weight, DType dtype, std::int64_t n, std::int64_t h,
                         std::int64_t v)
    : dtype_(dtype),
      n_(n),
      h_(h),
      v_(v),
      own_hidden_(hidden == nullptr ? bytes16(n * h) : 0),
      own_weight_(weight == nullptr ? bytes16(v * h) : 0),
      logits_(bytes16(n * v)),
      workspace_(kUnitWorkspace),
      hidden_(hidden == nullptr ? own_hidden_.as() : hidden),
      weight_(weight == nullptr ? own_weight_.as() : weight) {
  if (hidden == nullptr) fill_normal(own_hidden_.as(), dtype, n * h, 1, 1.0f);
  if (weight == nullptr) fill_normal(own_weight_.as(), dtype, v * h, 2, 1.5f / std::sqrt(static_cast<float>(h)));
}

void ProductUnit::operator()() const {
  cuda::Product p{};
  p.m = n_;
  p.n = v_;
  p.k = h_;
  p.a = {hidden_, h_};
  p.b = {weight_, h_};
  p.transpose_b = true;
  p.in = p.out_type = dtype_;
  p.out = logits_.as();
  p.out_stride = v_;
  p.workspace = workspace_.as();
  p.workspace_bytes = kUnitWorkspace;
  require(cuda::multiply(p, nullptr));
}

std::vector<std::vector<double>> measure_rounds(const std::vector<std::function<void()>>& runs, std::size_t busy,
                                                int rounds, double seconds) {
  constexpr int kWarm = 2, kLeast = 3;
  std::vector<std::vector<double>> ms(runs.size());
  const std::vector<EventPair> events(runs.size());
  const auto start = std::chrono::steady_clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(); };
  for (int round = -kWarm; round < rounds && (round < kLeast || elapsed() < seconds); ++round) {
    runs[busy]();  // takes the higher clock after the pause, and keeps the stream busy while the round is queued
    for (std::size_t k = 0; k < runs.size(); ++k) {  // rotated: nobody always has the same neighbour
      const std::size_t which = (k + static_cast<std::size_t>(round + kWarm)) % runs.size();
      require(cudaEventRecord(events[which].begin));
      runs[which]();
      require(cudaEventRecord(events[which].end));
    }
    require(cudaDeviceSynchronize());
    for (std::size_t k = 0; round >= 0 && k < runs.size(); ++k) {
      float time = 0;
      require(cudaEventElapsedTime(&time, events[k].begin, events[k].end));
      ms[k].push_back(static_cast<double>(time));
    }
  }
  return ms;
}

// The word behind "Module" in the file that the kernel driver publishes.
std::string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  std::string word, before;
  while (file >> word) {
    if (before == "Module" && word != "for") return word;
    if (before == "x86_64") return word;  // "... Open Kernel Module for x86_64  580.159.04 ..."
    before = word;
  }
  return "unknown";
}

}  // namespace lmhead::bench
