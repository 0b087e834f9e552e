#pragma once

#include "lmhead/status.h"

/// Returns from the enclosing function with the Status of `expr` unless it is ok.
#define LMHEAD_RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                         \
    if (::lmhead::Status lmhead_status_ = (expr); !lmhead_status_.ok()) return lmhead_status_; \
  } while (0)
