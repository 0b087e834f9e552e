// Candidate sets and selected ids (include/lmhead/support.h, selected.h) for Python.
#include "bindings.h"

#include "lmhead/selected.h"
#include "lmhead/support.h"

namespace lmhead::python {

void bind_support(nb::module_& m) {
  nb::class_<SupportProblem>(m, "SupportProblem")
      .def(nb::init<>())
      .def_rw("head", &SupportProblem::head)
      .def_rw("support_ids", &SupportProblem::support_ids);
  nb::class_<SupportOutputs>(m, "SupportOutputs")
      .def(nb::init<>())
      .def_rw("logprob", &SupportOutputs::logprob)
      .def_rw("entropy", &SupportOutputs::entropy)
      .def_rw("lse", &SupportOutputs::lse)
      .def_rw("valid", &SupportOutputs::valid);
  nb::class_<SelectedProblem>(m, "SelectedProblem")
      .def(nb::init<>())
      .def_rw("head", &SelectedProblem::head)
      .def_rw("ids", &SelectedProblem::ids);

  m.def("support_workspace_size", [](const SupportProblem& problem, Operation operation,
                                     const BackwardOutputs& gradients, const OwnedExecution& execution) {
    return value_or_raise(support_workspace_size(problem, operation, gradients, execution.get())).bytes;
  });
  m.def("support_forward_partial",
        [](const SupportProblem& problem, const Matrix& state, const OwnedExecution& execution) {
          raise_if_error(without_gil([&] { return support_forward_partial(problem, state, execution.get()); }));
        });
  m.def("support_combine", [](const SupportProblem& problem, const ConstMatrix& states, const SupportOutputs& outputs,
                              const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return support_combine(problem, states, outputs, execution.get()); }));
  });
  m.def("support_forward",
        [](const SupportProblem& problem, const SupportOutputs& outputs, const OwnedExecution& execution) {
          raise_if_error(without_gil([&] { return support_forward(problem, outputs, execution.get()); }));
        });
  m.def("support_backward", [](const SupportProblem& problem, const BackwardInputs& inputs,
                               const BackwardOutputs& outputs, const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return support_backward(problem, inputs, outputs, execution.get()); }));
  });
  m.def("selected_workspace_size", [](const SelectedProblem& problem, const OwnedExecution& execution) {
    return value_or_raise(selected_workspace_size(problem, execution.get())).bytes;
  });
  m.def("selected_logits", [](const SelectedProblem& problem, const Matrix& logits, const OwnedExecution& execution) {
    raise_if_error(without_gil([&] { return selected_logits(problem, logits, execution.get()); }));
  });
  m.def("selected_combine", [](const SelectedProblem& problem, const ConstMatrix& logits, const ConstVector& lse,
                               const ConstVector& logprob, const Matrix& selected, const OwnedExecution& execution) {
    raise_if_error(
        without_gil([&] { return selected_combine(problem, logits, lse, logprob, selected, execution.get()); }));
  });
}

}  // namespace lmhead::python
