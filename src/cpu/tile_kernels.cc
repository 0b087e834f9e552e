#include "cpu/tile_kernels.h"

namespace lmhead {

#if LMHEAD_X86
extern const TileKernels kTileKernelsAvx512;  // tile_kernels_avx512.cc
extern const TileKernels kTileKernelsAvx2;    // tile_kernels_avx2.cc
#endif
extern const TileKernels kTileKernelsBaseline;  // tile_kernels_baseline.cc

std::span<const TileKernels* const> all_tile_kernels() {
  static const TileKernels* const kList[] = {
#if LMHEAD_X86
    &kTileKernelsAvx512,
    &kTileKernelsAvx2,
#endif
    &kTileKernelsBaseline,
  };
  return kList;
}

const TileKernels& tile_kernels() {
  static const TileKernels& chosen = []() -> const TileKernels& {
    for (const TileKernels* kernels : all_tile_kernels()) {
      if (kernels->runs_here()) return *kernels;
    }
    return kTileKernelsBaseline;
  }();
  return chosen;
}

}  // namespace lmhead
