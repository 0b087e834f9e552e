#include <cpuid.h>

#include "cpu/gemm_own_impl.h"
#include "cpu/tile_kernels_impl.h"

namespace lmhead {
extern const TileKernels kTileKernelsAvx2;
const TileKernels kTileKernelsAvx2 = make_tile_kernels("AVX2", [] {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;  // clang's __builtin_cpu_supports does not know F16C
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
});
}  // namespace lmhead
