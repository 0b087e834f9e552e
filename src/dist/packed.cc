// Packed sequences: the layout's index maps slice ids, masks and temperatures to this rank's rows, and bring
// results back; the head itself runs sharded as for any other rows.
#include <cstring>
#include <string>
#include <vector>

#include "core/element.h"
#include "dist/packed_rows.h"
#include "dist/sharded.h"

namespace lmhead {
namespace {

std::string str(std::int64_t value) { return std::to_string(value); }
Status invalid(const std::string& message) { return {StatusCode::kInvalidArgument, message}; }

Status check_rows(const char* name, const ConstVector& v, std::int64_t size, bool optional) {
  if (v.absent() && v.data == nullptr && optional) return {};
  if (v.size != size)
    return invalid(std::string(name) + ": expected [" + str(size) + "] (one a token), got [" + str(v.size) + "]");
  if (v.data == nullptr && size > 0) return invalid(std::string(name) + ": expected data, got a null pointer");
  return {};
}

/// A group of one rank where the caller gave none.
class Groups {
 public:
  explicit Groups(const ParallelGroups& given)
      : tp_(given.tp == nullptr ? alone() : nullptr),
        cp_(given.cp == nullptr ? alone() : nullptr),
        tp(given.tp == nullptr ? *tp_ : *given.tp),
        cp(given.cp == nullptr ? *cp_ : *given.cp) {}

 private:
  static std::unique_ptr<Communicator> alone() { return std::move(local_communicators(1).value().front()); }
  const std::unique_ptr<Communicator> tp_, cp_;

