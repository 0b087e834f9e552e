// Views and options of include/lmhead/types.h as Python classes of the same names.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

namespace lmhead::python {
namespace {

template <class T>
void bind_vector(nb::module_& m, const char* name) {
  nb::class_<T>(m, name)
      .def(nb::init<>())
      .def(
          "__init__",
          [](T* self, Address data, std::int64_t size, std::int64_t stride, DType dtype) {
            new (self) T{pointer(data), size, stride, dtype};
          },
          nb::arg("data"), nb::arg("size"), nb::arg("stride"), nb::arg("dtype"))
      .def_ro("size", &T::size)
      .def_ro("dtype", &T::dtype);
}

template <class T>
void bind_matrix(nb::module_& m, const char* name) {
  nb::class_<T>(m, name)
      .def(nb::init<>())
      .def(
          "__init__",
          [](T* self, Address data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride, DType dtype) {
            new (self) T{pointer(data), rows, cols, row_stride, dtype};
          },
          nb::arg("data"), nb::arg("rows"), nb::arg("cols"), nb::arg("row_stride"), nb::arg("dtype"))
      .def_ro("rows", &T::rows)
      .def_ro("cols", &T::cols)
      .def_ro("dtype", &T::dtype);
}

template <class T>
auto member(T Execution::*field) {
  return [field](OwnedExecution& self, T value) { self.options.*field = value; };
}

}  // namespace

void bind_types(nb::module_& m) {
  nb::enum_<DType>(m, "DType")
      .value("float32", DType::kFloat32)
      .value("bfloat16", DType::kBFloat16)
      .value("float16", DType::kFloat16)
      .value("float64", DType::kFloat64)
      .value("int32", DType::kInt32)
      .value("int64", DType::kInt64)
      .value("int16", DType::kInt16)
      .value("int8", DType::kInt8)
      .value("uint8", DType::kUInt8)
      .value("bool", DType::kBool);
  nb::enum_<Device>(m, "Device").value("cpu", Device::kCpu).value("cuda", Device::kCuda);
  nb::enum_<EntropyMode>(m, "EntropyMode")
      .value("off", EntropyMode::kOff)
      .value("metric", EntropyMode::kMetric)
      .value("grad", EntropyMode::kGrad);
  nb::enum_<OutOfVocab>(m, "OutOfVocab").value("error", OutOfVocab::kError).value("zero", OutOfVocab::kZero);
  nb::enum_<Operation>(m, "Operation")
      .value("forward", Operation::kForward)
      .value("forward_partial", Operation::kForwardPartial)
      .value("backward", Operation::kBackward);

  bind_vector<ConstVector>(m, "ConstVector");
  bind_vector<Vector>(m, "Vector");
  bind_matrix<ConstMatrix>(m, "ConstMatrix");
  bind_matrix<Matrix>(m, "Matrix");

  nb::class_<Problem>(m, "Problem")
      .def(nb::init<>())
      .def_rw("hidden", &Problem::hidden)
      .def_rw("weight", &Problem::weight)
      .def_rw("bias", &Problem::bias)
      .def_rw("targets", &Problem::targets)
      .def_rw("active", &Problem::active)
      .def_rw("row_temperature", &Problem::row_temperature)
      .def_rw("vocab_start", &Problem::vocab_start)
      .def_rw("vocab_size", &Problem::vocab_size, nb::arg().none())
      .def_rw("valid_vocab", &Problem::valid_vocab, nb::arg().none())
      .def_rw("temperature", &Problem::temperature)
      .def_rw("logit_scale", &Problem::logit_scale)
      .def_rw("softcap", &Problem::softcap, nb::arg().none())
      .def_rw("ignore_index", &Problem::ignore_index)
      .def_rw("out_of_vocab", &Problem::out_of_vocab)
      .def_rw("entropy", &Problem::entropy)
      .def_rw("inference_only", &Problem::inference_only)
      .def_rw("compute_dtype", &Problem::compute_dtype, nb::arg().none());

  nb::class_<OwnedExecution>(m, "Execution")
      .def(nb::init<>())
      .def_rw("backend", &OwnedExecution::backend)
      .def("set_device", member(&Execution::device))
      .def("set_workspace_budget", member(&Execution::workspace_budget))
      .def("set_check", member(&Execution::check), nb::arg("check").none())
      .def("set_allow_tf32", member(&Execution::allow_tf32))
      .def("set_stream", [](OwnedExecution& self, Address stream) { self.options.stream = pointer(stream); })
      .def("set_cache",
           [](OwnedExecution& self, Address data, std::size_t bytes) {
             self.options.cache = pointer(data);
             self.options.cache_bytes = bytes;
           })
      .def("set_workspace", [](OwnedExecution& self, Address data, std::size_t bytes) {
        self.options.workspace = pointer(data);
        self.options.workspace_bytes = bytes;
      });

  nb::class_<ForwardOutputs>(m, "ForwardOutputs")
      .def(nb::init<>())
      .def_rw("logprob", &ForwardOutputs::logprob)
      .def_rw("entropy", &ForwardOutputs::entropy)
      .def_rw("lse", &ForwardOutputs::lse);
  nb::class_<BackwardInputs>(m, "BackwardInputs")
      .def(nb::init<>())
      .def_rw("lse", &BackwardInputs::lse)
      .def_rw("entropy", &BackwardInputs::entropy)
      .def_rw("dlogprob", &BackwardInputs::dlogprob)
      .def_rw("dentropy", &BackwardInputs::dentropy)
      .def("set_selected",
           [](BackwardInputs& self, const ConstMatrix& ids, const ConstMatrix& logits, const ConstMatrix& upstream) {
             self.selected = {ids, logits, upstream};
           });
  nb::class_<BackwardOutputs>(m, "BackwardOutputs")
      .def(nb::init<>())
      .def_rw("hidden", &BackwardOutputs::hidden)
      .def_rw("weight", &BackwardOutputs::weight)
      .def_rw("bias", &BackwardOutputs::bias)
      .def_rw("accumulate_hidden", &BackwardOutputs::accumulate_hidden)
      .def_rw("accumulate_weight", &BackwardOutputs::accumulate_weight);
}

}  // namespace lmhead::python
