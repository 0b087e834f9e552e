// The extension module lmhead._core: include/lmhead/lmhead.h for Python, call by call.
#include "bindings.h"

#include <nanobind/stl/string.h>

#include <new>

#include "cpu/gemm.h"

namespace lmhead::python {

void raise_if_error(const Status& status) {
  PyObject* type = nullptr;
  switch (status.code()) {
    case StatusCode::kOk: return;
    case StatusCode::kInvalidArgument: type = PyExc_ValueError; break;
    case StatusCode::kTypeMismatch: type = PyExc_TypeError; break;
    case StatusCode::kUnsupported: type = PyExc_NotImplementedError; break;
    case StatusCode::kOutOfMemory: type = PyExc_MemoryError; break;
    case StatusCode::kCommunication:
    case StatusCode::kInternal: type = PyExc_RuntimeError; break;
  }
  PyErr_SetString(type, status.message().c_str());
  throw nb::python_error();
}

void bind_calls(nb::module_& m) {
  m.def("workspace_size", [](const Problem& problem, Operation operation, const BackwardOutputs& gradients,
                             const OwnedExecution& execution) {
    return value_or_raise(workspace_size(problem, operation, gradients, execution.get())).bytes;
  });
  m.def("cache_size", [](const Problem& problem, std::size_t budget, const OwnedExecution& execution) {
    return value_or_raise(cache_size(problem, budget, execution.get()));
  });
  m.def("forward", [](const Problem& problem, const ForwardOutputs& outputs, const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return forward(problem, outputs, execution.get()); }));
  });
  m.def("forward_partial", [](const Problem& problem, const Matrix& state, const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return forward_partial(problem, state, execution.get()); }));
  });
  m.def("combine", [](const Problem& problem, const ConstMatrix& states, const ForwardOutputs& outputs,
                      const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return combine(problem, states, outputs, execution.get()); }));
  });
  m.def("backward", [](const Problem& problem, const BackwardInputs& inputs, const BackwardOutputs& outputs,
                       const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return backward(problem, inputs, outputs, execution.get()); }));
  });
  m.def("backends", [] {
    nb::list list;
    for (const BackendInfo& b : backends()) {
      nb::dict entry;
      entry["name"] = b.name;
      entry["device"] = b.device == Device::kCpu ? "cpu" : "cuda";
      entry["available"] = b.available;
      entry["description"] = b.description;
      list.append(entry);
    }
    return list;
  });
  m.def("last_backend", &last_backend);
  // Multiply-adds of the CPU backend's products in this process so far: what a mask saves, for tests.
  m.def("multiply_adds", [] { return multiply_adds().load(); });
  m.def("version", &version);
}

}  // namespace lmhead::python

NB_MODULE(_core, m) {
  m.doc() = "lmhead's C++ library: addresses, sizes and strides in, status out. Use the package, not this module.";
  lmhead::python::bind_types(m);
  lmhead::python::bind_calls(m);
  lmhead::python::bind_distributed(m);
  lmhead::python::bind_packing(m);
  lmhead::python::bind_support(m);
  lmhead::python::bind_tuning(m);
}
