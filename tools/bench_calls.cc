#include "bench_calls.h"

#include <algorithm>

#include "commands.h"

namespace lmhead::tools {

Problem BenchCalls::problem(std::size_t k) const {
  Problem p;
  p.hidden = {tensors_.hidden, run_.n, run_.h, run_.h, run_.dtype};
  p.weight = {tensors_.weight, run_.v_local, run_.h, run_.h, run_.dtype};
  p.targets = {tensors_.targets, run_.n, 1, DType::kInt64};
  if (tensors_.active[k] != nullptr) p.active = {tensors_.active[k], run_.n, 1, DType::kUInt8};
  p.vocab_size = run_.vocab_size;
  p.softcap = run_.softcap;
  p.logit_scale = run_.logit_scale;
  p.entropy = run_.cases[k].entropy;
  return p;
}

BackwardOutputs BenchCalls::gradients() const {
  BackwardOutputs out;
  out.hidden = {tensors_.dx, run_.n, run_.h, run_.h, run_.dtype};
  out.weight = {tensors_.dw, run_.v_local, run_.h, run_.h, run_.dtype};
  return out;
}

WorkspaceSize BenchCalls::workspace(std::size_t k) const {
  const Problem p = problem(k);
  Execution query = execution_;
  query.workspace = nullptr;
  const bool shard = run_.v_local != run_.vocab_size;
  const Result<WorkspaceSize> size =
      workspace_size(p, shard ? Operation::kForwardPartial : Operation::kForward, {}, query);
  require_ok(size.status());
  if (run_.cases[k].op == "forward") return *size;
  const Result<WorkspaceSize> other = workspace_size(p, Operation::kBackward, gradients(), query);
  require_ok(other.status());
  return {std::max(size->bytes, other->bytes), std::max(size->accumulator, other->accumulator)};
}

void BenchCalls::operator()(std::size_t k) const {
  const Problem p = problem(k);
  const bool entropy = p.entropy != EntropyMode::kOff;
  const auto row = [&](std::int64_t which) {
    return Vector{tensors_.rows + which * run_.n, run_.n, 1, DType::kFloat32};
  };
  const ForwardOutputs out{row(0), entropy ? row(1) : Vector{}, row(2)};
  if (run_.v_local == run_.vocab_size) {
    require_ok(forward(p, out, execution_));
  } else {  // a shard: its own columns only, as in a parallel run before the all-gather
    const Matrix state{tensors_.state, run_.n, kStateWidth, kStateWidth, DType::kFloat32};
    require_ok(forward_partial(p, state, execution_));
    require_ok(combine(p, {state.data, run_.n, kStateWidth, kStateWidth, DType::kFloat32}, out, execution_));
  }
  if (run_.cases[k].op == "forward") return;
  const auto given = [](const Vector& v) { return ConstVector{v.data, v.size, v.stride, v.dtype}; };
  BackwardInputs in{given(out.lse), given(out.entropy), {tensors_.upstream, run_.n, 1, DType::kFloat32}, {}};
  if (p.entropy == EntropyMode::kGrad) in.dentropy = {tensors_.upstream + run_.n, run_.n, 1, DType::kFloat32};
  require_ok(backward(p, in, gradients(), execution_));
}

double active_share(const std::vector<std::uint8_t>& mask) {
  if (mask.empty()) return 1.0;
  return static_cast<double>(std::count(mask.begin(), mask.end(), 1)) / static_cast<double>(mask.size());
}

}  // namespace lmhead::tools
