// Shared by the bindings_*.cc files: the only sources that know the binding library.
//
// No tensor type crosses this border. Python passes addresses, sizes, strides, dtypes, device and
// stream; the package therefore works with every PyTorch version and with none.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "lmhead/lmhead.h"

namespace lmhead::python {

namespace nb = nanobind;

/// An address as Python holds it (tensor.data_ptr(), array.ctypes.data); 0 is nullptr.
using Address = std::uintptr_t;
template <class T = void>
T* pointer(Address address) {
  return reinterpret_cast<T*>(address);
}

/// Raises the Python exception that belongs to the code of `status`; returns when it is ok.
void raise_if_error(const Status& status);

template <class T>
T value_or_raise(Result<T> result) {
  raise_if_error(result.status());
  return std::move(result).value();
}

/// Runs `fn` with the GIL released; what it returns is looked at with the GIL held again.
template <class Fn>
auto without_gil(Fn&& fn) {
  nb::gil_scoped_release released;
  return std::forward<Fn>(fn)();
}

/// Execution that owns the backend's name.
struct OwnedExecution {
  Execution options;
  std::string backend = "auto";

  Execution get() const {
    Execution e = options;
    e.backend = backend.c_str();
    return e;
  }
};

// One a file; the module calls each.
void bind_types(nb::module_& m);        // bindings_types.cc
void bind_calls(nb::module_& m);        // bindings.cc
void bind_distributed(nb::module_& m);  // bindings_distributed.cc
void bind_packing(nb::module_& m);      // bindings_packing.cc
void bind_support(nb::module_& m);      // bindings_support.cc
void bind_tuning(nb::module_& m);       // bindings_tuning.cc

}  // namespace lmhead::python
