// Packed sequences: the layout's index maps slice ids, masks and temperatures to this rank's rows, and bring
// results back; the head itself runs sharded as for any other rows.
#include <string>
#include <vector>

#include "core/element.h"
#include "core/return_if_error.h"
#include "dist/row_moves.h"
#include "dist/sharded.h"

namespace lmhead {
namespace {

std::string str(std::int64_t value) { return std::to_string(value); }
Status invalid(const std::string& message) { return {StatusCode::kInvalidArgument, message}; }

Status check_rows(const char* name, const ConstVector& v, std::int64_t size, bool optional,
                  const Execution& execution) {
  if (v.absent() && optional) return {};
  if (v.size != size)
    return invalid(std::string(name) + ": expected [" + str(size) + "] (one a token), got [" + str(v.size) + "]");
  LMHEAD_RETURN_IF_ERROR(validate_vector(name, v, size));
  return check_place(name, v.data, execution);
}

Status check_dtype(const char* name, DType got, DType expected) {
  if (got == expected) return {};
  return {StatusCode::kTypeMismatch,
          std::string(name) + ": expected " + to_string(expected) + ", got " + to_string(got)};
}

DType result_of(const PackedProblem& p) {
  return p.head.hidden.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

/// A group of one rank where the caller gave none.
class Groups {
 public:
  Groups(const ParallelGroups& given, Device device)
      : tp_(given.tp == nullptr ? alone(device) : nullptr),
        cp_(given.cp == nullptr ? alone(device) : nullptr),
        tp(given.tp == nullptr ? *tp_ : *given.tp),
        cp(given.cp == nullptr ? *cp_ : *given.cp) {}

 private:
  static std::unique_ptr<Communicator> alone(Device device) {
    auto group = local_communicators(1, kDefaultTimeout, device);
    // A build without CUDA refuses the call itself, with its own message.
    if (!group.ok()) group = local_communicators(1);
    return std::move(group->front());
  }
  const std::unique_ptr<Communicator> tp_, cp_;

 public:
  Communicator& tp;
  Communicator& cp;
};

/// Where a call puts what it derives, in one piece of scratch memory of the device.
struct Buffers {
  std::byte* maps = nullptr;         ///< PlacedRows
  std::byte* targets = nullptr;      ///< [rows] int64
  std::byte* active = nullptr;       ///< [rows] uint8
  std::byte* temperature = nullptr;  ///< [rows] of the given dtype
  std::byte* hidden = nullptr;       ///< [rows, H], gathered under sequence parallelism
  std::byte* message = nullptr;      ///< forward: [cp, 1 or 2, rows], logprob and entropy of all cp ranks
  std::byte* upstream[3] = {};       ///< backward: [rows] dlogprob, dentropy, entropy

  /// Lays the pieces out behind `base` (nullptr only measures) and returns their bytes.
  std::size_t lay_out(const PackedProblem& p, Operation operation, Device device, std::byte* base) {
    std::size_t used = 0;
    const auto piece = [&](std::byte*& at, std::size_t bytes) {
      at = base == nullptr ? nullptr : base + used;
      used += Scratch::aligned(bytes);
    };
    const PackedLayout& layout = *p.layout;
    const std::size_t rows = static_cast<std::size_t>(layout.local_total()), value = size_of(result_of(p));
    piece(maps, placed_rows_bytes(layout.local_total(), layout.num_tokens(), device));
    piece(targets, rows * sizeof(std::int64_t));
    piece(active, rows);
    piece(temperature, p.row_temperature.data == nullptr ? 0 : rows * size_of(p.row_temperature.dtype));
    piece(hidden,
          p.sequence_parallel ? rows * static_cast<std::size_t>(p.head.hidden.cols) * size_of(p.head.hidden.dtype) : 0);
    if (operation == Operation::kBackward) {
      for (std::byte*& vector : upstream) piece(vector, rows * value);
    } else {
      piece(message, static_cast<std::size_t>(layout.options().cp) * 2 * rows * value);
    }
    return used;
  }
};

/// This rank's rows and what belongs to them.
struct LocalRows {
  PackedRows map;
  PlacedRows placed;
  Scratch scratch;
  Buffers at;
  Problem problem;
};

Status check_problem(const PackedProblem& p, const Groups& groups, const Execution& execution) {
  if (groups.cp.device() != execution.device)
    return invalid(std::string("cp communicator: expected one for tensors on ") +
                   (execution.device == Device::kCpu ? "the CPU" : "a CUDA device") + ", got " + groups.cp.transport());
  if (p.layout == nullptr) return invalid("layout: expected one, got a null pointer");
  const PackedLayout& layout = *p.layout;
  if (layout.options().tp != groups.tp.size() || layout.options().cp != groups.cp.size())
    return invalid("layout: expected tp " + str(groups.tp.size()) + " and cp " + str(groups.cp.size()) +
                   " as the groups have, got " + str(layout.options().tp) + " and " + str(layout.options().cp));
  const Problem& head = p.head;
  if (head.targets.data != nullptr || head.active.data != nullptr || head.row_temperature.data != nullptr)
    return invalid(
        "head: expected no targets, active or row_temperature (they follow from input_ids, loss_mask and "
        "row_temperature of the packed problem), got one");
  // Under sequence_parallel no other check sees these rows: the head is given the gathered ones.
  LMHEAD_RETURN_IF_ERROR(validate_matrix("hidden", head.hidden));
  const std::int64_t rows = layout.local_total() / (p.sequence_parallel ? groups.tp.size() : 1);
  if (p.sequence_parallel && layout.local_total() % groups.tp.size() != 0)
    return invalid("sequence_parallel: expected local rows divisible by tp, got " + str(layout.local_total()));
  if (head.hidden.rows != rows)
    return invalid("hidden: expected [" + str(rows) + ", H] (this rank's rows of the layout), got [" +
                   str(head.hidden.rows) + ", " + str(head.hidden.cols) + "]");
  const std::int64_t tokens = layout.num_tokens();
  LMHEAD_RETURN_IF_ERROR(check_rows("input_ids", p.input_ids, tokens, false, execution));
  if (p.input_ids.dtype != DType::kInt32 && p.input_ids.dtype != DType::kInt64)
    return {StatusCode::kTypeMismatch,
            std::string("input_ids: expected int32 or int64, got ") + to_string(p.input_ids.dtype)};
  LMHEAD_RETURN_IF_ERROR(check_rows("loss_mask", p.loss_mask, tokens, true, execution));
  if (p.loss_mask.data != nullptr && is_floating(p.loss_mask.dtype))
    return {StatusCode::kTypeMismatch,
            std::string("loss_mask: expected bool or an integer type, got ") + to_string(p.loss_mask.dtype)};
  if (p.row_temperature.data != nullptr && p.row_temperature.dtype != DType::kFloat32)
    LMHEAD_RETURN_IF_ERROR(check_dtype("temperature", p.row_temperature.dtype, result_of(p)));
  LMHEAD_RETURN_IF_ERROR(check_place("hidden", head.hidden.data, execution));
  return check_rows("temperature", p.row_temperature, tokens, true, execution);
}

/// The head's problem over this rank's rows, with the given memory for what is derived.
Problem local_problem(const PackedProblem& p, const Buffers& at) {
  const std::int64_t n = p.layout->local_total();
  Problem local = p.head;
  local.targets = {at.targets, n, 1, DType::kInt64};
  local.active = {at.active, n, 1, DType::kUInt8};
  if (p.row_temperature.data != nullptr) local.row_temperature = {at.temperature, n, 1, p.row_temperature.dtype};
  if (p.sequence_parallel) local.hidden = {at.hidden, n, p.head.hidden.cols, p.head.hidden.cols, p.head.hidden.dtype};
  return local;
}

/// Slices everything but the hidden rows, which come by gather_hidden() once all ranks agree.
Status slice(const PackedProblem& p, const Groups& groups, Operation operation, const Execution& execution,
             LocalRows& local) {
  Result<PackedRows> map = packed_rows(*p.layout, groups.cp.rank());
  if (!map.ok()) return map.status();
  local.map = std::move(*map);
  const std::size_t bytes = local.at.lay_out(p, operation, execution.device, nullptr);
  LMHEAD_RETURN_IF_ERROR(local.scratch.take(bytes, execution, "packed_workspace_size"));
  local.at.lay_out(p, operation, execution.device, local.scratch.data);
  LMHEAD_RETURN_IF_ERROR(place_rows(local.map, local.at.maps, execution, &local.placed));
  LMHEAD_RETURN_IF_ERROR(take_targets(p.input_ids, p.loss_mask, local.placed, p.head.ignore_index,
                                      reinterpret_cast<std::int64_t*>(local.at.targets),
                                      reinterpret_cast<std::uint8_t*>(local.at.active), execution));
  if (p.row_temperature.data != nullptr)
    LMHEAD_RETURN_IF_ERROR(take_values(p.row_temperature, local.placed, 1.0, local.at.temperature, execution));
  local.problem = local_problem(p, local.at);
  return {};
}

Status gather_hidden(const PackedProblem& p, Communicator& tp, LocalRows& local, const Execution& execution) {
  if (!p.sequence_parallel) return {};
  const ConstMatrix& own = p.head.hidden;
  const std::size_t bytes = static_cast<std::size_t>(own.rows * own.cols) * size_of(own.dtype);
  std::byte* slot = local.at.hidden + bytes * static_cast<std::size_t>(tp.rank());
  LMHEAD_RETURN_IF_ERROR(copy_rows(own, slot, execution));
  return tp.all_gather(slot, local.at.hidden, bytes, execution.stream);
}

/// Of checked arguments. Equal on all ranks of a batch: lengths and the options of the layout, and ids and masks where
/// they are in host memory.
std::int64_t batch_hash(const PackedProblem& p, const Execution& execution) {
  if (!is_checked(execution)) return 0;
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&hash](std::int64_t word) { hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x100000001b3u; };
  for (const std::int64_t offset : p.layout->cu_seqlens_padded()) add(offset);
  for (const std::int64_t offset : p.layout->cu_seqlens()) add(offset);
  add(p.sequence_parallel);
  const std::int64_t tokens = execution.device == Device::kCpu ? p.layout->num_tokens() : 0;
  for (std::int64_t i = 0; i < tokens; ++i) {
    add(load_int(p.input_ids, i));
    if (!p.loss_mask.absent()) add(load_int(p.loss_mask, i) > 0);
  }
  return static_cast<std::int64_t>(hash);
}

/// Agreement within each tp group first, then across cp: a failure anywhere reaches every rank.
Status settle_both(Groups& groups, const char* name, std::int64_t hash, PreparedCall& prepared,
                   const Execution& execution) {
  const CallFacts facts{name, hash};
  prepared.local = settle(groups.tp, facts, prepared, execution, true);
  return settle(groups.cp, facts, prepared, execution, false);
}

Status check_output(const char* name, const Vector& out, std::int64_t size, DType dtype, const Execution& execution) {
  if (out.absent()) return {};
  LMHEAD_RETURN_IF_ERROR(check_rows(name, {out.data, out.size, out.stride, out.dtype}, size, false, execution));
  LMHEAD_RETURN_IF_ERROR(check_dtype(name, out.dtype, dtype));
  if (out.stride == 0 && size > 1) return invalid(std::string(name) + ": expected a stride other than 0, got 0");
  return {};
}

/// Under sequence parallelism a gradient of hidden is always scattered.
ReduceHiddenGrad reduction_of(const PackedProblem& p, const BackwardOutputs& outputs, ReduceHiddenGrad reduce) {
  return p.sequence_parallel && reduce == ReduceHiddenGrad::kNone && !outputs.hidden.absent()
             ? ReduceHiddenGrad::kReduceScatter
             : reduce;
}

/// An aligned address for memory that a size query has not got yet; it is checked and not read.
std::byte* placeholder(const void* data) {
  return reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(data) + 255) / 256 * 256);
}

}  // namespace

