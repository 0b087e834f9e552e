#include "testing/problem.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

#include "core/element.h"
#include "testing/parallel.h"

namespace lmhead::testing {
namespace {

std::uint64_t mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Numbers by position, so that threads fill a big matrix in any order and get the same bits.
struct Random {
  std::uint64_t seed;
  std::uint64_t bits(std::uint64_t i) const { return mix(mix(seed) ^ i); }
  double uniform(std::uint64_t i) const { return static_cast<double>(bits(i) >> 11) * 0x1p-53; }
  /// Mean 0, variance 1: the sum of four 16-bit uniforms.
  double normal(std::uint64_t i) const {
    const std::uint64_t b = bits(i);
    const double sum = static_cast<double>((b & 0xffff) + (b >> 16 & 0xffff) + (b >> 32 & 0xffff) + (b >> 48));
    return (sum / 65535.0 - 2.0) * 1.7320508075688772;
  }
};

double spread(Data data) {
  switch (data) {
    case Data::kPeaked: return 8;
    case Data::kVeryPeaked: return 40;
    default: return 1.5;
  }
}

struct Offset {
  double logit, hidden;  ///< hidden[:, 0] = hidden, weight[:, 0] ~ logit / hidden: exact in every dtype
};
Offset offset(Data data) {
  switch (data) {
    case Data::kLow: return {-120, 8};
    case Data::kOffsetUp: return {1000, 32};
    case Data::kOffsetDown: return {-1000, 32};
    default: return {0, 0};
  }
}

std::int64_t stride_of(const Case& c, std::int64_t width) { return c.pad == 0 ? width : width + c.pad; }

void copy_row(HostTensor& to, std::int64_t to_row, const HostTensor& from, std::int64_t from_row, double factor) {
  for (std::int64_t k = 0; k < to.cols; ++k) to.set(to_row, k, factor * from.at(from_row, k));
}

HostTensor upstream(const Case& c, DType dtype, const Random& random) {
  static constexpr std::int64_t kStrides[] = {1, 3, 0, -1};
  HostTensor t(dtype, c.n, 1, kStrides[static_cast<int>(c.upstream)]);
  for (std::int64_t i = 0; i < c.n; ++i) {
    const bool zero = c.zero_every > 0 && i % c.zero_every == c.zero_every - 1;
    t.set(i, 0, zero ? 0.0 : random.normal(static_cast<std::uint64_t>(c.upstream == Upstream::kBroadcast ? 0 : i)));
  }
  return t;
}

}  // namespace

HostTensor::HostTensor(DType type, std::int64_t r, std::int64_t c, std::int64_t stride)
    : dtype(type), rows(r), cols(c), row_stride(stride), origin(stride < 0 && r > 0 ? -stride * (r - 1) : 0) {
  const std::int64_t elements = r == 0 ? 0 : std::abs(stride) * (r - 1) + c;
  bytes.assign(static_cast<std::size_t>(elements) * size_of(type), std::byte{Buffer::kPoison});
}

double HostTensor::at(std::int64_t i, std::int64_t j) const {
  return load_float(bytes.data(), dtype, origin + i * row_stride + j);
}
std::int64_t HostTensor::id(std::int64_t i) const { return load_int(bytes.data(), dtype, origin + i * row_stride); }
void HostTensor::set(std::int64_t i, std::int64_t j, double value) {
  store_float(bytes.data(), dtype, origin + i * row_stride + j, value);
}
void HostTensor::set_id(std::int64_t i, std::int64_t value) {
  // Little endian: the low bytes of a 64-bit two's complement number are the narrower one.
  std::memcpy(bytes.data() + static_cast<std::size_t>(origin + i * row_stride) * size_of(dtype), &value,
              size_of(dtype));
}
ConstMatrix HostTensor::matrix(const std::byte* base) const { return {base, rows, cols, row_stride, dtype}; }
ConstVector HostTensor::vector(const std::byte* base) const {
  if (absent()) return {};
  return {base + static_cast<std::size_t>(origin) * size_of(dtype), rows, row_stride, dtype};
}

const char* to_string(Data data) {
  switch (data) {
    case Data::kFlat: return "flat";
    case Data::kPeaked: return "peaked";
    case Data::kVeryPeaked: return "very_peaked";
    case Data::kLow: return "low";
    case Data::kOffsetUp: return "offset_up";
    case Data::kOffsetDown: return "offset_down";
    case Data::kOutliers: return "outliers";
    case Data::kEqual: return "equal";
    case Data::kOneHot: return "one_hot";
    case Data::kAligned: return "aligned";
  }
  return "unknown";
}

std::string Case::name() const {
  std::ostringstream s;
  s << n << "x" << h << "x" << v << " " << to_string(data) << " " << lmhead::to_string(weight);
  if (hidden != weight) s << " hidden=" << lmhead::to_string(hidden);
  if (compute) s << " compute=" << lmhead::to_string(*compute);
  if (bias) s << " bias=" << lmhead::to_string(*bias);
  if (ids != DType::kInt64) s << " ids=" << lmhead::to_string(ids);
  if (temperature != 1.0) s << " temperature=" << temperature;
  if (row_temperature) s << " row_temperature";
  if (scale != 1.0) s << " scale=" << scale;
  if (softcap) s << " softcap=" << *softcap;
  if (valid_vocab) s << " valid_vocab=" << *valid_vocab;
  if (ignore_index != -100) s << " ignore_index=" << ignore_index;
  if (ignore_every != 0) s << " ignore_every=" << ignore_every;
  if (out_of_vocab == OutOfVocab::kZero) s << " out_of_vocab=zero";
  if (outside_every != 0) s << " outside_every=" << outside_every;
  if (active) s << " active=" << lmhead::to_string(*active) << " inactive_every=" << inactive_every;
  if (zero_every != 0) s << " zero_every=" << zero_every;
  if (entropy != EntropyMode::kGrad) s << (entropy == EntropyMode::kOff ? " entropy=off" : " entropy=metric");
  static constexpr const char* kUpstreams[] = {"", " upstream=strided", " upstream=broadcast", " upstream=reversed"};
  s << kUpstreams[static_cast<int>(upstream)];
  if (pad != 0) s << " pad=" << pad;
  if (seed != 1) s << " seed=" << seed;
  return s.str();
}

TestProblem::TestProblem(const Case& c)
    : spec(c),
      hidden(c.hidden, c.n, c.h, stride_of(c, c.h)),
      weight(c.weight, c.v, c.h, stride_of(c, c.h)),
      targets(c.ids, c.n, 1, stride_of(c, 1)) {
  const Random x{c.seed * 16}, w{c.seed * 16 + 1}, b{c.seed * 16 + 2}, t{c.seed * 16 + 3}, u{c.seed * 16 + 4},
      a{c.seed * 16 + 5}, g{c.seed * 16 + 6};
  const auto width = static_cast<std::uint64_t>(c.h);
  const double s = spread(c.data) / std::sqrt(static_cast<double>(c.h));
  const Offset shift = offset(c.data);
  const std::int64_t last = valid() - 1;

  parallel_ranges(c.n, 8 * c.n * c.h, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i)
      for (std::int64_t k = 0; k < c.h; ++k) {
        double value = x.normal(static_cast<std::uint64_t>(i) * width + k);
        if (c.data == Data::kOutliers && k % (c.h / 3 + 1) == i % 2) value *= 20;
        if (shift.hidden != 0 && k == 0) value = shift.hidden;
        hidden.set(i, k, value);
      }
  });
  parallel_ranges(c.v, 8 * c.v * c.h, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = begin; j < end; ++j)
      for (std::int64_t k = 0; k < c.h; ++k) {
        const std::uint64_t row = c.data == Data::kEqual ? 0 : static_cast<std::uint64_t>(j);
        double value = s * w.normal(row * width + k);
        if (c.data == Data::kOutliers && j % 97 == 5) value *= 20;
        if (shift.hidden != 0 && k == 0) value = (shift.logit + value) / shift.hidden;
        weight.set(j, k, j > last ? std::numeric_limits<double>::quiet_NaN() : value);
      }
  });
  for (std::int64_t i = 0; i < c.n; ++i) {
    // The first and the last column are targets: they are where a shard or a ragged tile goes wrong.
    std::int64_t id = i == 0   ? 0
                      : i == 1 ? last
                               : static_cast<std::int64_t>(t.bits(i) % static_cast<std::uint64_t>(last + 1));
    if (c.data == Data::kOneHot || c.data == Data::kAligned) {
      double square = 0;
      for (std::int64_t k = 0; k < c.h; ++k) square += hidden.at(i, k) * hidden.at(i, k);
      copy_row(weight, id, hidden, i, c.data == Data::kOneHot ? 100 / square : 1);
    }
    if (c.ignore_every > 0 && i % c.ignore_every == c.ignore_every - 1) id = c.ignore_index;
    if (c.outside_every > 0 && i % c.outside_every == c.outside_every - 1) {
      const std::int64_t ids[] = {last + 1, -1, c.ids == DType::kInt64 ? std::numeric_limits<std::int64_t>::min() : -7,
                                  c.ids == DType::kInt64 ? std::numeric_limits<std::int64_t>::max() : 2147483647};
      id = ids[i / c.outside_every % 4];
    }
    targets.set_id(i, id);
  }
  if (c.bias) {
    bias = HostTensor(*c.bias, c.v, 1, stride_of(c, 1));
    for (std::int64_t j = 0; j <= last; ++j) bias.set(j, 0, b.normal(static_cast<std::uint64_t>(j)));
  }
  if (c.active) {
    active = HostTensor(*c.active, c.n, 1, stride_of(c, 1));
    for (std::int64_t i = 0; i < c.n; ++i) {
      const bool off = c.inactive_every > 0 && i % c.inactive_every == 0;
      // Any value > 0 is active; in signed types a negative one is not.
      const bool narrow = *c.active == DType::kBool || *c.active == DType::kUInt8;
      active.set_id(i, off ? (narrow ? 0 : -(i % 2)) : *c.active == DType::kBool ? 1 : 1 + i % 3);
    }
  }
  if (c.row_temperature) {
    row_temperature = HostTensor(DType::kFloat32, c.n, 1, stride_of(c, 1));
    for (std::int64_t i = 0; i < c.n; ++i) row_temperature.set(i, 0, 0.3 + 1.7 * u.uniform(i));
  }
  dlogprob = upstream(c, result(), a);
  if (c.entropy == EntropyMode::kGrad) dentropy = upstream(c, result(), g);
}

