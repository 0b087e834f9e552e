#include "core/validate.h"

#include <cmath>
#include <limits>
#include <string>

#include "core/element.h"
#include "core/return_if_error.h"

namespace lmhead {
namespace {

std::string str(std::int64_t v) { return std::to_string(v); }
std::string str(double v) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", v);
  return text;
}
std::string shape(const ConstMatrix& m) { return "[" + str(m.rows) + ", " + str(m.cols) + "]"; }

Status invalid(const char* argument, const std::string& expected, const std::string& got) {
  return {StatusCode::kInvalidArgument, std::string(argument) + ": expected " + expected + ", got " + got};
}
Status mistyped(const char* argument, const std::string& expected, const std::string& got) {
  return {StatusCode::kTypeMismatch, std::string(argument) + ": expected " + expected + ", got " + got};
}

bool fits_in_memory(std::int64_t rows, std::int64_t row_stride, std::int64_t cols, DType dtype) {
  if (rows == 0) return true;
  const __int128 last = static_cast<__int128>(rows - 1) * row_stride + cols;
  return last * static_cast<__int128>(size_of(dtype)) <= std::numeric_limits<std::int64_t>::max();
}

/// Elements must lie at multiples of their size: a tensor cut out of a file at an odd byte does not.
Status check_aligned(const char* name, const void* data, DType dtype) {
  const std::size_t size = size_of(dtype), over = reinterpret_cast<std::uintptr_t>(data) % size;
  if (over == 0) return {};
  return invalid(name, "data aligned to " + str(static_cast<std::int64_t>(size)) + " bytes (" + to_string(dtype) + ")",
                 "an address " + str(static_cast<std::int64_t>(over)) + " bytes past");
}

/// Temperatures and softcaps are used in fp32 unless the inputs are fp64: a value or a reciprocal that the type cannot
/// hold would reach the logits as 0 or infinity.
bool has_reciprocal(double value, bool fp64) {
  const double least = fp64 ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  return value >= least && value <= 1 / least;
}

const char* reciprocal_range(bool fp64) {
  return fp64 ? "in the range of float64 [2.22507e-308, 4.49423e+307]"
              : "in the range of float32 [1.17549e-38, 8.50706e+37]";
}

Status check_positive(const char* name, double value, bool fp64) {
  if (!(value > 0) || !std::isfinite(value)) return invalid(name, "a finite number > 0", str(value));
  if (!has_reciprocal(value, fp64)) return invalid(name, std::string("a number ") + reciprocal_range(fp64), str(value));
  return {};
}

}  // namespace

Status validate_matrix(const char* name, const ConstMatrix& m) {
  if (m.rows < 0 || m.cols < 0) return invalid(name, "sizes >= 0", shape(m));
  if (m.rows > 1 && m.row_stride < m.cols)
    return invalid(name, "row stride >= " + str(m.cols) + " (contiguous columns)", str(m.row_stride));
  if (!fits_in_memory(m.rows, m.row_stride, m.cols, m.dtype))
    return invalid(name, "a size that fits in memory", shape(m));
  if (m.data == nullptr && m.rows > 0 && m.cols > 0) return invalid(name, "data for " + shape(m), "a null pointer");
  return check_aligned(name, m.data, m.dtype);
}

Status validate_matrix(const char* name, const ConstMatrix& m, std::int64_t rows, std::int64_t cols, DType dtype) {
  if (m.rows != rows || m.cols != cols) return invalid(name, "[" + str(rows) + ", " + str(cols) + "]", shape(m));
  if (m.dtype != dtype) return mistyped(name, to_string(dtype), to_string(m.dtype));
  return validate_matrix(name, m);
}

Status validate_ids(const char* name, const ConstMatrix& ids, std::int64_t n, bool int64_too) {
  if (ids.dtype != DType::kInt32 && !(int64_too && ids.dtype == DType::kInt64))
    return mistyped(name, int64_too ? "int32 or int64" : "int32", to_string(ids.dtype));
  if (ids.rows != n || ids.cols < 0) return invalid(name, "[" + str(n) + ", K]", shape(ids));
  return validate_matrix(name, ids);
}

Status validate_vector(const char* name, const ConstVector& v, std::int64_t size) {
  if (v.size != size) return invalid(name, "[" + str(size) + "]", "[" + str(v.size) + "]");
  if (v.data == nullptr && size > 0) return invalid(name, "data for [" + str(size) + "]", "a null pointer");
  const __int128 last = static_cast<__int128>(size - 1) * v.stride * static_cast<__int128>(size_of(v.dtype));
  constexpr __int128 kLimit = std::numeric_limits<std::int64_t>::max();
  if (size > 0 && (last > kLimit || last < -kLimit))
    return invalid(name, "a stride that fits in memory", str(v.stride));
  return check_aligned(name, v.data, v.dtype);
}