Result<WorkspaceSize> packed_workspace_size(const PackedProblem& p, const ParallelGroups& given, Operation operation,
                                            ReduceHiddenGrad reduce, const BackwardOutputs& gradients,
                                            const Execution& execution) {
  return guarded("packed_workspace_size", [&]() -> Result<WorkspaceSize> {
    const Groups groups(given, execution.device);
    LMHEAD_RETURN_IF_ERROR(check_problem(p, groups, execution));
    Buffers at;
    const std::size_t own = at.lay_out(p, operation, execution.device, nullptr);
    at.targets = at.active = at.temperature = at.hidden = placeholder(p.head.hidden.data);
    Result<WorkspaceSize> size = sharded_workspace_size(local_problem(p, at), groups.tp, operation,
                                                        reduction_of(p, gradients, reduce), gradients, execution);
    if (!size.ok()) return size;
    size->bytes += own;
    size->accumulator += own;
    return size;
  });
}

Status packed_forward(const PackedProblem& p, const ParallelGroups& given, const ForwardOutputs& outputs,
                      const Execution& execution) {
  Groups groups(given, execution.device);
  LocalRows local;
  ForwardOutputs own;
  PreparedCall prepared;
  const DType result = result_of(p);
  const bool with_entropy = !outputs.entropy.absent();
  const std::int64_t columns = with_entropy ? 2 : 1;
  std::size_t part = 0;  // bytes of a cp rank's message
  const Status sliced = guarded("packed_forward", [&]() -> Status {
    LMHEAD_RETURN_IF_ERROR(check_problem(p, groups, execution));
    LMHEAD_RETURN_IF_ERROR(check_output("logprob", outputs.logprob, p.layout->num_tokens(), result, execution));
    LMHEAD_RETURN_IF_ERROR(check_output("entropy", outputs.entropy, p.layout->num_tokens(), result, execution));
    LMHEAD_RETURN_IF_ERROR(slice(p, groups, Operation::kForward, execution, local));
    const std::int64_t n = p.layout->local_total();
    const std::size_t column = static_cast<std::size_t>(n) * size_of(result);
    part = column * static_cast<std::size_t>(columns);
    std::byte* slot = local.at.message + part * static_cast<std::size_t>(groups.cp.rank());
    own.logprob = {slot, n, 1, result};
    if (with_entropy) own.entropy = {slot + column, n, 1, result};
    own.lse = outputs.lse;
    prepared = prepare_forward(local.problem, groups.tp, own, local.scratch.inner);
    return prepared.local;
  });
  prepared.local = sliced;
  const std::int64_t hash = sliced.ok() ? batch_hash(p, execution) : 0;  // else there may be nothing to read
  LMHEAD_RETURN_IF_ERROR(settle_both(groups, "packed_forward", hash, prepared, execution));

  LMHEAD_RETURN_IF_ERROR(gather_hidden(p, groups.tp, local, execution));
  if (Status status = run_forward(prepared, groups.tp, own, execution); !status.ok()) {
    groups.cp.abort(status);
    return status;
  }
  LMHEAD_RETURN_IF_ERROR(groups.cp.all_gather(own.logprob.data, local.at.message, part, execution.stream));
  LMHEAD_RETURN_IF_ERROR(bring_back(local.at.message, local.placed, columns, 0, outputs.logprob, execution));
  return bring_back(local.at.message, local.placed, columns, 1, outputs.entropy, execution);
}

