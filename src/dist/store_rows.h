// Rows in result precision brought to an output's dtype and strides, where they live.
#pragma once

#include "lmhead/lmhead.h"

namespace lmhead {

/// to = from, rounded to to's dtype, or to += from. Shapes are equal; from is fp32 (fp64 for fp64 outputs).
/// Accumulation is into from's type alone. Runs on execution.device, on execution.stream.
Status store_rows(const ConstMatrix& from, const Matrix& to, bool accumulate, const Execution& execution);

}  // namespace lmhead
