// Checks and counters common to every transport, and the host reductions.
#include "lmhead/communicator.h"

#include <cstring>
#include <string>

#include "core/dispatch.h"
#include "core/element.h"
#include "core/return_if_error.h"
#include "dist/host_communicator.h"

namespace lmhead {
namespace {

Status check_pointer(const char* name, const void* data, bool needed) {
  if (data != nullptr || !needed) return {};
  return {StatusCode::kInvalidArgument, std::string(name) + ": expected data, got a null pointer"};
}

Status check_sum(std::int64_t count, DType dtype) {
  if (count < 0) return {StatusCode::kInvalidArgument, "count: expected >= 0, got " + std::to_string(count)};
  if (!is_floating(dtype))
    return {StatusCode::kTypeMismatch, std::string("dtype: expected a floating type, got ") + to_string(dtype)};
  return {};
}

/// Runs a collective. A rank without memory for its buffers tells the others, which wait for it.
template <class Fn>
Status run(Communicator& group, const char* call, const Fn& fn) {
  Status status = guarded(call, fn);
  if (status.code() == StatusCode::kOutOfMemory) group.abort(status);
  return status;
}

/// out[i] = sum over ranks of parts[r * count + i], in rank order.
template <class Sum>
void sum_parts(const void* parts, int ranks, std::int64_t count, DType dtype, void* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    Sum sum = 0;
    for (int r = 0; r < ranks; ++r) sum += static_cast<Sum>(load_float(parts, dtype, r * count + i));
    store_float(out, dtype, i, static_cast<double>(sum));
  }
}

void sum_in_rank_order(const void* parts, int ranks, std::int64_t count, DType dtype, void* out) {
  dtype == DType::kFloat64 ? sum_parts<double>(parts, ranks, count, dtype, out)
                           : sum_parts<float>(parts, ranks, count, dtype, out);
}

}  // namespace

Status Communicator::all_gather(const void* send, void* receive, std::size_t bytes, void* stream) {
  LMHEAD_RETURN_IF_ERROR(check_pointer("send", send, bytes > 0));
  LMHEAD_RETURN_IF_ERROR(check_pointer("receive", receive, bytes > 0));
  LMHEAD_RETURN_IF_ERROR(run(*this, "all_gather", [&] { return do_all_gather(send, receive, bytes, stream); }));
  ++traffic_.all_gathers;
  traffic_.bytes_sent += static_cast<std::int64_t>(bytes) * (size_ - 1);
  return {};
}

Status Communicator::all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream) {
  LMHEAD_RETURN_IF_ERROR(check_sum(count, dtype));
  LMHEAD_RETURN_IF_ERROR(check_pointer("data", data, count > 0));
  LMHEAD_RETURN_IF_ERROR(run(*this, "all_reduce_sum", [&] { return do_all_reduce_sum(data, count, dtype, stream); }));
  ++traffic_.all_reduces;
  const std::int64_t part = (count + size_ - 1) / size_ * static_cast<std::int64_t>(size_of(dtype));
  traffic_.bytes_sent += 2 * part * (size_ - 1);
  return {};
}

Status Communicator::reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype,
                                        void* stream) {
  LMHEAD_RETURN_IF_ERROR(check_sum(count, dtype));
  LMHEAD_RETURN_IF_ERROR(check_pointer("send", send, count > 0));
  LMHEAD_RETURN_IF_ERROR(check_pointer("receive", receive, count > 0));
  LMHEAD_RETURN_IF_ERROR(
      run(*this, "reduce_scatter_sum", [&] { return do_reduce_scatter_sum(send, receive, count, dtype, stream); }));
  ++traffic_.reduce_scatters;
  traffic_.bytes_sent += count * static_cast<std::int64_t>(size_of(dtype)) * (size_ - 1);
  return {};
}

Status Communicator::exchange(const void* send, void* receive, std::size_t bytes) {
  LMHEAD_RETURN_IF_ERROR(check_pointer("send", send, bytes > 0));
  LMHEAD_RETURN_IF_ERROR(check_pointer("receive", receive, bytes > 0));
  LMHEAD_RETURN_IF_ERROR(run(*this, "exchange", [&] { return do_exchange(send, receive, bytes); }));
  ++traffic_.exchanges;
  traffic_.bytes_sent += static_cast<std::int64_t>(bytes) * (size_ - 1);
  return {};
}

Status HostCommunicator::do_all_gather(const void* send, void* receive, std::size_t bytes, void*) {
  return gather(send, receive, bytes, "all_gather");
}

Status HostCommunicator::do_exchange(const void* send, void* receive, std::size_t bytes) {
  return gather(send, receive, bytes, "exchange");
}

Status HostCommunicator::do_reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype,
                                               void*) {
  const std::size_t part = static_cast<std::size_t>(count) * size_of(dtype);
  std::vector<std::byte> parts(part * static_cast<std::size_t>(size()));
  LMHEAD_RETURN_IF_ERROR(all_to_all(send, parts.data(), part, "reduce_scatter_sum"));
  sum_in_rank_order(parts.data(), size(), count, dtype, receive);
  return {};
}

Status HostCommunicator::do_all_reduce_sum(void* data, std::int64_t count, DType dtype, void*) {
  const std::int64_t share = (count + size() - 1) / size();  // elements that each rank sums, the last ones padded
  const std::size_t part = static_cast<std::size_t>(share) * size_of(dtype);
  const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
  std::vector<std::byte> mine(part * static_cast<std::size_t>(size())), all(mine.size());
  if (bytes > 0) std::memcpy(mine.data(), data, bytes);
  LMHEAD_RETURN_IF_ERROR(all_to_all(mine.data(), all.data(), part, "all_reduce_sum"));
  std::byte* own = mine.data() + part * static_cast<std::size_t>(rank());
  sum_in_rank_order(all.data(), size(), share, dtype, own);
  LMHEAD_RETURN_IF_ERROR(gather(own, mine.data(), part, "all_reduce_sum"));
  if (bytes > 0) std::memcpy(data, mine.data(), bytes);
  return {};
}

}  // namespace lmhead
