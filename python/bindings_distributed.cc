// What lmhead.distributed needs from the library: the header of a checked call, and shards.
#include "bindings.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "dist/header.h"
#include "lmhead/parallel.h"

namespace lmhead::python {
namespace {

nb::bytes to_bytes(const Header& header) { return nb::bytes(header.data(), header.size()); }

/// One rank's header and, beside it, what its own checks found.
struct CallHeader {
  Status local;
  Header header;

  CallHeader(const Problem& problem, const OwnedExecution& execution, const std::string& name, std::int64_t extra) {
    const Execution e = execution.get();
    const Result<Call> call = guarded("header", [&] { return plan_call(problem, e, Operation::kForwardPartial); });
    local = guarded("header", [&] { return call.ok() ? call->check_values(e) : call.status(); });
    header = make_header({name.c_str(), extra}, call.ok() ? &call->problem : nullptr, local, e.device);
  }
  /// Of a call that failed before there was a problem to describe.
  explicit CallHeader(const std::string& error)
      : local(StatusCode::kInvalidArgument, error), header(make_header({"", 0}, nullptr, local, Device::kCpu)) {}
};

void check_headers(const CallHeader& mine, Address all, std::size_t ranks, bool shards) {
  std::vector<Header> headers(ranks);
  std::memcpy(headers.data(), pointer<const std::byte>(all), ranks * sizeof(Header));
  raise_if_error(header_verdict(headers, mine.local, shards));
}

}  // namespace

void bind_distributed(nb::module_& m) {
  nb::class_<CallHeader>(m, "CallHeader")
      .def(nb::init<const Problem&, const OwnedExecution&, const std::string&, std::int64_t>())
      .def(nb::init<const std::string&>())
      .def_prop_ro("bytes", [](const CallHeader& h) { return to_bytes(h.header); })
      .def("check", &check_headers, nb::arg("all"), nb::arg("ranks"), nb::arg("shards"));
  m.def("vocab_shard", [](std::int64_t vocab_size, int rank, int ranks) {
    const VocabShard shard = vocab_shard(vocab_size, rank, ranks);
    return std::pair(shard.start, shard.size);
  });
}

}  // namespace lmhead::python
