#include "cpu/gemm_own_impl.h"
#include "cpu/tile_kernels_impl.h"

namespace lmhead {
extern const TileKernels kTileKernelsBaseline;
const TileKernels kTileKernelsBaseline = make_tile_kernels("baseline", [] { return true; });
}  // namespace lmhead
