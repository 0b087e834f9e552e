#include "cuda/shared_library.h"

#include <dlfcn.h>

namespace lmhead::cuda {

SharedLibrary::SharedLibrary(const std::string& name) : handle_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ != nullptr) return;
  const std::string reason = dlerror();
  handle_ = dlopen((LMHEAD_CUDA_LIBRARY_DIR "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle_ == nullptr) error_ = reason;
}

void* SharedLibrary::find(const char* symbol) {
  if (handle_ == nullptr) return nullptr;
  void* const address = dlsym(handle_, symbol);
  if (address == nullptr && error_.empty()) error_ = dlerror();
  return address;
}

}  // namespace lmhead::cuda