Status validate_vector(const char* name, const ConstVector& v, std::int64_t size, DType dtype) {
  LMHEAD_RETURN_IF_ERROR(validate_vector(name, v, size));
  if (v.dtype != dtype) return mistyped(name, to_string(dtype), to_string(v.dtype));
  return {};
}

Status validate_output(const char* name, const Vector& v, std::int64_t size, DType dtype) {
  if (v.absent()) return {};
  LMHEAD_RETURN_IF_ERROR(validate_vector(name, {v.data, v.size, v.stride, v.dtype}, size, dtype));
  if (v.stride == 0 && size > 1) return invalid(name, "a stride other than 0", "0");
  return {};
}

Result<ResolvedProblem> validate(const Problem& p, const Execution& execution) {
  LMHEAD_RETURN_IF_ERROR(validate_matrix("hidden", p.hidden));
  LMHEAD_RETURN_IF_ERROR(validate_matrix("weight", p.weight));
  if (!is_floating(p.hidden.dtype))
    return mistyped("hidden", "float32, bfloat16, float16 or float64", to_string(p.hidden.dtype));
  if (!is_floating(p.weight.dtype))
    return mistyped("weight", "float32, bfloat16, float16 or float64", to_string(p.weight.dtype));
  const bool fp64 = p.hidden.dtype == DType::kFloat64;
  if (fp64 != (p.weight.dtype == DType::kFloat64))
    return mistyped(
        "weight",
        std::string("the precision of hidden (") + to_string(p.hidden.dtype) + "): float64 mixes with nothing else",
        to_string(p.weight.dtype));
  if (p.hidden.cols < 1) return invalid("hidden", "[N, H] with H >= 1", shape(p.hidden));
  if (p.weight.cols != p.hidden.cols) {
    const bool logits = p.hidden.cols == p.weight.rows;
    return invalid("weight", "[V, " + str(p.hidden.cols) + "] to match hidden " + shape(p.hidden),
                   shape(p.weight) +
                       (logits ? " (hidden looks like logits [N, V]: pass the hidden states before the LM head)" : ""));
  }

  ResolvedProblem r{};
  r.given = p;
  r.n = p.hidden.rows;
  r.h = p.hidden.cols;
  r.v_local = p.weight.rows;
  r.vocab_size = p.vocab_size.value_or(r.v_local);
  if (!p.vocab_size && p.vocab_start != 0)
    return invalid("vocab_size", "the global vocabulary, required with vocab_start",
                   "none with vocab_start " + str(p.vocab_start));
  if (!p.vocab_size && r.v_local < 1)
    return invalid("weight", "[V, H] with V >= 1 (an empty shard needs vocab_size)", shape(p.weight));
  if (r.vocab_size < 1) return invalid("vocab_size", ">= 1", str(r.vocab_size));
  if (p.vocab_start < 0 || p.vocab_start > r.vocab_size - r.v_local)
    return invalid("vocab_start",
                   "a shard [vocab_start, vocab_start + " + str(r.v_local) + ") inside [0, " + str(r.vocab_size) + ")",
                   str(p.vocab_start));
  r.valid_vocab = p.valid_vocab.value_or(r.vocab_size);
  if (r.valid_vocab < 1 || r.valid_vocab > r.vocab_size)
    return invalid("valid_vocab", "in [1, " + str(r.vocab_size) + "]", str(r.valid_vocab));
  r.v_valid = std::max<std::int64_t>(0, std::min(r.v_local, r.valid_vocab - p.vocab_start));

  if (!p.bias.absent()) {
    LMHEAD_RETURN_IF_ERROR(validate_vector("bias", p.bias, r.v_local));
    if (!is_floating(p.bias.dtype) || (p.bias.dtype == DType::kFloat64 && !fp64))
      return mistyped("bias", fp64 ? "float64" : "float32, bfloat16 or float16", to_string(p.bias.dtype));
  }
  LMHEAD_RETURN_IF_ERROR(validate_vector("targets", p.targets, r.n));
  if (p.targets.dtype != DType::kInt32 && p.targets.dtype != DType::kInt64)
    return mistyped("targets", "int32 or int64", to_string(p.targets.dtype));
  if (!p.active.absent()) {
    if (is_floating(p.active.dtype)) return mistyped("active", "bool or an integer type", to_string(p.active.dtype));
    LMHEAD_RETURN_IF_ERROR(validate_vector("active", p.active, r.n));
  }
  if (!p.row_temperature.absent()) {
    LMHEAD_RETURN_IF_ERROR(validate_vector("temperature", p.row_temperature, r.n));
    if (p.row_temperature.dtype != DType::kFloat32 && !(fp64 && p.row_temperature.dtype == DType::kFloat64))
      return mistyped("temperature", fp64 ? "float32 or float64" : "float32", to_string(p.row_temperature.dtype));
  }

  LMHEAD_RETURN_IF_ERROR(check_positive("temperature", p.temperature, fp64));
  if (!std::isfinite(p.logit_scale)) return invalid("logit_scale", "a finite number", str(p.logit_scale));
  if (!fp64 && std::abs(p.logit_scale) > std::numeric_limits<float>::max())
    return invalid("logit_scale", "a number in the range of float32", str(p.logit_scale));
  if (p.softcap) LMHEAD_RETURN_IF_ERROR(check_positive("softcap", *p.softcap, fp64));
  if (p.inference_only && p.entropy == EntropyMode::kGrad)
    return invalid("entropy_requires_grad", "false together with inference_only", "true");

  r.compute = p.compute_dtype.value_or(p.weight.dtype);
  if (!is_floating(r.compute) || (r.compute == DType::kFloat64) != fp64)
    return mistyped("compute_dtype", fp64 ? "float64" : "float32, bfloat16 or float16", to_string(r.compute));
  r.result = fp64 ? DType::kFloat64 : DType::kFloat32;
  if (execution.threads < 0) return invalid("threads", ">= 0", str(static_cast<std::int64_t>(execution.threads)));
  r.check = execution.check.value_or(execution.device == Device::kCpu);
  return r;
}