Status packed_backward(const PackedProblem& p, const ParallelGroups& given, const BackwardInputs& inputs,
                       const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution) {
  Groups groups(given, execution.device);
  LocalRows local;
  BackwardInputs own;
  PreparedCall prepared;
  reduce = reduction_of(p, outputs, reduce);
  prepared.local = guarded("packed_backward", [&]() -> Status {
    LMHEAD_RETURN_IF_ERROR(check_problem(p, groups, execution));
    if (p.sequence_parallel ? reduce == ReduceHiddenGrad::kSum : reduce == ReduceHiddenGrad::kReduceScatter)
      return invalid("reduce_hidden_grad: expected " +
                     std::string(p.sequence_parallel ? "reduce_scatter with" : "none or sum without") +
                     " sequence_parallel, got " + (p.sequence_parallel ? "sum" : "reduce_scatter"));
    const std::int64_t tokens = p.layout->num_tokens();
    const auto check_input = [&](const char* name, const ConstVector& from) -> Status {
      if (from.absent()) return {};
      LMHEAD_RETURN_IF_ERROR(check_rows(name, from, tokens, false, execution));
      return check_dtype(name, from.dtype, result_of(p));
    };
    LMHEAD_RETURN_IF_ERROR(check_input("dlogprob", inputs.dlogprob));
    LMHEAD_RETURN_IF_ERROR(check_input("dentropy", inputs.dentropy));
    LMHEAD_RETURN_IF_ERROR(check_input("entropy", inputs.entropy));
    LMHEAD_RETURN_IF_ERROR(slice(p, groups, Operation::kBackward, execution, local));
    own.lse = inputs.lse;
    const auto take = [&](const ConstVector& from, std::byte* to, ConstVector& view) -> Status {
      if (from.absent()) return {};
      view = {to, local.placed.rows, 1, from.dtype};
      return take_values(from, local.placed, 0.0, to, execution);
    };
    LMHEAD_RETURN_IF_ERROR(take(inputs.dlogprob, local.at.upstream[0], own.dlogprob));
    LMHEAD_RETURN_IF_ERROR(take(inputs.dentropy, local.at.upstream[1], own.dentropy));
    LMHEAD_RETURN_IF_ERROR(take(inputs.entropy, local.at.upstream[2], own.entropy));
    prepared = prepare_backward(local.problem, groups.tp, own, outputs, reduce, local.scratch.inner);
    return prepared.local;
  });
  if (reduce == ReduceHiddenGrad::kNone && !p.sequence_parallel) {
    LMHEAD_RETURN_IF_ERROR(prepared.local);
  } else {
    LMHEAD_RETURN_IF_ERROR(
        settle(groups.tp, {"packed_backward", static_cast<std::int64_t>(reduce)}, prepared, execution, true));
  }
  LMHEAD_RETURN_IF_ERROR(gather_hidden(p, groups.tp, local, execution));
  return run_backward(prepared, groups.tp, own, outputs, reduce, execution);
}

}  // namespace lmhead
