#include "cpu/gemm_own_impl.h"
#include "cpu/tile_kernels_impl.h"

namespace lmhead {
extern const TileKernels kTileKernelsAvx2;
const TileKernels kTileKernelsAvx2 = make_tile_kernels("AVX2", [] {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
});
}  // namespace lmhead
