#include "dist/header.h"

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "core/dispatch.h"
#include "core/element.h"

namespace lmhead {
namespace {

/// Fields that must be equal on all ranks, in the order in which differences are reported.
enum Field : std::size_t {
  kCall,
  kRows,
  kHidden,
  kVocabSize,
  kValidVocab,
  kEntropy,
  kTemperature,
  kLogitScale,
  kSoftcap,
  kIgnoreIndex,
  kOutOfVocab,
  kInferenceOnly,
  kCompute,
  kHiddenDtype,
  kBias,
  kActive,
  kRowTemperature,
  kRowValues,
  kExtra,
  kFields
};
constexpr const char* kNames[kFields] = {"the call",
                                         "N",
                                         "H",
                                         "vocab_size",
                                         "valid_vocab",
                                         "the entropy mode",
                                         "temperature",
                                         "logit_scale",
                                         "softcap",
                                         "ignore_index",
                                         "out_of_vocab",
                                         "inference_only",
                                         "the dtype of the products",
                                         "the dtype of hidden",
                                         "bias",
                                         "active",
                                         "row_temperature",
                                         "targets, active rows or row temperatures",
                                         "reduce_hidden_grad or the layout"};
constexpr std::int64_t kAny = -1;  ///< agrees with everything: an empty shard may lack a bias

struct Fields {
  std::int64_t code;  ///< StatusCode of this rank's own checks
  std::int64_t shard_start, shard_size;
  std::array<std::int64_t, kFields> fields;
  std::array<char, 512 - 8 * (3 + kFields)> message;
};
static_assert(sizeof(Fields) == sizeof(Header));

/// FNV-1a over 64-bit words.
struct Hash {
  std::uint64_t value = 0xcbf29ce484222325u;
  void add(std::uint64_t word) { value = (value ^ word) * 0x100000001b3u; }
};

/// What the rows ask for, so that shifted targets or an unsliced mask on one rank do not pass in silence.
std::int64_t hash_rows(const ResolvedProblem& r) {
  const Problem& p = r.given;
  Hash hash;
  for (std::int64_t i = 0; i < r.n; ++i) {
    const bool active = p.active.absent() || load_int(p.active, i) > 0;
    hash.add(static_cast<std::uint64_t>(active ? load_int(p.targets, i) : p.ignore_index));
    if (!p.row_temperature.absent()) hash.add(std::bit_cast<std::uint64_t>(load_float(p.row_temperature, i)));
  }
  return static_cast<std::int64_t>(hash.value);
}

std::int64_t bits(double value) { return std::bit_cast<std::int64_t>(value); }

std::string show(std::size_t field, std::int64_t value) {
  switch (field) {
    case kTemperature:
    case kLogitScale:
    case kSoftcap: {
      char text[32];
      std::snprintf(text, sizeof text, "%g", std::bit_cast<double>(value));
      return text;
    }
    case kCompute:
    case kHiddenDtype: return to_string(static_cast<DType>(value));
    case kEntropy: return value == 0 ? "off" : value == 1 ? "metric" : "grad";
    case kOutOfVocab: return value == 0 ? "error" : "zero";
    case kInferenceOnly: return value == 0 ? "false" : "true";
    case kBias:
    case kActive:
    case kRowTemperature: return value == 0 ? "absent" : "given";
    case kCall:
    case kRowValues: return "one";
    default: return std::to_string(value);
  }
}

Status failed(const std::string& message) { return {StatusCode::kCommunication, message}; }

}  // namespace

Header make_header(const CallFacts& facts, const ResolvedProblem* r, const Status& local, Device device) {
  Fields header{};
  header.code = static_cast<std::int64_t>(local.code());
  local.message().copy(header.message.data(), header.message.size() - 1);
  if (r != nullptr) {
    const Problem& p = r->given;
    header.shard_start = p.vocab_start;
    header.shard_size = r->v_local;
    Hash call;
    for (const char* c = facts.name; *c != '\0'; ++c) call.add(static_cast<unsigned char>(*c));
    header.fields[kCall] = static_cast<std::int64_t>(call.value);
    header.fields[kRows] = r->n;
    header.fields[kHidden] = r->h;
    header.fields[kVocabSize] = r->vocab_size;
    header.fields[kValidVocab] = r->valid_vocab;
    header.fields[kEntropy] = static_cast<std::int64_t>(p.entropy);
    header.fields[kTemperature] = bits(p.temperature);
    header.fields[kLogitScale] = bits(p.logit_scale);
    header.fields[kSoftcap] = p.softcap ? bits(*p.softcap) : 0;
    header.fields[kIgnoreIndex] = p.ignore_index;
    header.fields[kOutOfVocab] = static_cast<std::int64_t>(p.out_of_vocab);
    header.fields[kInferenceOnly] = p.inference_only;
    header.fields[kCompute] = static_cast<std::int64_t>(r->compute);
    header.fields[kHiddenDtype] = static_cast<std::int64_t>(p.hidden.dtype);
    header.fields[kBias] = r->v_local == 0 ? kAny : !p.bias.absent();
    header.fields[kActive] = r->n == 0 ? kAny : !p.active.absent();
    header.fields[kRowTemperature] = r->n == 0 ? kAny : !p.row_temperature.absent();
    header.fields[kRowValues] = local.ok() && device == Device::kCpu ? hash_rows(*r) : 0;
  }
  header.fields[kExtra] = facts.extra;
  Header bytes;
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

Status header_verdict(std::span<const Header> all, const Status& local, bool shards) {
  std::vector<Fields> headers(all.size());
  std::memcpy(headers.data(), all.data(), all.size_bytes());
  if (!local.ok()) return local;
  for (std::size_t r = 0; r < headers.size(); ++r) {
    if (headers[r].code != static_cast<std::int64_t>(StatusCode::kOk))
      return failed("rank " + std::to_string(r) + " of the group failed: " +
                    lmhead::to_string(static_cast<StatusCode>(headers[r].code)) + ": " + headers[r].message.data());
  }
  for (std::size_t f = 0; f < kFields; ++f) {
    if (f == kRowValues && !shards) continue;  // ranks with rows of their own
    std::size_t first = 0;
    while (first + 1 < headers.size() && headers[first].fields[f] == kAny && f >= kBias && f <= kRowTemperature)
      ++first;
    for (std::size_t r = first + 1; r < headers.size(); ++r) {
      const std::int64_t a = headers[first].fields[f], b = headers[r].fields[f];
      if (a == b || (b == kAny && f >= kBias && f <= kRowTemperature)) continue;
      const bool hashed = f == kCall || f == kRowValues || (f == kExtra && !shards);
      return failed(std::string("ranks disagree on ") + kNames[f] + ": expected the same on all ranks, got " +
                    (hashed ? "other values on rank " + std::to_string(r) + " than on rank " + std::to_string(first)
                            : show(f, a) + " on rank " + std::to_string(first) + " and " + show(f, b) + " on rank " +
                                  std::to_string(r)));
    }
  }
  if (!shards) return {};
  std::int64_t next = 0;
  for (std::size_t r = 0; r < headers.size(); ++r) {
    if (headers[r].shard_size > 0 && headers[r].shard_start != next)
      return failed("vocab_start: expected " + std::to_string(next) + " on rank " + std::to_string(r) +
                    " (shards in rank order), got " + std::to_string(headers[r].shard_start));
    next += headers[r].shard_size;
  }
  if (next != headers.front().fields[kVocabSize])
    return failed("vocab_size: expected the sum of all shards " + std::to_string(next) + ", got " +
                  std::to_string(headers.front().fields[kVocabSize]));
  return {};
}

Status agree(Communicator& group, const CallFacts& facts, const ResolvedProblem* problem, const Status& local,
             bool shards) {
  bool met = false;
  Status status = guarded(facts.name, [&]() -> Status {
    const Header mine = make_header(facts, problem, local, group.device());
    std::vector<Header> all(static_cast<std::size_t>(group.size()));
    met = true;
    Status sent = group.exchange(mine.data(), all.data(), sizeof mine);
    if (!sent.ok()) return local.ok() ? sent : local;
    return header_verdict(all, local, shards);
  });
  if (!met) group.abort(status);  // the others wait for this rank
  return status;
}

}  // namespace lmhead
