// Test problems: data with teeth in the caller's layout, owned on the host, placed on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lmhead/types.h"
#include "testing/arena.h"

namespace lmhead::testing {

/// A strided matrix (or, with one column, a vector) on the host. Cells between the rows hold NaN.
struct HostTensor {
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0, cols = 0, row_stride = 0;
  std::int64_t origin = 0;  ///< element of (0, 0): the last one of a vector with a negative stride
  std::vector<std::byte> bytes;

  HostTensor() = default;
  HostTensor(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t row_stride);
  bool absent() const { return cols == 0; }
  double at(std::int64_t i, std::int64_t j = 0) const;
  std::int64_t id(std::int64_t i) const;
  void set(std::int64_t i, std::int64_t j, double value);
  void set_id(std::int64_t i, std::int64_t value);
  /// Views over host memory or over a copy of `bytes` at `base`.
  ConstMatrix matrix(const std::byte* base) const;
  ConstVector vector(const std::byte* base) const;
};

/// What the logits look like.
enum class Data {
  kFlat,        ///< W ~ N(0, 1.5^2 / H), a language model early in training
  kPeaked,      ///< logits of standard deviation 8
  kVeryPeaked,  ///< logits of standard deviation 40
  kLow,         ///< logits near -120: fp32 exp of them is 0, a maximum that starts at 0 is wrong
  kOffsetUp,    ///< +1000 on every logit
  kOffsetDown,  ///< -1000 on every logit
  kOutliers,    ///< three hidden coordinates and some weight rows times 20
  kEqual,       ///< all logits of a row equal: entropy = log V
  kOneHot,      ///< the target about 100 above the rest: entropy -> 0, log-prob -> 0
  kAligned,     ///< weight[target] = hidden: the target's logit is |x|^2
};
const char* to_string(Data data);
inline constexpr Data kAllData[] = {Data::kFlat,     Data::kPeaked,     Data::kVeryPeaked, Data::kLow,
                                    Data::kOffsetUp, Data::kOffsetDown, Data::kOutliers,   Data::kEqual,
                                    Data::kOneHot,   Data::kAligned};

/// Layout of the upstream gradients.
enum class Upstream { kDense, kStrided, kBroadcast, kReversed };

/// Every parameter of a test problem.
struct Case {
  std::int64_t n = 37, h = 64, v = 1025;
  Data data = Data::kFlat;
  DType hidden = DType::kBFloat16, weight = DType::kBFloat16;
  std::optional<DType> compute = std::nullopt;
  std::optional<DType> bias = std::nullopt;
  DType ids = DType::kInt64;
  double temperature = 1.0;
  bool row_temperature = false;  ///< between 0.3 and 2
  double scale = 1.0;
  std::optional<double> softcap = std::nullopt;
  std::optional<std::int64_t> valid_vocab = std::nullopt;  ///< weight rows and biases beyond it are NaN
  std::int64_t ignore_index = -100;
  int ignore_every = 0;  ///< every k-th row has target ignore_index
  OutOfVocab out_of_vocab = OutOfVocab::kError;
  int outside_every = 0;  ///< every k-th row has a target outside the vocabulary
  std::optional<DType> active = std::nullopt;
  int inactive_every = 0;  ///< with `active`: every k-th row is switched off
  int zero_every = 0;      ///< every k-th row has upstream gradients of exactly 0
  EntropyMode entropy = EntropyMode::kGrad;
  Upstream upstream = Upstream::kDense;
  std::int64_t pad = 0;  ///< elements between the rows of hidden and weight, and between vector elements
  std::uint64_t seed = 1;

  /// Every parameter that is not the default, for messages and records.
  std::string name() const;
};

/// A Case with its data. Tests may edit the tensors before they run it.
struct TestProblem {
  Case spec;
  HostTensor hidden, weight, bias, targets, active, row_temperature, dlogprob, dentropy;

  explicit TestProblem(const Case& spec);
  std::int64_t valid() const { return spec.valid_vocab.value_or(spec.v); }
  /// As the contract says: mask set and target not ignore_index.
  bool is_active(std::int64_t i) const;
  double temperature(std::int64_t i) const {
    return row_temperature.absent() ? spec.temperature : row_temperature.at(i);
  }
  double a(std::int64_t i) const { return dlogprob.absent() ? 0 : dlogprob.at(i); }
  double g(std::int64_t i) const { return dentropy.absent() ? 0 : dentropy.at(i); }
  DType compute() const { return spec.compute.value_or(spec.weight); }
  DType result() const { return spec.hidden == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  /// The options, with views over host memory.
  Problem host() const;
};

/// A TestProblem copied to a device.
class PlacedProblem {
 public:
  PlacedProblem(const TestProblem& problem, Arena& arena);
  const Problem& problem() const { return problem_; }
  ConstVector dlogprob() const { return dlogprob_; }
  ConstVector dentropy() const { return dentropy_; }
  /// Whether every input byte and guard is as it was; else names the tensor.
  std::string changed_input() const;

 private:
  const std::byte* place(const char* name, const HostTensor& tensor);
  struct Input {
    const char* name;
    const HostTensor* tensor;
    Buffer buffer;
  };
  Arena& arena_;
  std::vector<Input> inputs_;
  Problem problem_;
  ConstVector dlogprob_, dentropy_;
};

/// A line of shapes/heads.txt.
struct Head {
  std::string name;
  std::int64_t hidden = 0, vocab = 0;
  std::optional<double> softcap;
  double scale = 1;
};
/// Reads heads.txt from $LMHEAD_SHAPES_DIR, or from where the build found it.
std::vector<Head> read_heads();

}  // namespace lmhead::testing
