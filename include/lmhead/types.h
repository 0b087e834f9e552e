// Views over memory the caller owns, and the options of a language-model head.
//
// Nothing here owns or copies data. Symbols, always in this order: N tokens (rows), H hidden width,
// V vocabulary. Strides and sizes count elements, never bytes, and are 64-bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace lmhead {

/// Element types of every view. Integers and bool are for ids and masks only.
enum class DType : std::uint8_t {
  kFloat32,   ///< IEEE binary32
  kBFloat16,  ///< bfloat16
  kFloat16,   ///< IEEE binary16
  kFloat64,   ///< IEEE binary64; reference backend only
  kInt32,
  kInt64,
  kInt16,
  kInt8,
  kUInt8,
  kBool,  ///< one byte, 0 or 1
};

/// Bytes of one element.
std::size_t size_of(DType dtype);
/// "float32", "bfloat16", ...
const char* to_string(DType dtype);
/// True for the four floating-point types.
bool is_floating(DType dtype);

/// Read-only vector. `stride` may be 0 (one value for every element) or negative.
struct ConstVector {
  const void* data = nullptr;
  std::int64_t size = 0;
  std::int64_t stride = 1;
  DType dtype = DType::kFloat32;

  /// An absent vector is one without data and size.
  bool absent() const { return data == nullptr && size == 0; }
};

/// Writable vector; stride as above, but not 0 for more than one element.
struct Vector {
  void* data = nullptr;
  std::int64_t size = 0;
  std::int64_t stride = 1;
  DType dtype = DType::kFloat32;

  bool absent() const { return data == nullptr && size == 0; }
};

/// Read-only row-major matrix: element (i, j) is at data[i * row_stride + j]; columns are contiguous.
struct ConstMatrix {
  const void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  DType dtype = DType::kFloat32;
};

/// Writable row-major matrix.
struct Matrix {
  void* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  DType dtype = DType::kFloat32;

  /// A gradient of no rows ([0, H]) is present: it still has columns.
  bool absent() const { return data == nullptr && rows == 0 && cols == 0; }
};

/// Whether entropy is computed and differentiated.
enum class EntropyMode : std::uint8_t {
  kOff,     ///< log-prob only
  kMetric,  ///< entropy as a number; log-prob and every gradient have the bits of kOff
  kGrad,    ///< entropy is differentiable in the same backward
};

/// What a target id outside [0, valid_vocab) means (ignore_index is handled before).
enum class OutOfVocab : std::uint8_t {
  kError,  ///< an error in checked mode; NaN in that row when unchecked
  kZero,   ///< logprob 0, entropy still true, and the softmax part of the gradient stays
};

/// Where the pointers of a call live.
enum class Device : std::uint8_t { kCpu, kCuda };

/// One scoring problem: inputs and options shared by forward and backward.
///
///   r_ij = logit_scale * (<hidden_i, weight_j> + bias_j)
///   z_ij = softcap * tanh(r_ij / softcap) / T_i        (z_ij = r_ij / T_i without softcap)
///
/// Everything is read in place and never written. Logits are fp32 (fp64 for fp64 inputs) from the
/// accumulator to the softmax.
struct Problem {
  /// [N, H] fp32 | bf16 | fp16 (fp64: reference only). N >= 0, H >= 1.
  ConstMatrix hidden;
  /// [V_local, H], dtype as hidden or another of the three; V_local >= 0 with shards, else >= 1.
  /// Hidden is brought to the weight's type unless compute_dtype says otherwise.
  ConstMatrix weight;
  /// [V_local] fp32 | bf16 | fp16 (fp64), optional.
  ConstVector bias;
  /// [N] int32 | int64 global ids in [0, valid_vocab), or ignore_index (an inactive row).
  ConstVector targets;
  /// [N] bool or integer, optional; row i is active where active[i] > 0. Inactive rows give logprob,
  /// entropy and hidden gradient 0 and are not computed.
  ConstVector active;
  /// [N] fp32 (fp64), optional, each > 0; replaces `temperature`.
  ConstVector row_temperature;

  /// This shard holds the global columns [vocab_start, vocab_start + V_local).
  std::int64_t vocab_start = 0;
  /// Global vocabulary. Default: V_local (an unsharded head).
  std::optional<std::int64_t> vocab_size;
  /// Global columns >= valid_vocab are padding: no part in the softmax, gradient 0. Default: vocab_size.
  std::optional<std::int64_t> valid_vocab;

  double temperature = 1.0;       ///< > 0, applied to finished logits
  double logit_scale = 1.0;       ///< finite
  std::optional<double> softcap;  ///< > 0 when present
  std::int64_t ignore_index = -100;
  OutOfVocab out_of_vocab = OutOfVocab::kError;
  EntropyMode entropy = EntropyMode::kOff;
  /// The caller will not run a backward; an error together with EntropyMode::kGrad.
  bool inference_only = false;
  /// Type in which hidden and weight are multiplied (accumulation stays fp32). Default: the weight's.
  /// Autocast passes bf16 or fp16 here with an fp32 weight, which is then rounded tile by tile.
  std::optional<DType> compute_dtype;
};

