// The heads of shapes/heads.txt, compiled in.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lmhead::tools {

struct Head {
  std::int64_t h, v;
  std::optional<double> softcap;
  double logit_scale;
};

/// --head NAME, or --hidden and --vocab. Throws CommandError for both, neither or an unknown name.
Head head_or_sizes(const std::string& name, std::int64_t hidden, std::int64_t vocab);

}  // namespace lmhead::tools
