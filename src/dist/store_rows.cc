#include "dist/store_rows.h"

#include "core/element.h"

namespace lmhead {

Status store_rows(const ConstMatrix& from, const Matrix& to, bool accumulate, const Execution&) {
  for (std::int64_t i = 0; i < to.rows; ++i) {
    for (std::int64_t k = 0; k < to.cols; ++k)
      store_float(to, i, k, load_float(from, i, k) + (accumulate ? load_float(to, i, k) : 0.0));
  }
  return {};
}

}  // namespace lmhead
