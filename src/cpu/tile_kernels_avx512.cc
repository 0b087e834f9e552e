#include "cpu/gemm_own_impl.h"
#include "cpu/tile_kernels_impl.h"

namespace lmhead {
extern const TileKernels kTileKernelsAvx512;
const TileKernels kTileKernelsAvx512 = make_tile_kernels("AVX-512", [] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
});
}  // namespace lmhead
