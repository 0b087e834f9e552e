// Candidate sets on the GPU: workspace and the order of the kernels.
#include "core/support.h"

#include <string>

#include "core/element.h"
#include "core/return_if_error.h"
#include "core/validate.h"
#include "cuda/launch.h"
#include "cuda/support.h"

namespace lmhead {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): this file is the seam between the two

bool aligned(const ConstMatrix& m) {
  const auto bytes = static_cast<std::int64_t>(size_of(m.dtype));
  return m.cols % 8 == 0 && m.row_stride * bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
}

SupportArgs arguments(const ResolvedSupport& r, const RowTerms* terms) {
  const Problem& p = r.head.given;
  ConstMatrix weight = p.weight;
  weight.rows = r.head.v_valid;
  return {static_cast<const std::int32_t*>(r.ids.data),
          r.ids.row_stride,
          r.head.n,
          r.k,
          r.ids,
          p.hidden,
          weight,
          p.bias,
          p.vocab_start,
          r.head.v_valid,
          r.head.valid_vocab,
          static_cast<float>(p.logit_scale),
          static_cast<float>(p.softcap.value_or(0.0)),
          r.head.compute,
          aligned(p.hidden) && aligned(p.weight),
          terms};
}

/// Pieces of the workspace, in order; the query measures with a null base.
struct Pieces {
  SoftmaxState* states = nullptr;
  void* check = nullptr;
  RowTerms* terms = nullptr;
  float* dl = nullptr;
  void* sort = nullptr;
  std::size_t sort_bytes = 0;
  std::size_t used = 0;
};

Result<Pieces> carve(void* base, const ResolvedSupport& r, Operation operation, const BackwardOutputs& out) {
  Workspace workspace(base);
  Pieces pieces;
  // First, so that the states of a whole forward start the workspace; the check is over before they are written.
  if (operation == Operation::kForward) pieces.states = workspace.take<SoftmaxState>(r.head.n);
  if (r.head.check) pieces.check = workspace.take_bytes(static_cast<std::int64_t>(kCheckBytes));
  pieces.terms = workspace.take<RowTerms>(r.head.n);
  if (operation == Operation::kBackward) {
    const std::int64_t slots = r.head.n * (r.k + 1);
    pieces.dl = workspace.take<float>(slots);
    if (!out.weight.absent() || !out.bias.absent()) {
      const Result<std::size_t> bytes = support_weight_bytes(slots, r.head.v_local, r.head.given.hidden.cols);
      if (!bytes.ok()) return bytes.status();
      pieces.sort_bytes = *bytes;
      pieces.sort = workspace.take_bytes(static_cast<std::int64_t>(*bytes));
    }
  }
  pieces.used = workspace.used();
  return pieces;
}

Status check_size(const ResolvedSupport& r) {
  if (r.head.result == DType::kFloat64)
    return {StatusCode::kUnsupported,
            "hidden: candidate sets on CUDA expected float32, bfloat16 or float16, got float64"};
  if (r.head.n * (r.k + 1) >= (std::int64_t{1} << 31))
    return {StatusCode::kUnsupported, "support_ids: expected N (K + 1) < 2^31 a call on CUDA, got " +
                                          std::to_string(r.head.n) + " x " + std::to_string(r.k + 1)};
  return {};
}

Result<WorkspaceSize> workspace_size(const ResolvedSupport& r, Operation operation, const BackwardOutputs& out,
                                     const Execution&) {
  LMHEAD_RETURN_IF_ERROR(check_size(r));
  const Result<Pieces> pieces = carve(nullptr, r, operation, out);
  if (!pieces.ok()) return pieces.status();
  return WorkspaceSize{pieces->used, 0};
}