Status bad_target_id(const ResolvedProblem& r, std::int64_t id, std::int64_t row) {
  return invalid("targets", "ids in [0, " + str(r.valid_vocab) + ") or ignore_index " + str(r.given.ignore_index),
                 str(id) + " at row " + str(row));
}

Status bad_temperature(double value, std::int64_t row) {
  return invalid("temperature", "finite numbers > 0", str(value) + " at row " + str(row));
}

Status check_host_values(const ResolvedProblem& r) {
  const Problem& p = r.given;
  for (std::int64_t i = 0; i < r.n; ++i) {
    if (!p.active.absent() && load_int(p.active, i) <= 0) continue;
    const std::int64_t id = load_int(p.targets, i);
    if (id == p.ignore_index) continue;
    if (p.out_of_vocab == OutOfVocab::kError && (id < 0 || id >= r.valid_vocab)) return bad_target_id(r, id, i);
    if (!p.row_temperature.absent()) {
      const double t = load_float(p.row_temperature, i);
      if (!(t > 0) || !std::isfinite(t)) return bad_temperature(t, i);
      const bool fp64 = r.result == DType::kFloat64;
      if (!has_reciprocal(t, fp64))
        return invalid("temperature", std::string("numbers ") + reciprocal_range(fp64), str(t) + " at row " + str(i));
    }
  }
  return {};
}

Status validate_state(const ResolvedProblem& r, const Matrix& state) {
  LMHEAD_RETURN_IF_ERROR(validate_matrix("state", as_const(state)));
  if (state.rows != r.n || state.cols != kStateWidth)
    return invalid("state", "[" + str(r.n) + ", 4]", shape(as_const(state)));
  if (state.dtype != r.result) return mistyped("state", to_string(r.result), to_string(state.dtype));
  if (state.rows > 1 && state.row_stride != kStateWidth)
    return invalid("state", "contiguous rows (row stride 4)", str(state.row_stride));
  return {};
}

Status validate_combine(const ResolvedProblem& r, const ConstMatrix& states, const ForwardOutputs& outputs) {
  LMHEAD_RETURN_IF_ERROR(validate_matrix("states", states));
  if (states.cols != kStateWidth || (r.n > 0 && (states.rows == 0 || states.rows % r.n != 0)))
    return invalid("states", "[S * " + str(r.n) + ", 4] with S >= 1", shape(states));
  if (states.dtype != r.result) return mistyped("states", to_string(r.result), to_string(states.dtype));
  if (states.rows > 1 && states.row_stride != kStateWidth)
    return invalid("states", "contiguous rows (row stride 4)", str(states.row_stride));
  return validate_outputs(r, outputs);
}

Status validate_outputs(const ResolvedProblem& r, const ForwardOutputs& outputs) {
  LMHEAD_RETURN_IF_ERROR(validate_output("logprob", outputs.logprob, r.n, r.result));
  LMHEAD_RETURN_IF_ERROR(validate_output("entropy", outputs.entropy, r.n, r.result));
  LMHEAD_RETURN_IF_ERROR(validate_output("lse", outputs.lse, r.n, r.result));
  if (r.given.entropy == EntropyMode::kOff && !outputs.entropy.absent())
    return invalid("entropy", "no output under EntropyMode::kOff", "one");
  return {};
}

