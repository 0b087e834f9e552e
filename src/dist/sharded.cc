// One head over the ranks of a group: fold this shard, gather 16 bytes a token, merge.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "core/return_if_error.h"
#include "dist/sharded.h"
#include "dist/store_rows.h"

namespace lmhead {
namespace {

Status invalid(const std::string& message) { return {StatusCode::kInvalidArgument, message}; }

std::size_t gathered_bytes(const ResolvedProblem& r, int ranks) {
  return static_cast<std::size_t>(r.n * ranks * kStateWidth) * size_of(r.result);
}

/// Scratch for the fp32 hidden gradient before the reduction, and behind it this rank's rows after a
/// reduce-scatter.
std::size_t hidden_part_bytes(const ResolvedProblem& r, int ranks, ReduceHiddenGrad reduce,
                              const BackwardOutputs& out) {
  if (reduce == ReduceHiddenGrad::kNone || out.hidden.absent()) return 0;
  const std::int64_t rows = reduce == ReduceHiddenGrad::kSum ? r.n : r.n + r.n / ranks;
  return static_cast<std::size_t>(rows * r.h) * size_of(r.result);
}

Status check_group(const ResolvedProblem& r, const Communicator& tp, const Execution& execution) {
  if (tp.device() != execution.device)
    return invalid(std::string("communicator: expected one for tensors on ") +
                   (execution.device == Device::kCpu ? "the CPU" : "a CUDA device") + ", got " + tp.transport());
  if (!r.given.vocab_size)
    return invalid("vocab_size: expected the global vocabulary (required with a group), got none");
  return {};
}

Status check_inner_workspace(const Call& call, Operation operation, const BackwardOutputs& out,
                             const Execution& inner) {
  Result<WorkspaceSize> needed = call.implementation->workspace_size(call.problem, operation, out, inner);
  if (!needed.ok()) return needed.status();
  return validate_workspace(inner, *needed, inner.device == Device::kCpu);
}

/// The outputs as the inner call sees them: a reduced hidden gradient goes to fp32 scratch first.
BackwardOutputs inner_outputs(const ResolvedProblem& r, const BackwardOutputs& out, ReduceHiddenGrad reduce,
                              void* part) {
  BackwardOutputs inner = out;
  if (reduce == ReduceHiddenGrad::kNone || out.hidden.absent()) return inner;
  inner.hidden = {part, r.n, r.h, r.h, r.result};
  inner.accumulate_hidden = false;
  return inner;
}

/// The output of a reduce-scatter has N / tp rows; everything else is checked as if it had N.
Status check_reduced(const ResolvedProblem& r, const Communicator& tp, ReduceHiddenGrad reduce,
                     const BackwardOutputs& out, BackwardOutputs& as_full) {
  as_full = out;
  if (out.hidden.absent()) {
    if (reduce == ReduceHiddenGrad::kNone) return {};
    return invalid("reduce_hidden_grad: expected none without a hidden gradient, got one");
  }
  if (reduce != ReduceHiddenGrad::kReduceScatter) return {};
  if (r.n % tp.size() != 0)
    return invalid("reduce_hidden_grad: expected N divisible by " + std::to_string(tp.size()) +
                   " ranks for reduce_scatter, got N = " + std::to_string(r.n));
  if (out.hidden.rows != r.n / tp.size())
    return invalid("hidden gradient: expected [" + std::to_string(r.n / tp.size()) + ", " + std::to_string(r.h) +
                   "] (rows of this rank after the reduce-scatter), got [" + std::to_string(out.hidden.rows) + ", " +
                   std::to_string(out.hidden.cols) + "]");
  as_full.hidden.rows = r.n;
  return {};
}

/// Sums the parts over ranks in result precision and stores them once.
Status reduce_hidden(Communicator& tp, ReduceHiddenGrad reduce, const Matrix& part, const BackwardOutputs& out,
                     const Execution& execution) {
  const std::int64_t count = part.rows * part.cols;
  ConstMatrix sum{part.data, out.hidden.rows, part.cols, part.cols, part.dtype};
  if (reduce == ReduceHiddenGrad::kSum) {
    LMHEAD_RETURN_IF_ERROR(tp.all_reduce_sum(part.data, count, part.dtype, execution.stream));
  } else {
    std::byte* own = static_cast<std::byte*>(part.data) + static_cast<std::size_t>(count) * size_of(part.dtype);
    LMHEAD_RETURN_IF_ERROR(tp.reduce_scatter_sum(part.data, own, count / tp.size(), part.dtype, execution.stream));
    sum.data = own;
  }
  return store_rows(sum, out.hidden, out.accumulate_hidden, execution);
}

}  // namespace

Status Scratch::take(std::size_t own, const Execution& given, const char* query) {
  inner = given;
  LMHEAD_RETURN_IF_ERROR(validate_workspace_address(given));
  if (given.workspace == nullptr && own > 0) {
    if (given.device == Device::kCuda)
      return invalid("workspace: expected at least " + std::to_string(aligned(own)) + " bytes (ask " + query +
                     "), got none");
    owned_.resize(own);
    data = owned_.data();
  } else if (given.workspace != nullptr) {
    if (given.workspace_bytes < aligned(own))
      return invalid("workspace: expected at least " + std::to_string(aligned(own)) + " bytes (ask " + query +
                     "), got " + std::to_string(given.workspace_bytes));
    data = static_cast<std::byte*>(given.workspace);
    inner.workspace = data + aligned(own);
    inner.workspace_bytes = given.workspace_bytes - aligned(own);
  }
  return {};
}

bool is_checked(const Execution& execution) { return execution.check.value_or(execution.device == Device::kCpu); }

Status settle(Communicator& group, const CallFacts& facts, const PreparedCall& prepared, const Execution& execution,
              bool shards) {
  if (is_checked(execution)) return agree(group, facts, prepared.problem(), prepared.local, shards);
  if (!prepared.local.ok()) group.abort(prepared.local);
  return prepared.local;
}

PreparedCall prepare_forward(const Problem& problem, const Communicator& tp, const ForwardOutputs& outputs,
                             const Execution& execution) {
  PreparedCall prepared;
  prepared.local = guarded("sharded_forward", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kForwardPartial);
    if (!call.ok()) return call.status();
    prepared.call = *call;
    const ResolvedProblem& r = call->problem;
    LMHEAD_RETURN_IF_ERROR(check_group(r, tp, execution));
    LMHEAD_RETURN_IF_ERROR(validate_outputs(r, outputs));
    LMHEAD_RETURN_IF_ERROR(prepared.scratch.take(gathered_bytes(r, tp.size()), execution, "sharded_workspace_size"));
    LMHEAD_RETURN_IF_ERROR(check_inner_workspace(*call, Operation::kForwardPartial, {}, prepared.scratch.inner));
    return call->check_values(execution);
  });
  return prepared;
}

