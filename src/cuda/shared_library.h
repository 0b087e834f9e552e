// A CUDA library opened while the program runs, not linked: a process that never needs it never maps it.
#pragma once

#include <string>

namespace lmhead::cuda {

/// Never closed: the library's own state lives as long as the process.
class SharedLibrary {
 public:
  /// `name` as the loader knows it, such as libcublas.so.13: a copy that the process has already, LD_LIBRARY_PATH,
  /// the system's directories; then the toolkit's folder at build time.
  explicit SharedLibrary(const std::string& name);

  /// Sets *function to the address of `symbol`; without one it stays, and error() says so.
  template <class Function>
  void resolve(const char* symbol, Function** function) {
    if (void* address = find(symbol)) *function = reinterpret_cast<Function*>(address);
  }

  bool ok() const { return error_.empty(); }
  /// The loader's words on the first thing that failed, or "".
  const std::string& error() const { return error_; }

 private:
  void* find(const char* symbol);
  void* handle_;
  std::string error_;
};

}  // namespace lmhead::cuda
