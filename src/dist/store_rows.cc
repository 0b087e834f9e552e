#include "dist/store_rows.h"

#include "core/element.h"
#if LMHEAD_HAS_CUDA
#include "cuda/convert.h"
#include "cuda/launch.h"
#endif

namespace lmhead {

Status store_rows(const ConstMatrix& from, const Matrix& to, bool accumulate, const Execution& execution) {
#if LMHEAD_HAS_CUDA
  if (execution.device == Device::kCuda) {
    cuda::store_rows(static_cast<const float*>(from.data), to.rows, to, nullptr, {}, cuda::stream_of(execution),
                     accumulate);
    return cuda::last_launch("hidden gradient");
  }
#endif
  (void)execution;
  for (std::int64_t i = 0; i < to.rows; ++i) {
    for (std::int64_t k = 0; k < to.cols; ++k)
      store_float(to, i, k, load_float(from, i, k) + (accumulate ? load_float(to, i, k) : 0.0));
  }
  return {};
}

}  // namespace lmhead