 public:
  Communicator& tp;
  Communicator& cp;
};

/// This rank's rows and what belongs to them.
struct LocalRows {
  PackedRows map;
  std::vector<std::byte> hidden;  ///< gathered rows under sequence parallelism
  std::vector<std::int64_t> targets;
  std::vector<std::uint8_t> active;
  std::vector<double> temperature64;
  std::vector<float> temperature;
  Problem problem;
};

Status check_problem(const PackedProblem& p, const Groups& groups, const Execution& execution) {
  if (execution.device != Device::kCpu)
    return {
        StatusCode::kUnsupported,
        "packed sequences: expected host memory (GPU tensors go through lmhead.packed_logprobs), got a CUDA device"};
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
  const std::int64_t rows = layout.local_total() / (p.sequence_parallel ? groups.tp.size() : 1);
  if (p.sequence_parallel && layout.local_total() % groups.tp.size() != 0)
    return invalid("sequence_parallel: expected local rows divisible by tp, got " + str(layout.local_total()));
  if (head.hidden.rows != rows)
    return invalid("hidden: expected [" + str(rows) + ", H] (this rank's rows of the layout), got [" +
                   str(head.hidden.rows) + ", " + str(head.hidden.cols) + "]");
  const std::int64_t tokens = layout.num_tokens();
  LMHEAD_RETURN_IF_ERROR(check_rows("input_ids", p.input_ids, tokens, false));
  if (p.input_ids.dtype != DType::kInt32 && p.input_ids.dtype != DType::kInt64)
    return {StatusCode::kTypeMismatch,
            std::string("input_ids: expected int32 or int64, got ") + to_string(p.input_ids.dtype)};
  LMHEAD_RETURN_IF_ERROR(check_rows("loss_mask", p.loss_mask, tokens, true));
  if (p.loss_mask.data != nullptr && is_floating(p.loss_mask.dtype))
    return {StatusCode::kTypeMismatch,
            std::string("loss_mask: expected bool or an integer type, got ") + to_string(p.loss_mask.dtype)};
  return check_rows("temperature", p.row_temperature, tokens, true);
}

/// Slices everything but the hidden rows, which come by gather_hidden() once all ranks agree.
Status slice(const PackedProblem& p, const Groups& groups, LocalRows& local) {
  Result<PackedRows> map = packed_rows(*p.layout, groups.cp.rank());
  if (!map.ok()) return map.status();
  local.map = std::move(*map);
  const std::size_t rows = local.map.source.size();
  local.targets.assign(rows, p.head.ignore_index);
  local.active.assign(rows, 0);
  for (std::size_t i = 0; i < rows; ++i) {
    const std::int64_t source = local.map.source[i], target = local.map.target[i];
    if (target < 0) continue;
    local.targets[i] = load_int(p.input_ids, target);
    local.active[i] = p.loss_mask.data == nullptr || load_int(p.loss_mask, source) > 0;
  }
  const std::int64_t n = static_cast<std::int64_t>(rows);
  local.problem = p.head;
  local.problem.targets = {local.targets.data(), n, 1, DType::kInt64};
  local.problem.active = {local.active.data(), n, 1, DType::kUInt8};
  if (p.row_temperature.data != nullptr) {
    const bool fp64 = p.row_temperature.dtype == DType::kFloat64;
    local.temperature.assign(fp64 ? 0 : rows, 1.0f);
    local.temperature64.assign(fp64 ? rows : 0, 1.0);
    void* out = fp64 ? static_cast<void*>(local.temperature64.data()) : local.temperature.data();
    for (std::size_t i = 0; i < rows; ++i) {
      if (local.map.source[i] >= 0)
        store_float(out, p.row_temperature.dtype, static_cast<std::int64_t>(i),
                    load_float(p.row_temperature, local.map.source[i]));
    }
    local.problem.row_temperature = {out, n, 1, p.row_temperature.dtype};
  }
  if (p.sequence_parallel) {
    local.hidden.resize(rows * static_cast<std::size_t>(p.head.hidden.cols) * size_of(p.head.hidden.dtype));
    local.problem.hidden = {local.hidden.data(), n, p.head.hidden.cols, p.head.hidden.cols, p.head.hidden.dtype};
  }
  return {};
}

Status gather_hidden(const PackedProblem& p, Communicator& tp, LocalRows& local) {
  if (!p.sequence_parallel) return {};
  const ConstMatrix& own = p.head.hidden;
  const std::size_t row = static_cast<std::size_t>(own.cols) * size_of(own.dtype);
  const std::size_t bytes = row * static_cast<std::size_t>(own.rows);
  std::byte* slot = local.hidden.data() + bytes * static_cast<std::size_t>(tp.rank());
  for (std::int64_t i = 0; i < own.rows; ++i)
    std::memcpy(slot + row * static_cast<std::size_t>(i), row_data(own, i), row);
  return tp.all_gather(slot, local.hidden.data(), bytes);
}

/// Equal on all ranks of a batch: lengths, ids, masks and the options of the layout.
std::int64_t batch_hash(const PackedProblem& p) {
  if (p.layout == nullptr) return 0;
  std::uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&hash](std::int64_t word) { hash = (hash ^ static_cast<std::uint64_t>(word)) * 0x100000001b3u; };
  for (const std::int64_t offset : p.layout->cu_seqlens_padded()) add(offset);
  for (const std::int64_t offset : p.layout->cu_seqlens()) add(offset);
  const std::int64_t tokens = p.layout->num_tokens();
  if (p.input_ids.data != nullptr && p.input_ids.size == tokens)
    for (std::int64_t i = 0; i < tokens; ++i) add(load_int(p.input_ids, i));
  if (p.loss_mask.data != nullptr && p.loss_mask.size == tokens)
    for (std::int64_t i = 0; i < tokens; ++i) add(load_int(p.loss_mask, i) > 0);
  add(p.sequence_parallel);
  return static_cast<std::int64_t>(hash);
}

/// Agreement within each tp group first, then across cp: a failure anywhere reaches every rank.
Status settle_both(Groups& groups, const char* name, std::int64_t hash, PreparedCall& prepared,
                   const Execution& execution) {
  const CallFacts facts{name, hash};
  prepared.local = settle(groups.tp, facts, prepared, execution, true);
  return settle(groups.cp, facts, prepared, execution, false);
}

/// from[rows[i]] for each local row, 0 for padding.
std::vector<std::byte> take_rows(const ConstVector& from, const std::vector<std::int64_t>& rows) {
  std::vector<std::byte> out(rows.size() * size_of(from.dtype));
  for (std::size_t i = 0; i < rows.size(); ++i)
    store_float(out.data(), from.dtype, static_cast<std::int64_t>(i), rows[i] < 0 ? 0.0 : load_float(from, rows[i]));
  return out;
}

Status check_output(const char* name, const Vector& out, std::int64_t size, DType dtype) {
  if (out.absent()) return {};
  LMHEAD_RETURN_IF_ERROR(check_rows(name, {out.data, out.size, out.stride, out.dtype}, size, false));
  if (out.dtype != dtype)
    return {StatusCode::kTypeMismatch,
            std::string(name) + ": expected " + to_string(dtype) + ", got " + to_string(out.dtype)};
  if (out.stride == 0 && size > 1) return invalid(std::string(name) + ": expected a stride other than 0, got 0");
  return {};
}

}  // namespace