PreparedCall prepare_backward(const Problem& problem, const Communicator& tp, const BackwardInputs& inputs,
                              const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution) {
  PreparedCall prepared;
  prepared.local = guarded("sharded_backward", [&]() -> Status {
    Result<Call> call = plan_call(problem, execution, Operation::kBackward);
    if (!call.ok()) return call.status();
    prepared.call = *call;
    const ResolvedProblem& r = call->problem;
    BackwardOutputs as_full;
    LMHEAD_RETURN_IF_ERROR(check_group(r, tp, execution));
    LMHEAD_RETURN_IF_ERROR(check_reduced(r, tp, reduce, outputs, as_full));
    LMHEAD_RETURN_IF_ERROR(validate_backward(r, inputs, as_full));
    LMHEAD_RETURN_IF_ERROR(
        prepared.scratch.take(hidden_part_bytes(r, tp.size(), reduce, outputs), execution, "sharded_workspace_size"));
    prepared.inner = inner_outputs(r, outputs, reduce, prepared.scratch.data);
    LMHEAD_RETURN_IF_ERROR(check_inner_workspace(*call, Operation::kBackward, prepared.inner, prepared.scratch.inner));
    return call->check_values(execution);
  });
  return prepared;
}

Status run_forward(const PreparedCall& prepared, Communicator& tp, const ForwardOutputs& outputs,
                   const Execution& execution) {
  const Call& call = *prepared.call;
  const ResolvedProblem& r = call.problem;
  const std::size_t message = gathered_bytes(r, 1);
  std::byte* states = prepared.scratch.data;
  std::byte* own = states + message * static_cast<std::size_t>(tp.rank());
  const Matrix state{own, r.n, kStateWidth, kStateWidth, r.result};
  if (Status status = guarded("sharded_forward",
                              [&] { return call.implementation->forward_partial(r, state, prepared.scratch.inner); });
      !status.ok()) {
    tp.abort(status);
    return status;
  }
  LMHEAD_RETURN_IF_ERROR(tp.all_gather(own, states, message, execution.stream));
  const ConstMatrix all{states, r.n * tp.size(), kStateWidth, kStateWidth, r.result};
  return call.finished(call.implementation->combine(r, all, outputs, prepared.scratch.inner));
}