bool TestProblem::is_active(std::int64_t i) const {
  return (active.absent() || active.id(i) > 0) && targets.id(i) != spec.ignore_index;
}

Problem TestProblem::host() const {
  Problem p;
  p.hidden = hidden.matrix(hidden.bytes.data());
  p.weight = weight.matrix(weight.bytes.data());
  p.bias = bias.vector(bias.bytes.data());
  p.targets = targets.vector(targets.bytes.data());
  p.active = active.vector(active.bytes.data());
  p.row_temperature = row_temperature.vector(row_temperature.bytes.data());
  p.valid_vocab = spec.valid_vocab;
  p.temperature = spec.temperature;
  p.logit_scale = spec.scale;
  p.softcap = spec.softcap;
  p.ignore_index = spec.ignore_index;
  p.out_of_vocab = spec.out_of_vocab;
  p.entropy = spec.entropy;
  p.compute_dtype = spec.compute;
  return p;
}

const std::byte* PlacedProblem::place(const char* name, const HostTensor& tensor) {
  if (tensor.absent()) return nullptr;
  inputs_.push_back({name, &tensor, Buffer(arena_, tensor.bytes)});
  return inputs_.back().buffer.data();
}

PlacedProblem::PlacedProblem(const TestProblem& t, Arena& arena) : arena_(arena), problem_(t.host()) {
  problem_.hidden = t.hidden.matrix(place("hidden", t.hidden));
  problem_.weight = t.weight.matrix(place("weight", t.weight));
  problem_.bias = t.bias.vector(place("bias", t.bias));
  problem_.targets = t.targets.vector(place("targets", t.targets));
  problem_.active = t.active.vector(place("active", t.active));
  problem_.row_temperature = t.row_temperature.vector(place("temperature", t.row_temperature));
  dlogprob_ = t.dlogprob.vector(place("dlogprob", t.dlogprob));
  dentropy_ = t.dentropy.vector(place("dentropy", t.dentropy));
}

std::string PlacedProblem::changed_input() const {
  for (const Input& input : inputs_) {
    if (input.buffer.download() != input.tensor->bytes) return std::string(input.name) + " was written";
    if (!input.buffer.guards_intact()) return std::string("memory around ") + input.name + " was written";
  }
  return {};
}

std::vector<Head> read_heads() {
  const char* given = std::getenv("LMHEAD_SHAPES_DIR");
  std::ifstream file(std::string(given != nullptr ? given : LMHEAD_SHAPES_DIR) + "/heads.txt");
  std::vector<Head> heads;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    Head head;
    double softcap = 0;
    int tied = 0;
    if (fields >> head.name >> head.hidden >> head.vocab >> tied >> softcap >> head.scale) {
      if (softcap > 0) head.softcap = softcap;
      heads.push_back(head);
    }
  }
  return heads;
}

}  // namespace lmhead::testing
