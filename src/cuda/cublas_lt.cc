#include "cuda/cublas_lt.h"

#include <string>

#include "cuda/shared_library.h"

namespace lmhead::cuda {

Result<const CublasLt*> cublas_lt() {
  static const Result<CublasLt> loaded = []() -> Result<CublasLt> {
    SharedLibrary library("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR));
    CublasLt functions;
#define LMHEAD_RESOLVE(name) library.resolve(#name, &functions.name);
    LMHEAD_CUBLASLT_FUNCTIONS(LMHEAD_RESOLVE)
#undef LMHEAD_RESOLVE
    if (!library.ok()) return Status(StatusCode::kUnsupported, "cuBLASLt: " + library.error());
    return functions;
  }();
  if (!loaded.ok()) return loaded.status();
  return &*loaded;
}

}  // namespace lmhead::cuda
