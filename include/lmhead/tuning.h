// Tuning: which of a backend's compiled configurations runs a shape fastest on this machine.
//
// Every operation has an analytic default that needs no tuning; tune() measures it against the few other
// configurations of its backend and keeps it unless one is at least 2 % faster. Choices go to a cache file
// under $XDG_CACHE_HOME/lmhead (or ~/.cache/lmhead), one a backend, device, driver, GEMM library and version of
// lmhead, and later calls of this and other processes look them up. No configuration changes a result bit, so a
// lost, foreign or stale file costs speed alone: it is ignored with a warning on stderr.
//
// A process reads a cache file once, before its first call of that backend. Call tune() between training
// steps, not inside one: it allocates, and waits for the device.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lmhead/lmhead.h"

namespace lmhead {

/// Name of each backend's analytic default.
inline constexpr const char* kDefaultConfiguration = "default";

/// Names of a backend's configurations for an operation, the default first. A backend of this build; one
/// without a choice has the default alone. Empty for an unknown backend.
std::vector<std::string> configurations(const std::string& backend, Operation operation);

/// What to measure: forward, and backward with gradients of hidden and weight, on random data.
struct TuneRequest {
  std::int64_t tokens = 0;         ///< N >= 1; the choice serves every N of the same bucket, see token_bucket()
  std::int64_t hidden = 0;         ///< H >= 1
  std::int64_t vocab = 0;          ///< V >= 1, of this rank's shard
  DType dtype = DType::kBFloat16;  ///< of hidden and weight: kBFloat16, kFloat16 or kFloat32
  EntropyMode entropy = EntropyMode::kGrad;
  std::optional<double> softcap = std::nullopt;
  double logit_scale = 1.0;
  const char* backend = "auto";
  Device device = Device::kCpu;
  int threads = 0;              ///< CPU threads, 0: all
  bool inference_only = false;  ///< no backward will come: the forward alone is tuned
  double seconds = 4.0;  ///< of measuring an operation, > 0; three turns of every configuration are made in any case
  bool save = true;      ///< write the cache file; the running process uses the choice either way
};

/// One configuration's share in a measurement.
struct TunedTime {
  std::string configuration;
  double ms;          ///< median over turns
  double of_default;  ///< median over turns of its time / the default's in the same turn
};

/// The choice for one operation.
struct TuneResult {
  std::string backend;
  Operation operation;           ///< kForward or kBackward
  std::int64_t bucket;           ///< token_bucket(tokens)
  std::string configuration;     ///< what later calls use
  std::vector<TunedTime> times;  ///< the default first
  int turns;
  std::string file;     ///< where the choice was saved; "" if it was not
  std::string warning;  ///< why it was not saved; "" when it was, or was not wanted
};

/// Measures and keeps the choices, forward first. Operations whose backend has one configuration are left out.
/// kInvalidArgument for a size outside [1, 2^31), seconds that are not finite and > 0 or an unknown backend,
/// kTypeMismatch for another dtype, kUnsupported for a device or backend that is not here, kOutOfMemory for a problem
/// that does not fit.
Result<std::vector<TuneResult>> tune(const TuneRequest& request);

/// The next power of two, within [128, 2^20]: 1 -> 128, 129 -> 256, 20000 -> 32768.
std::int64_t token_bucket(std::int64_t tokens);

}  // namespace lmhead
