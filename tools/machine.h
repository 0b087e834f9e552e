// What this machine is, for `info` and the records of `bench`.
#pragma once

#include <string>

namespace lmhead::tools {

/// "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", or "unknown CPU".
std::string cpu_model();
/// Processors that this process may run on.
int usable_cpus();
/// The widest matrix or vector extension: "AMX-BF16", "AVX512-BF16", "AVX512", "AVX2" or "baseline".
std::string cpu_extension();

}  // namespace lmhead::tools