Status packed_forward(const PackedProblem& p, const ParallelGroups& given, const ForwardOutputs& outputs,
                      const Execution& execution) {
  Groups groups(given);
  LocalRows local;
  std::vector<std::byte> message;  // [cp, 1 or 2, local rows]: logprob and entropy of all cp ranks
  ForwardOutputs own;
  PreparedCall prepared;
  const DType result = p.head.hidden.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const bool with_entropy = !outputs.entropy.absent();
  std::size_t part = 0;
  const Status sliced = guarded("packed_forward", [&]() -> Status {
    LMHEAD_RETURN_IF_ERROR(check_problem(p, groups, execution));
    LMHEAD_RETURN_IF_ERROR(check_output("logprob", outputs.logprob, p.layout->num_tokens(), result));
    LMHEAD_RETURN_IF_ERROR(check_output("entropy", outputs.entropy, p.layout->num_tokens(), result));
    LMHEAD_RETURN_IF_ERROR(slice(p, groups, local));
    const std::int64_t n = p.layout->local_total();
    const std::size_t column = static_cast<std::size_t>(n) * size_of(result);
    part = column * (with_entropy ? 2 : 1);
    message.resize(part * static_cast<std::size_t>(groups.cp.size()));
    std::byte* slot = message.data() + part * static_cast<std::size_t>(groups.cp.rank());
    own.logprob = {slot, n, 1, result};
    if (with_entropy) own.entropy = {slot + column, n, 1, result};
    own.lse = outputs.lse;
    prepared = prepare_forward(local.problem, groups.tp, own, execution);
    return prepared.local;
  });
  prepared.local = sliced;
  const std::int64_t hash = batch_hash(p);
  LMHEAD_RETURN_IF_ERROR(settle_both(groups, "packed_forward", hash, prepared, execution));

  LMHEAD_RETURN_IF_ERROR(gather_hidden(p, groups.tp, local));
  if (Status status = run_forward(prepared, groups.tp, own, execution); !status.ok()) {
    groups.cp.abort(status);
    return status;
  }
  LMHEAD_RETURN_IF_ERROR(groups.cp.all_gather(own.logprob.data, message.data(), part));
  const std::int64_t n = p.layout->local_total(), columns = with_entropy ? 2 : 1;
  for (std::size_t t = 0; t < local.map.gathered.size(); ++t) {
    const std::int64_t rank = local.map.gathered[t] / n, row = local.map.gathered[t] % n;
    const std::int64_t at = rank * columns * n + row, token = static_cast<std::int64_t>(t);
    if (!outputs.logprob.absent()) store_float(outputs.logprob, token, load_float(message.data(), result, at));
    if (with_entropy) store_float(outputs.entropy, token, load_float(message.data(), result, at + n));
  }
  return {};
}

Status packed_backward(const PackedProblem& p, const ParallelGroups& given, const BackwardInputs& inputs,
                       const BackwardOutputs& outputs, ReduceHiddenGrad reduce, const Execution& execution) {
  Groups groups(given);
  LocalRows local;
  std::vector<std::byte> entropy, dlogprob, dentropy;
  BackwardInputs own;
  PreparedCall prepared;
  if (p.sequence_parallel && reduce == ReduceHiddenGrad::kNone && !outputs.hidden.absent())
    reduce = ReduceHiddenGrad::kReduceScatter;
  prepared.local = guarded("packed_backward", [&]() -> Status {
    LMHEAD_RETURN_IF_ERROR(check_problem(p, groups, execution));
    if (p.sequence_parallel ? reduce == ReduceHiddenGrad::kSum : reduce == ReduceHiddenGrad::kReduceScatter)
      return invalid("reduce_hidden_grad: expected " +
                     std::string(p.sequence_parallel ? "reduce_scatter with" : "none or sum without") +
                     " sequence_parallel, got " + (p.sequence_parallel ? "sum" : "reduce_scatter"));
    LMHEAD_RETURN_IF_ERROR(slice(p, groups, local));
    const std::int64_t tokens = p.layout->num_tokens(), n = p.layout->local_total();
    own.lse = inputs.lse;
    const auto take = [&](const char* name, const ConstVector& from, std::vector<std::byte>& to, ConstVector& view) {
      if (from.absent() && from.data == nullptr) return Status();
      LMHEAD_RETURN_IF_ERROR(check_rows(name, from, tokens, false));
      if (!is_floating(from.dtype))
        return Status(StatusCode::kTypeMismatch,
                      std::string(name) + ": expected a floating type, got " + to_string(from.dtype));
      to = take_rows(from, local.map.source);
      view = {to.data(), n, 1, from.dtype};
      return Status();
    };
    LMHEAD_RETURN_IF_ERROR(take("dlogprob", inputs.dlogprob, dlogprob, own.dlogprob));
    LMHEAD_RETURN_IF_ERROR(take("dentropy", inputs.dentropy, dentropy, own.dentropy));
    LMHEAD_RETURN_IF_ERROR(take("entropy", inputs.entropy, entropy, own.entropy));
    prepared = prepare_backward(local.problem, groups.tp, own, outputs, reduce, execution);
    return prepared.local;
  });
  if (reduce == ReduceHiddenGrad::kNone && !p.sequence_parallel) {
    LMHEAD_RETURN_IF_ERROR(prepared.local);
  } else {
    LMHEAD_RETURN_IF_ERROR(
        settle(groups.tp, {"packed_backward", static_cast<std::int64_t>(reduce)}, prepared, execution, true));
  }
  LMHEAD_RETURN_IF_ERROR(gather_hidden(p, groups.tp, local));
  return run_backward(prepared, groups.tp, own, outputs, reduce, execution);
}

}  // namespace lmhead
