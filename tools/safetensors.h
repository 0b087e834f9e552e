// Reading .safetensors files in place (memory-mapped) and writing them.
//
// Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
// then the data, which the tensors must cover without a gap or an overlap.
// Every fault in a file throws CommandError (bad input) with one line that names the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lmhead/types.h"

namespace lmhead::tools {

/// One tensor of an open file. `data` is valid while the file is.
struct Tensor {
  std::string name;
  std::string dtype;                ///< as the file spells it: "F32", "BF16", "I64", ...
  std::vector<std::int64_t> shape;  ///< each >= 0; empty for a scalar
  const std::byte* data = nullptr;  ///< not aligned unless aligned() made it so
  std::size_t bytes = 0;

  std::int64_t elements() const;
  std::string shape_text() const;  ///< "[512, 576]"
};

class SafetensorsFile {
 public:
  /// Maps the file and checks all of its header.
  static SafetensorsFile open(const std::string& path);

  const std::string& path() const { return path_; }
  const std::map<std::string, Tensor>& tensors() const { return tensors_; }
  /// The tensor, or nullptr.
  const Tensor* find(const std::string& name) const;

  /// Data of a tensor aligned to its elements: in place, or copied once if the file misaligns it.
  const void* aligned(const Tensor& tensor);

 private:
  std::string path_;
  std::shared_ptr<const std::byte> mapping_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::unique_ptr<std::byte[]>> copies_;
};

/// Library dtype of a file's dtype name; throws bad input "PATH: NAME: expected WANTED, got DTYPE"
/// unless `wanted` holds it. `wanted` is a list such as {"F32", "BF16"}.
DType require_dtype(const SafetensorsFile& file, const Tensor& tensor, const std::vector<std::string>& wanted);

/// One fp32 vector to write.
struct OutputVector {
  std::string name;
  const std::vector<float>* values;
};
/// The bytes of a .safetensors file, split into header (with its length) and data in order.
std::string safetensors_header(const std::vector<OutputVector>& vectors,
                               const std::map<std::string, std::string>& metadata);

}  // namespace lmhead::tools
