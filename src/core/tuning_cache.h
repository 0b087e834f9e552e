// The tuning cache: choices of configurations in memory and in a file. Knows no backend and no device.
#pragma once

#include <compare>
#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "lmhead/tuning.h"

namespace lmhead {

/// What measured times depend on beside the problem. Times of another source mean nothing here.
struct TuningSource {
  std::string backend;
  std::string device;   ///< model of the GPU or CPU
  std::string driver;   ///< "none" on the CPU
  std::string library;  ///< GEMM library and its version
  std::string version;  ///< of lmhead
};

/// What a choice is for. No rank: ranks with equal shards share it.
struct TuningKey {
  Operation operation;  ///< kForward (partial ones too) or kBackward
  std::int64_t bucket, h, v;
  DType dtype;   ///< of the products
  bool entropy;  ///< forward: computed; backward: differentiated
  bool general;  ///< softcap, bias, or a scale that is not > 0

  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes the 0 inside a defaulted <=> for a pointer
  auto operator<=>(const TuningKey&) const = default;
};

using TuningTable = std::map<TuningKey, std::string>;

/// The file of a source: its name holds a hash of the source, so machines may share the folder.
/// Empty when neither XDG_CACHE_HOME nor HOME is an absolute path.
std::filesystem::path tuning_file(const TuningSource& source);

/// A file's choices. No file: an empty table. A broken or foreign one: empty too, and `warning` says why.
TuningTable read_tuning(const std::filesystem::path& file, const TuningSource& source, std::string* warning);

/// Merges `table` into the file: written beside it under another name, then renamed, so that readers see a whole
/// file at any time; writers wait for each other. A broken file is replaced.
Status write_tuning(const std::filesystem::path& file, const TuningSource& source, const TuningTable& table);

}  // namespace lmhead
