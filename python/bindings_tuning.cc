// tune() of include/lmhead/tuning.h.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "lmhead/tuning.h"

namespace lmhead::python {
namespace {

nb::list tune_head(std::int64_t tokens, std::int64_t hidden, std::int64_t vocab, DType dtype, EntropyMode entropy,
                   std::optional<double> softcap, double logit_scale, const std::string& backend, Device device,
                   bool inference_only, double seconds, bool save) {
  TuneRequest q;
  q.tokens = tokens, q.hidden = hidden, q.vocab = vocab, q.dtype = dtype, q.entropy = entropy;
  q.softcap = softcap, q.logit_scale = logit_scale;
  q.backend = backend.c_str(), q.device = device, q.inference_only = inference_only, q.seconds = seconds, q.save = save;
  nb::list list;
  for (const TuneResult& r : value_or_raise(without_gil([&] { return tune(q); }))) {
    nb::dict entry;
    entry["backend"] = r.backend;
    entry["operation"] = r.operation == Operation::kBackward ? "backward" : "forward";
    entry["bucket"] = r.bucket;
    entry["configuration"] = r.configuration;
    nb::list times;
    for (const TunedTime& t : r.times) times.append(nb::make_tuple(t.configuration, t.ms, t.of_default));
    entry["times"] = times;
    entry["turns"] = r.turns;
    entry["file"] = r.file;
    entry["warning"] = r.warning;
    list.append(entry);
  }
  return list;
}

}  // namespace

void bind_tuning(nb::module_& m) {
  m.def("tune", &tune_head, nb::arg("tokens"), nb::arg("hidden"), nb::arg("vocab"), nb::arg("dtype"),
        nb::arg("entropy"), nb::arg("softcap").none(), nb::arg("logit_scale"), nb::arg("backend"), nb::arg("device"),
        nb::arg("inference_only"), nb::arg("seconds"), nb::arg("save"));
}

}  // namespace lmhead::python
