// include/lmhead/{layout,packing}.h for Python: int64 arrays in, int64 arrays and lists out.
#include "bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <span>
#include <vector>

#include "lmhead/layout.h"
#include "lmhead/packing.h"

namespace lmhead::python {
namespace {

using Lengths = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

template <class T>
std::span<const T> view(const nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>& array) {
  return {array.data(), array.size()};
}

// The array takes over the vector's memory.
Rows to_array(std::vector<std::int64_t> rows) {
  auto owned = std::make_unique<std::vector<std::int64_t>>(std::move(rows));
  std::int64_t* data = owned->data();
  const std::size_t size = owned->size();
  nb::capsule owner(owned.release(), [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
  return Rows(data, {size}, owner);
}

// A list a bin. Python's collector counts new lists and would walk all those made so far again and again.
nb::object to_lists(const Bins& bins) {
  struct CollectorPaused {
    const int was_on = PyGC_Disable();
    ~CollectorPaused() {
      if (was_on) PyGC_Enable();
    }
  } const paused;
  const auto checked = [](PyObject* object) {
    if (object == nullptr) throw nb::python_error();
    return object;
  };
  const auto outer = nb::steal<nb::object>(checked(PyList_New(std::ssize(bins))));
  for (Py_ssize_t b = 0; b < std::ssize(bins); ++b) {
    const std::vector<std::int64_t>& bin = bins[static_cast<std::size_t>(b)];
    PyObject* inner = checked(PyList_New(std::ssize(bin)));
    PyList_SetItem(outer.ptr(), b, inner);  // takes the reference
    for (Py_ssize_t i = 0; i < std::ssize(bin); ++i)
      PyList_SetItem(inner, i, checked(PyLong_FromLongLong(bin[static_cast<std::size_t>(i)])));
  }
  return outer;
}

nb::list to_pairs(const std::vector<Span>& spans) {
  nb::list list;
  for (const Span& span : spans) list.append(nb::make_tuple(span.begin, span.end));
  return list;
}

LayoutOptions layout_options(std::int64_t tp, std::int64_t cp, const std::string& precision) {
  return {tp, cp, value_or_raise(precision_from_name(precision))};
}

std::vector<PackedLayout::BatchPosition> positions(const Lengths& rows, const Lengths& columns) {
  if (rows.size() != columns.size())
    raise_if_error({StatusCode::kInvalidArgument, "positions: expected as many columns as rows, got " +
                                                      std::to_string(columns.size()) + " and " +
                                                      std::to_string(rows.size())});
  std::vector<PackedLayout::BatchPosition> list;
  for (std::size_t i = 0; i < rows.size(); ++i) list.push_back({rows.data()[i], columns.data()[i]});
  return list;
}

}  // namespace

void bind_packing(nb::module_& m) {
  nb::class_<PackingOptions>(m, "PackingOptions")
      .def(
          "__init__",
          [](PackingOptions* self, const std::string& algorithm, std::int64_t min_bins, std::int64_t bin_multiple,
             std::int64_t sequence_multiple, std::int64_t total_multiple, bool allow_empty, bool allow_oversize) {
            new (self) PackingOptions{value_or_raise(packing_algorithm_from_name(algorithm)),
                                      min_bins,
                                      bin_multiple,
                                      sequence_multiple,
                                      total_multiple,
                                      allow_empty,
                                      allow_oversize};
          },
          nb::arg("algorithm"), nb::arg("min_bins"), nb::arg("bin_multiple"), nb::arg("sequence_multiple"),
          nb::arg("total_multiple"), nb::arg("allow_empty"), nb::arg("allow_oversize"));
  m.def("pack", [](const Lengths& lengths, std::int64_t capacity, const PackingOptions& options) {
    return to_lists(value_or_raise(without_gil([&] { return pack(view(lengths), capacity, options); })));
  });
  m.def("count_bins", [](const Lengths& lengths, std::int64_t capacity, const PackingOptions& options) {
    return value_or_raise(without_gil([&] { return pack(view(lengths), capacity, options); })).size();
  });
  m.def("packing_lower_bound", [](const Lengths& lengths, std::int64_t capacity, const PackingOptions& options) {
    return value_or_raise(without_gil([&] { return packing_lower_bound(view(lengths), capacity, options); }));
  });
  m.def("packing_metrics",
        [](const Lengths& lengths, std::int64_t capacity, const Bins& bins, const PackingOptions& options) {
          const PackingMetrics metrics = value_or_raise(packing_metrics(view(lengths), capacity, bins, options));
          nb::dict d;
          d["sequences"] = metrics.sequences;
          d["bins"] = metrics.bins;
          d["empty_bins"] = metrics.empty_bins;
          d["lower_bound"] = metrics.lower_bound;
          d["tokens"] = metrics.tokens;
          d["footprint"] = metrics.footprint;
          d["utilization"] = metrics.utilization;
          d["waste"] = metrics.waste;
          d["balance"] = metrics.balance;
          return d;
        });

  const auto alignment = [&m](const char* name, Result<std::int64_t> (*function)(const LayoutOptions&)) {
    m.def(
        name,
        [function](std::int64_t tp, std::int64_t cp, const std::string& precision) {
          return value_or_raise(function(layout_options(tp, cp, precision)));
        },
        nb::arg("tp") = 1, nb::arg("cp") = 1, nb::arg("precision") = "none");
  };
  alignment("sequence_alignment", &sequence_alignment);
  alignment("total_alignment", &total_alignment);
  alignment("unpacked_alignment", &unpacked_alignment);

  nb::class_<PackedLayout>(m, "PackedLayout")
      .def_static("make",
                  [](const Lengths& lengths, std::int64_t tp, std::int64_t cp, const std::string& precision) {
                    return value_or_raise(PackedLayout::make(view(lengths), layout_options(tp, cp, precision)));
                  })
      .def_static(
          "from_cu_seqlens",
          [](const Lengths& offsets, std::int64_t tp, std::int64_t cp, const std::string& precision) {
            return value_or_raise(PackedLayout::from_cu_seqlens(view(offsets), layout_options(tp, cp, precision)));
          })
      .def("tp", [](const PackedLayout& l) { return l.options().tp; })
      .def("cp", [](const PackedLayout& l) { return l.options().cp; })
      .def("precision", [](const PackedLayout& l) { return to_string(l.options().precision); })
      .def("lengths", &PackedLayout::lengths)
      .def("padded_lengths", &PackedLayout::padded_lengths)
      .def("cu_seqlens", &PackedLayout::cu_seqlens)
      .def("cu_seqlens_padded", &PackedLayout::cu_seqlens_padded)
      .def("num_tokens", &PackedLayout::num_tokens)
      .def("total", &PackedLayout::total)
      .def("local_total", &PackedLayout::local_total)
      .def("source_rows", [](const PackedLayout& l) { return to_array(l.source_rows()); })
      .def("global_rows", [](const PackedLayout& l) { return to_array(l.global_rows()); })
      .def("target_rows", [](const PackedLayout& l) { return to_array(l.target_rows()); })
      .def("gathered_rows", [](const PackedLayout& l) { return to_array(l.gathered_rows()); })
      .def("local_rows",
           [](const PackedLayout& l, std::int64_t cp_rank) { return to_array(value_or_raise(l.local_rows(cp_rank))); })
      .def("batch_rows",
           [](const PackedLayout& l, const Lengths& at_row, const Lengths& at_column, std::int64_t rows,
              std::int64_t width) {
             return to_array(value_or_raise(l.batch_rows(positions(at_row, at_column), rows, width)));
           })
      .def("prediction_rows",
           [](const PackedLayout& l, const Lengths& at_row, const Lengths& at_column, std::int64_t rows,
              std::int64_t width) {
             return to_array(value_or_raise(l.prediction_rows(positions(at_row, at_column), rows, width)));
           })
      .def("active_spans", [](const PackedLayout& l, const Mask& active, std::int64_t cp_rank, std::int64_t max_gap) {
        return to_pairs(value_or_raise(active_spans(l, view(active), cp_rank, max_gap)));
      });
  m.def("active_spans", [](const Mask& active, std::int64_t max_gap) {
    return to_pairs(value_or_raise(active_spans(view(active), max_gap)));
  });
  m.def(
      "check_active_spans",
      [](const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, std::int64_t rows,
         const std::optional<Mask>& active) {
        std::vector<Span> spans;
        for (const auto& [begin, end] : pairs) spans.push_back({begin, end});
        std::optional<std::span<const std::uint8_t>> mask;
        if (active) mask = view(*active);
        raise_if_error(check_active_spans(spans, rows, mask));
      },
      nb::arg("spans"), nb::arg("rows"), nb::arg("active").none());
  m.attr("ACTIVE_SPAN_GAP") = kActiveSpanGap;
}

}  // namespace lmhead::python