namespace {

Status check_upstream(const char* name, const ConstVector& v, const ResolvedProblem& r) {
  if (v.absent()) return {};
  return validate_vector(name, v, r.n, r.result);
}

Status check_gradient(const char* name, const Matrix& m, std::int64_t rows, std::int64_t cols, DType own,
                      bool accumulate, DType result) {
  if (m.absent()) {
    if (accumulate) return invalid(name, "a buffer to accumulate into", "none");
    return {};
  }
  LMHEAD_RETURN_IF_ERROR(validate_matrix(name, as_const(m)));
  if (m.rows != rows || m.cols != cols)
    return invalid(name, "[" + str(rows) + ", " + str(cols) + "]", shape(as_const(m)));
  const DType wanted = accumulate ? result : own;
  if (m.dtype != wanted && m.dtype != result)
    return mistyped(name, std::string(to_string(wanted)) + (accumulate ? " to accumulate in" : ""), to_string(m.dtype));
  return {};
}

}  // namespace

Status validate_backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out) {
  const Problem& p = r.given;
  if (p.inference_only) return invalid("inference_only", "false for a backward", "true");
  LMHEAD_RETURN_IF_ERROR(validate_vector("lse", in.lse, r.n, r.result));
  LMHEAD_RETURN_IF_ERROR(check_upstream("dlogprob", in.dlogprob, r));
  LMHEAD_RETURN_IF_ERROR(check_upstream("dentropy", in.dentropy, r));
  LMHEAD_RETURN_IF_ERROR(check_upstream("entropy", in.entropy, r));
  if (!in.selected.absent()) {
    const ConstMatrix& ids = in.selected.ids;
    LMHEAD_RETURN_IF_ERROR(validate_ids("selected ids", ids, r.n, true));
    LMHEAD_RETURN_IF_ERROR(validate_matrix("selected logits", in.selected.logits, r.n, ids.cols, r.result));
    LMHEAD_RETURN_IF_ERROR(validate_matrix("selected upstream", in.selected.upstream, r.n, ids.cols, r.result));
    if (in.dlogprob.absent()) return invalid("dlogprob", "each row's total of the selected upstream gradients", "none");
  }
  if (!in.dentropy.absent()) {
    if (p.entropy != EntropyMode::kGrad) return invalid("dentropy", "none unless entropy_requires_grad", "a gradient");
    if (in.entropy.absent() && r.n > 0)
      return invalid("entropy", "the forward's entropy together with dentropy", "none");
  }
  LMHEAD_RETURN_IF_ERROR(
      check_gradient("hidden gradient", out.hidden, r.n, r.h, p.hidden.dtype, out.accumulate_hidden, r.result));
  LMHEAD_RETURN_IF_ERROR(
      check_gradient("weight gradient", out.weight, r.v_local, r.h, p.weight.dtype, out.accumulate_weight, r.result));
  if (!out.bias.absent()) {
    if (p.bias.absent() && r.v_local > 0) return invalid("bias gradient", "none without a bias", "one");
    LMHEAD_RETURN_IF_ERROR(
        validate_vector("bias gradient", {out.bias.data, out.bias.size, out.bias.stride, out.bias.dtype}, r.v_local));
    if (out.bias.dtype != r.result && (out.accumulate_bias || out.bias.dtype != p.bias.dtype))
      return mistyped("bias gradient", to_string(out.accumulate_bias ? r.result : p.bias.dtype),
                      to_string(out.bias.dtype));
    if (out.bias.stride == 0 && r.v_local > 1) return invalid("bias gradient", "a stride other than 0", "0");
  } else if (out.accumulate_bias && r.v_local > 0) {
    return invalid("bias gradient", "a buffer to accumulate into", "none");
  }
  return {};
}

Status validate_cache(const Execution& e) {
  if (e.cache != nullptr) return {};
  return invalid("cache", str(static_cast<std::int64_t>(e.cache_bytes)) + " bytes", "a null pointer");
}

Status validate_workspace_address(const Execution& e) {
  constexpr std::size_t kAlignment = 8;
  const std::size_t over = reinterpret_cast<std::uintptr_t>(e.workspace) % kAlignment;
  if (e.device != Device::kCpu || over == 0) return {};  // CUDA backends look at theirs with all device pointers
  return invalid("workspace", "an 8-byte aligned address", "remainder " + str(static_cast<std::int64_t>(over)));
}

Status validate_workspace(const Execution& e, const WorkspaceSize& needed, bool may_allocate) {
  if (e.workspace == nullptr) {
    if (may_allocate || needed.bytes == 0) return {};
    return invalid("workspace", str(static_cast<std::int64_t>(needed.bytes)) + " bytes (ask workspace_size)", "none");
  }
  LMHEAD_RETURN_IF_ERROR(validate_workspace_address(e));
  if (e.workspace_bytes < needed.bytes)
    return invalid("workspace",
                   "at least " + str(static_cast<std::int64_t>(needed.bytes)) + " bytes (ask workspace_size)",
                   str(static_cast<std::int64_t>(e.workspace_bytes)) + " bytes");
  return {};
}

}  // namespace lmhead