/// Runs before anything is written, so it may use the start of the workspace.
Status check_support_values(const ResolvedSupport& r, const Execution& e) {
  if (r.head.n == 0) return {};
  LMHEAD_RETURN_IF_ERROR(cuda::check_values(r.head, e));
  Workspace workspace(e.workspace);
  auto* found = static_cast<unsigned long long*>(workspace.take_bytes(static_cast<std::int64_t>(kCheckBytes)));
  auto* terms = workspace.take<RowTerms>(r.head.n);
  const cudaStream_t stream = stream_of(e);
  prepare_rows(row_inputs(r.head, 0, r.head.n), r.head.n, false, terms, stream);
  LMHEAD_RETURN_IF_ERROR(support_find_bad(arguments(r, terms), found, stream));
  unsigned long long at = 0;
  LMHEAD_RETURN_IF_ERROR(
      to_status(cudaMemcpyAsync(&at, found, sizeof at, cudaMemcpyDeviceToHost, stream), "support check"));
  LMHEAD_RETURN_IF_ERROR(to_status(cudaStreamSynchronize(stream), "support check"));
  if (at == ~0ull) return {};
  const std::int64_t row = static_cast<std::int64_t>(at) / r.k, column = static_cast<std::int64_t>(at) % r.k;
  std::int64_t wide = 0;
  const std::size_t width = size_of(r.ids.dtype);
  const auto* source =
      static_cast<const std::byte*>(r.ids.data) + static_cast<std::size_t>(row * r.ids.row_stride + column) * width;
  LMHEAD_RETURN_IF_ERROR(to_status(cudaMemcpy(&wide, source, width, cudaMemcpyDeviceToHost), "support check"));
  return bad_support_id(r, load_int(&wide, r.ids.dtype, 0), row, column);
}

Status forward_partial(const ResolvedSupport& r, const Matrix& state, const Execution& e) {
  if (r.head.n == 0) return {};
  LMHEAD_RETURN_IF_ERROR(check_size(r));
  // A whole forward passes its own states, which start the workspace: leave them room.
  const bool whole = e.workspace != nullptr && state.data == e.workspace;
  const Result<Pieces> pieces = carve(e.workspace, r, whole ? Operation::kForward : Operation::kForwardPartial, {});
  if (!pieces.ok()) return pieces.status();
  prepare_rows(row_inputs(r.head, 0, r.head.n), r.head.n, false, pieces->terms, stream_of(e));
  return support_states(arguments(r, pieces->terms), static_cast<SoftmaxState*>(state.data), stream_of(e));
}

Status combine(const ResolvedSupport& r, const ConstMatrix& states, const SupportOutputs& out, const Execution& e) {
  if (r.head.n == 0) return {};
  return support_results(arguments(r, nullptr), static_cast<const SoftmaxState*>(states.data), states.rows / r.head.n,
                         row_inputs(r.head, 0, r.head.n), out, stream_of(e));
}

Status backward(const ResolvedSupport& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e) {
  const Result<Pieces> pieces = carve(e.workspace, r, Operation::kBackward, out);
  if (!pieces.ok()) return pieces.status();
  const SupportArgs args = arguments(r, pieces->terms);
  if (r.head.n > 0) {
    prepare_rows(row_inputs(r.head, 0, r.head.n, in), r.head.n, true, pieces->terms, stream_of(e));
    LMHEAD_RETURN_IF_ERROR(support_rows_backward(args, pieces->dl, out.hidden, out.accumulate_hidden, stream_of(e)));
  }
  if (out.weight.absent() && out.bias.absent()) return {};
  return support_weight_backward(args, pieces->dl, out, r.head.given.targets, r.head.v_local, pieces->sort,
                                 pieces->sort_bytes, stream_of(e));
}

Status selected_logits(const ResolvedSupport& r, const Matrix& logits, const Execution& e) {
  if (r.head.n == 0 || r.k == 0) return {};
  const Result<Pieces> pieces = carve(e.workspace, r, Operation::kForwardPartial, {});
  if (!pieces.ok()) return pieces.status();
  prepare_rows(row_inputs(r.head, 0, r.head.n), r.head.n, false, pieces->terms, stream_of(e));
  return selected_states(arguments(r, pieces->terms), logits, stream_of(e));
}

Status selected_combine(const ResolvedSupport& r, const ConstMatrix& logits, const ConstVector& lse,
                        const ConstVector& logprob, const Matrix& selected, const Execution& e) {
  return selected_results(arguments(r, nullptr), logits, lse, logprob, row_inputs(r.head, 0, r.head.n), selected,
                          stream_of(e));
}

Status available() {
  const Result<const DeviceProperties*> device = current_device();
  return device.ok() ? Status() : device.status();
}

}  // namespace

const SupportImplementation kSupportCuda = {
    .name = "cuda_portable",
    .device = Device::kCuda,
    .available = available,
    .workspace_size = workspace_size,
    .check_values = check_support_values,
    .forward_partial = forward_partial,
    .combine = combine,
    .backward = backward,
    .selected_logits = selected_logits,
    .selected_combine = selected_combine,
};

}  // namespace lmhead
