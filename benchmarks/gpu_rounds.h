// How GPU candidates are timed: in rotation with one cuBLASLt product, the unit.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "gpu_memory.h"

namespace lmhead::bench {

/// One 16-bit product [n, h] x [h, v] by cuBLASLt into 16-bit logits, run on the default stream.
class ProductUnit {
 public:
  /// hidden [n, h] and weight [v, h] contiguous, of `dtype`; null ones are made of random bf16 values.
  ProductUnit(const void* hidden, const void* weight, DType dtype, std::int64_t n, std::int64_t h, std::int64_t v);
  void operator()() const;

 private:
  DType dtype_;
  std::int64_t n_, h_, v_;
  Memory own_hidden_, own_weight_, logits_, workspace_;
  const void *hidden_, *weight_;
};

/// Milliseconds of each run, one a round, between events on the default stream. Every round starts with runs[busy]
/// untimed, then all runs in an order that rotates, queued whole: on a starved stream an event pair would time the
/// host. Two rounds warm up; from the third on it stops after `seconds`.
std::vector<std::vector<double>> measure_rounds(const std::vector<std::function<void()>>& runs, std::size_t busy,
                                                int rounds, double seconds);

/// The kernel driver's version, such as "580.159.04".
std::string driver_version();

}  // namespace lmhead::bench
