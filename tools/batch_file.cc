#include "batch_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "commands.h"

namespace lmhead::tools {
namespace {

const Tensor& require_tensor(const SafetensorsFile& file, const std::string& name) {
  if (const Tensor* tensor = file.find(name)) return *tensor;
  throw bad_input(fmt::format("{}: no tensor {}", file.path(), name));
}

template <class T>
void widen(const void* data, std::vector<std::int64_t>& out) {
  const T* values = static_cast<const T*>(data);
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::int64_t>(values[i]);  // NOLINT(bugprone-signed-char-misuse): I8 is a number
}

/// A vector of integers of any of `wanted` dtypes, widened to 64 bits.
std::vector<std::int64_t> read_integers(SafetensorsFile& file, const Tensor& tensor, std::int64_t size,
                                        const std::vector<std::string>& wanted) {
  const DType dtype = require_dtype(file, tensor, wanted);
  if (tensor.shape.size() != 1 || (size >= 0 && tensor.shape[0] != size))
    throw bad_input(fmt::format("{}: {}: expected [{}], got {}", file.path(), tensor.name,
                                size >= 0 ? std::to_string(size) : "S + 1", tensor.shape_text()));
  std::vector<std::int64_t> out(static_cast<std::size_t>(tensor.shape[0]));
  const void* data = file.aligned(tensor);
  switch (dtype) {
    case DType::kInt64: widen<std::int64_t>(data, out); break;
    case DType::kInt32: widen<std::int32_t>(data, out); break;
    case DType::kInt16: widen<std::int16_t>(data, out); break;
    case DType::kInt8: widen<std::int8_t>(data, out); break;
    default: widen<std::uint8_t>(data, out); break;  // U8, BOOL
  }
  return out;
}

const std::vector<std::string> kIdTypes = {"I64", "I32"};
const std::vector<std::string> kMaskTypes = {"BOOL", "I64", "I32", "I16", "I8", "U8"};

void check_cu_seqlens(const Batch& batch) {
  const auto& cu = batch.cu_seqlens;
  const auto broken = [&](const std::string& what) {
    return bad_input(fmt::format("{}: cu_seqlens: {}", batch.file.path(), what));
  };
  if (cu.empty() || cu.front() != 0)
    throw broken(fmt::format("expected 0 first, got {}", cu.empty() ? "nothing" : std::to_string(cu.front())));
  for (std::size_t s = 1; s < cu.size(); ++s)
    if (cu[s] < cu[s - 1])
      throw broken(fmt::format("expected values that do not decrease, got {} after {} at {}", cu[s], cu[s - 1], s));
  if (cu.back() != batch.rows())
    throw broken(fmt::format("expected {} (the rows of hidden) last, got {}", batch.rows(), cu.back()));
}

/// Bits of the exponent field, all set in an infinity or a NaN, and index of the first such element.
template <class Bits>
std::int64_t first_non_finite(const Bits* values, std::int64_t count, Bits exponent) {
  constexpr std::int64_t kBlock = 4096;  // one branch a block lets the compiler vectorise the scan
  for (std::int64_t begin = 0; begin < count; begin += kBlock) {
    const std::int64_t end = std::min(count, begin + kBlock);
    Bits bad = 0;
    for (std::int64_t i = begin; i < end; ++i) bad = static_cast<Bits>(bad | ((values[i] & exponent) == exponent));
    if (bad == 0) continue;
    for (std::int64_t i = begin; i < end; ++i)
      if ((values[i] & exponent) == exponent) return i;
  }
  return -1;
}

}  // namespace

Batch read_batch(const std::string& path) {
  Batch batch;
  batch.file = SafetensorsFile::open(path);
  const Tensor& hidden = require_tensor(batch.file, "hidden");
  const DType dtype = require_dtype(batch.file, hidden, {"F32", "BF16", "F16"});
  if (hidden.shape.size() != 2 || hidden.shape[1] < 1)
    throw bad_input(fmt::format("{}: hidden: expected [N, H] with H >= 1, got {}", path, hidden.shape_text()));
  batch.hidden = {batch.file.aligned(hidden), hidden.shape[0], hidden.shape[1], hidden.shape[1], dtype};
  const std::int64_t n = batch.rows();

  const Tensor* targets = batch.file.find("targets");
  const Tensor* input_ids = batch.file.find("input_ids");
  if ((targets == nullptr) == (input_ids == nullptr))
    throw bad_input(
        fmt::format("{}: expected either targets or input_ids, got {}", path, targets ? "both" : "neither"));
  batch.shifted = input_ids != nullptr;
  batch.ids = read_integers(batch.file, batch.shifted ? *input_ids : *targets, n, kIdTypes);

  batch.cu_seqlens = {0, n};
  if (const Tensor* cu_seqlens = batch.file.find("cu_seqlens"))
    batch.cu_seqlens = read_integers(batch.file, *cu_seqlens, -1, kIdTypes);
  check_cu_seqlens(batch);

  batch.targets = batch.ids;
  if (batch.shifted) {
    for (std::size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
      const auto begin = batch.ids.begin() + batch.cu_seqlens[s], end = batch.ids.begin() + batch.cu_seqlens[s + 1];
      if (begin == end) continue;
      auto out = std::copy(begin + 1, end, batch.targets.begin() + batch.cu_seqlens[s]);
      *out = kIgnoreIndex;
    }
    // The id -100 means nothing in input_ids, so it must not slip through as an ignored target.
    for (std::size_t i = 0; i < batch.ids.size(); ++i)
      if (batch.ids[i] < 0)
        throw bad_input(fmt::format("{}: input_ids: expected ids >= 0, got {} at row {}", path, batch.ids[i], i));
  }
  if (const Tensor* loss_mask = batch.file.find("loss_mask")) {
    const std::vector<std::int64_t> mask = read_integers(batch.file, *loss_mask, n, kMaskTypes);
    for (std::size_t i = 0; i < mask.size(); ++i)
      if (mask[i] <= 0) batch.targets[i] = kIgnoreIndex;
  }
  for (const auto& [name, tensor] : batch.file.tensors())
    if (name != "hidden" && name != "targets" && name != "input_ids" && name != "cu_seqlens" && name != "loss_mask")
      batch.unused.push_back(name);
  return batch;
}

void check_targets(const Batch& batch, std::int64_t vocab) {
  for (std::size_t i = 0; i < batch.targets.size(); ++i) {
    const std::int64_t id = batch.targets[i];
    if (id == kIgnoreIndex || (id >= 0 && id < vocab)) continue;
    throw bad_input(fmt::format("{}: {}: expected ids in [0, {}){}, got {} at row {}", batch.file.path(),
                                batch.shifted ? "input_ids" : "targets", vocab, batch.shifted ? "" : " or -100", id,
                                batch.shifted ? i + 1 : i));
  }
}

void check_finite(const std::string& name, const ConstMatrix& matrix) {
  const std::int64_t count = matrix.rows * matrix.cols;
  std::int64_t at = -1;
  bool nan = false;
  if (matrix.dtype == DType::kFloat32) {
    const auto* values = static_cast<const std::uint32_t*>(matrix.data);
    at = first_non_finite<std::uint32_t>(values, count, 0x7f80'0000u);
    nan = at >= 0 && (values[at] & 0x007f'ffffu) != 0;
  } else {
    const bool bf16 = matrix.dtype == DType::kBFloat16;
    const std::uint16_t exponent = bf16 ? 0x7f80 : 0x7c00, mantissa = bf16 ? 0x007f : 0x03ff;
    const auto* values = static_cast<const std::uint16_t*>(matrix.data);
    at = first_non_finite<std::uint16_t>(values, count, exponent);
    nan = at >= 0 && (values[at] & mantissa) != 0;
  }
  if (at >= 0)
    throw bad_input(fmt::format("{}: expected finite values, got {} at [{}, {}]", name, nan ? "nan" : "inf",
                                at / matrix.cols, at % matrix.cols));
}

}  // namespace lmhead::tools
