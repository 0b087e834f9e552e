// cuBLASLt, loaded when the first product needs it: half a gigabyte of library, 150 MiB of which become resident
// when it is linked, is not the price of a run on the CPU or on sm90's own kernels.
#pragma once

#include <cublasLt.h>

#include "lmhead/status.h"

namespace lmhead::cuda {

/// The functions in use, under their own names.
struct CublasLt {
#define LMHEAD_CUBLASLT_FUNCTIONS(each)                                                                           \
  each(cublasLtCreate) each(cublasLtGetStatusString) each(cublasLtGetVersion) each(cublasLtMatmul)                \
      each(cublasLtMatmulAlgoCheck) each(cublasLtMatmulAlgoConfigGetAttribute)                                    \
          each(cublasLtMatmulAlgoConfigSetAttribute) each(cublasLtMatmulAlgoGetHeuristic)                         \
              each(cublasLtMatmulDescCreate) each(cublasLtMatmulDescDestroy) each(cublasLtMatmulDescSetAttribute) \
                  each(cublasLtMatmulPreferenceCreate) each(cublasLtMatmulPreferenceDestroy)                      \
                      each(cublasLtMatmulPreferenceSetAttribute) each(cublasLtMatrixLayoutCreate)                 \
                          each(cublasLtMatrixLayoutDestroy)
#define LMHEAD_DECLARE(name) decltype(&::name) name = nullptr;
  LMHEAD_CUBLASLT_FUNCTIONS(LMHEAD_DECLARE)
#undef LMHEAD_DECLARE
};

/// The library of the major version that this was built with, by the loader's rules (a copy that the process has
/// already, LD_LIBRARY_PATH, the system's directories), else where it was at build time. Loaded once, by the first
/// call. kUnsupported with the loader's reason when there is none.
Result<const CublasLt*> cublas_lt();

}  // namespace lmhead::cuda