Status run_backward(const PreparedCall& prepared, Communicator& tp, const BackwardInputs& inputs,
                    const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution) {
  const Call& call = *prepared.call;
  Status computed = guarded("sharded_backward", [&] {
    return call.implementation->backward(call.problem, inputs, prepared.inner, prepared.scratch.inner);
  });
  if (reduce == ReduceHiddenGrad::kNone) return call.finished(computed);
  if (!computed.ok()) {
    tp.abort(computed);
    return computed;
  }
  return call.finished(reduce_hidden(tp, reduce, prepared.inner.hidden, outputs, execution));
}

VocabShard vocab_shard(std::int64_t vocab_size, int rank, int ranks) {
  const std::int64_t columns = (vocab_size + ranks - 1) / ranks;
  const std::int64_t start = std::min(vocab_size, columns * rank);
  return {start, std::min(vocab_size, start + columns) - start};
}

Result<WorkspaceSize> sharded_workspace_size(const Problem& problem, const Communicator& tp, Operation operation,
                                             ReduceHiddenGrad reduce, const BackwardOutputs& gradients,
                                             const Execution& execution) {
  return guarded("sharded_workspace_size", [&]() -> Result<WorkspaceSize> {
    Result<Call> call = plan_call(problem, execution, operation);
    if (!call.ok()) return call.status();
    const ResolvedProblem& r = call->problem;
    std::size_t own = 0;
    BackwardOutputs inner = gradients;
    if (operation == Operation::kBackward) {
      own = hidden_part_bytes(r, tp.size(), reduce, gradients);
      inner = inner_outputs(r, gradients, reduce, gradients.hidden.data);
    } else {
      own = gathered_bytes(r, tp.size());
      operation = Operation::kForwardPartial;
    }
    Result<WorkspaceSize> size = call->implementation->workspace_size(r, operation, inner, execution);
    if (!size.ok()) return size;
    size->bytes += Scratch::aligned(own);
    if (operation == Operation::kBackward) size->accumulator += Scratch::aligned(own);
    return size;
  });
}

Status sharded_forward(const Problem& problem, Communicator& tp, const ForwardOutputs& outputs,
                       const Execution& execution) {
  const PreparedCall prepared = prepare_forward(problem, tp, outputs, execution);
  LMHEAD_RETURN_IF_ERROR(settle(tp, {"sharded_forward"}, prepared, execution, true));
  return run_forward(prepared, tp, outputs, execution);
}

Status sharded_backward(const Problem& problem, Communicator& tp, const BackwardInputs& inputs,
                        const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution) {
  const PreparedCall prepared = prepare_backward(problem, tp, inputs, outputs, reduce, execution);
  if (reduce == ReduceHiddenGrad::kNone) {
    LMHEAD_RETURN_IF_ERROR(prepared.local);  // no other rank waits for this one
  } else {
    const CallFacts facts{"sharded_backward", static_cast<std::int64_t>(reduce)};
    LMHEAD_RETURN_IF_ERROR(settle(tp, facts, prepared, execution, true));
  }
  return run_backward(prepared, tp, inputs, outputs, reduce, execution);
}

}  // namespace lmhead