/// How a call runs.
struct Execution {
  /// "auto" or a name from backends(): "reference", "cpu", "sm90", "cuda_portable".
  /// An explicit backend that cannot run the problem is an error; nothing falls back silently.
  const char* backend = "auto";
  /// "auto": what lmhead::tune() chose for this shape, else the backend's analytic default; or a name from
  /// configurations() (lmhead/tuning.h). No result bit depends on it.
  const char* configuration = "auto";
  Device device = Device::kCpu;
  /// CPU threads; 0: all of this process's. No result bit depends on it.
  int threads = 0;
  /// Scratch memory on `device`, 256-byte aligned on the GPU and 8-byte on the CPU, of at least the size that the
  /// matching workspace query returned. On the CPU nullptr lets the call allocate it and free it on return.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;
  /// Budget for the workspace query: 0 means 64 MiB on the CPU, 512 MiB on the GPU.
  std::size_t workspace_budget = 0;
  /// Memory on `device` (256-byte aligned on the GPU) that forward or forward_partial fills, so that backward need not
  /// repeat the projection of the rows that fit, and that backward of the same problem and backend reads, any number
  /// of times; cache_size() says how many bytes. What it holds is the backend's own; it must stay as the forward left
  /// it until the last backward. A pass into a cache of cache_bytes 0 is the plain call. combine() ignores it.
  void* cache = nullptr;
  std::size_t cache_bytes = 0;
  /// cudaStream_t for Device::kCuda. No call synchronises it unless `check` is on.
  void* stream = nullptr;
  /// Read and check the values of ids and temperatures. Default: true on the CPU, false on the GPU,
  /// where an unchecked bad value gives NaN in its own row.
  std::optional<bool> check;
  /// GPU, fp32 inputs: allow TF32 products. Off: IEEE fp32.
  bool allow_tf32 = false;
};

/// Answer of a workspace query.
struct WorkspaceSize {
  std::size_t bytes = 0;        ///< scratch memory the call needs, within the budget plus `accumulator`
  std::size_t accumulator = 0;  ///< part of `bytes`: fp32 sums of a 16-bit gradient, or of rows 2^31 bytes apart
};

/// Per-token results of a forward call, fp32 (fp64 for fp64 inputs), in nats. Absent ones are not written.
struct ForwardOutputs {
  Vector logprob;  ///< [N] log p(target); 0 for inactive rows
  Vector entropy;  ///< [N] >= 0; wanted unless EntropyMode::kOff
  Vector lse;      ///< [N] log sum_j exp z_ij; what backward needs; 0 for inactive rows
};

/// Upstream gradients of log-probs at selected ids (lmhead/selected.h).
struct SelectedGradient {
  ConstMatrix ids;       ///< [N, K] int32 | int64; -1 is padding
  ConstMatrix logits;    ///< [N, K] as selected_logits wrote them for this shard, or their minimum over shards
  ConstMatrix upstream;  ///< [N, K] s_ik = dL/dselected_ik, dtype as lse

  bool absent() const { return ids.data == nullptr && ids.rows == 0; }
};

/// What backward needs beside the Problem.
struct BackwardInputs {
  ConstVector lse;       ///< [N] as the forward wrote it
  ConstVector entropy;   ///< [N] as the forward wrote it; needed with dentropy only
  ConstVector dlogprob;  ///< [N] upstream gradient of logprob, any stride; absent: zero
  ConstVector dentropy;  ///< [N] upstream gradient of entropy (kGrad only); absent: zero
  /// Optional. When given, the one-hot parts of dz come from here alone, so the target stands among the ids,
  /// and dlogprob holds each row's total A_i = sum_k s_ik:
  ///   dz_ij = sum_{k: id_ik = j} s_ik - A_i p_ij - g_i p_ij (log p_ij + entropy_i)
  SelectedGradient selected{};
};

/// Gradients to write. An absent one is not computed, nor is its GEMM.
struct BackwardOutputs {
  /// [N, H] in hidden's dtype (or fp32 with accumulate): this shard's part; the caller sums over shards.
  Matrix hidden;
  /// [V_local, H] in the weight's dtype, or fp32 with accumulate (Megatron's main_grad).
  Matrix weight;
  /// [V_local] in the bias's dtype or fp32.
  Vector bias;
  /// Add to the given fp32 buffer instead of overwriting it.
  bool accumulate_hidden = false;
  bool accumulate_weight = false;
  bool accumulate_bias = false;
};

}  // namespace lmhead
