#include "safetensors.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "commands.h"

namespace lmhead::tools {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian and read in place");

using nlohmann::json;

// Limit of the format's reference implementation; a longer header is a broken or hostile file.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::size_t kLengthBytes = 8;

/// Bytes of one element of each dtype of the format that fills whole bytes; 0 for an unknown one.
std::size_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, std::size_t> kBytes = {
      {"F64", 8}, {"I64", 8}, {"U64", 8},  {"F32", 4}, {"I32", 4}, {"U32", 4},     {"F16", 2},     {"BF16", 2},
      {"I16", 2}, {"U16", 2}, {"BOOL", 1}, {"I8", 1},  {"U8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"C64", 8}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;
}

std::shared_ptr<const std::byte> map_file(const std::string& path, std::size_t& size) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw bad_input(fmt::format("{}: {}", path, std::strerror(errno)));
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(fd);
    throw bad_input(path + ": expected a regular file");
  }
  size = static_cast<std::size_t>(status.st_size);
  if (size < kLengthBytes) {
    ::close(fd);
    throw bad_input(fmt::format("{}: not a safetensors file: expected at least 8 bytes, got {}", path, size));
  }
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  const int error = errno;
  ::close(fd);
  if (address == MAP_FAILED) throw failed(fmt::format("{}: cannot map it: {}", path, std::strerror(error)));
  return {static_cast<const std::byte*>(address),
          [size](const std::byte* p) { ::munmap(const_cast<std::byte*>(p), size); }};
}

/// Parses JSON and refuses duplicate keys, of which nlohmann would keep the last.
json parse_header(const std::string& path, const char* begin, const char* end) {
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      duplicate = parsed.get<std::string>();
    return true;
  };
  json header;
  try {
    header = json::parse(begin, end, watch);
  } catch (const json::exception&) {
    throw bad_input(path + ": not a safetensors file: its header is not JSON");
  }
  if (!duplicate.empty()) throw bad_input(fmt::format("{}: header names \"{}\" twice", path, duplicate));
  if (!header.is_object()) throw bad_input(path + ": header: expected a JSON object");
  return header;
}

/// A JSON array of integers in [0, 2^63), or false.
bool read_sizes(const json& entry, const char* key, std::vector<std::int64_t>& out) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array()) return false;
  for (const json& value : *found) {
    if (!value.is_number_unsigned() ||
        value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()))
      return false;
    out.push_back(static_cast<std::int64_t>(value.get<std::uint64_t>()));
  }
  return true;
}

Tensor read_entry(const std::string& path, const std::string& name, const json& entry, const std::byte* data,
                  std::size_t data_bytes) {
  const auto broken = [&](const std::string& what) { return bad_input(fmt::format("{}: {}: {}", path, name, what)); };
  Tensor tensor;
  tensor.name = name;
  std::vector<std::int64_t> offsets;
  if (!entry.is_object() || !entry.contains("dtype") || !entry["dtype"].is_string() ||
      !read_sizes(entry, "shape", tensor.shape) || !read_sizes(entry, "data_offsets", offsets) || offsets.size() != 2)
    throw broken("header entry: expected dtype, shape and data_offsets [begin, end]");
  tensor.dtype = entry["dtype"].get<std::string>();
  const auto begin = static_cast<std::size_t>(offsets[0]), end = static_cast<std::size_t>(offsets[1]);
  if (begin > end) throw broken(fmt::format("data_offsets: expected begin <= end, got [{}, {}]", begin, end));
  if (end > data_bytes)
    throw broken(fmt::format("data_offsets: expected an end <= {} (the file's data), got {}: the file is truncated",
                             data_bytes, end));
  tensor.data = data + begin;
  tensor.bytes = end - begin;
  if (const std::size_t width = element_bytes(tensor.dtype); width > 0) {
    unsigned __int128 wanted = width;
    for (const std::int64_t size : tensor.shape) {
      wanted *= static_cast<unsigned __int128>(size);
      if (wanted > std::numeric_limits<std::uint64_t>::max()) throw broken("shape: expected a size below 2^64 bytes");
    }
    if (wanted != tensor.bytes)
      throw broken(fmt::format("data_offsets: expected {} bytes for {} {}, got {}", static_cast<std::uint64_t>(wanted),
                               tensor.dtype, tensor.shape_text(), tensor.bytes));
  }
  return tensor;
}

/// The data must be covered exactly once.
void check_coverage(const std::string& path, const std::map<std::string, Tensor>& tensors, const std::byte* data,
                    std::size_t data_bytes) {
  std::vector<const Tensor*> order;
  order.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const Tensor* a, const Tensor* b) {
    return a->data != b->data ? a->data < b->data : a->bytes < b->bytes;
  });
  const std::byte* covered = data;
  for (const Tensor* tensor : order) {
    if (tensor->data != covered)
      throw bad_input(fmt::format("{}: {}: data_offsets: expected a begin at {}, where the tensor before ends, got {}",
                                  path, tensor->name, covered - data, tensor->data - data));
    covered += tensor->bytes;
  }
  if (covered != data + data_bytes)
    throw bad_input(
        fmt::format("{}: expected {} bytes of data as its header says, got {}", path, covered - data, data_bytes));
}

}  // namespace

std::int64_t Tensor::elements() const {
  std::int64_t count = 1;
  for (const std::int64_t size : shape) count *= size;
  return count;
}

std::string Tensor::shape_text() const { return fmt::format("[{}]", fmt::join(shape, ", ")); }

SafetensorsFile SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  file.path_ = path;
  std::size_t size = 0;
  file.mapping_ = map_file(path, size);
  const std::byte* bytes = file.mapping_.get();

  std::uint64_t length = 0;
  std::memcpy(&length, bytes, sizeof length);
  if (length > kMaxHeaderBytes)
    throw bad_input(fmt::format("{}: not a safetensors file: expected a header of at most {} bytes, got {}", path,
                                kMaxHeaderBytes, length));
  if (length > size - kLengthBytes)
    throw bad_input(
        fmt::format("{}: truncated: expected a header of {} bytes, got {}", path, length, size - kLengthBytes));
  const char* text = reinterpret_cast<const char*>(bytes + kLengthBytes);
  const json header = parse_header(path, text, text + length);

  const std::byte* data = bytes + kLengthBytes + length;
  const std::size_t data_bytes = size - kLengthBytes - length;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    file.tensors_.emplace(name, read_entry(path, name, entry, data, data_bytes));
  }
  check_coverage(path, file.tensors_, data, data_bytes);
  return file;
}

const Tensor* SafetensorsFile::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const void* SafetensorsFile::aligned(const Tensor& tensor) {
  const std::size_t width = std::max<std::size_t>(1, element_bytes(tensor.dtype));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % width == 0) return tensor.data;
  copies_.push_back(std::make_unique<std::byte[]>(tensor.bytes));
  std::memcpy(copies_.back().get(), tensor.data, tensor.bytes);
  return copies_.back().get();
}

DType require_dtype(const SafetensorsFile& file, const Tensor& tensor, const std::vector<std::string>& wanted) {
  static const std::map<std::string, DType> kTypes = {
      {"F32", DType::kFloat32}, {"BF16", DType::kBFloat16}, {"F16", DType::kFloat16},
      {"I64", DType::kInt64},   {"I32", DType::kInt32},     {"I16", DType::kInt16},
      {"I8", DType::kInt8},     {"U8", DType::kUInt8},      {"BOOL", DType::kBool}};
  if (std::find(wanted.begin(), wanted.end(), tensor.dtype) == wanted.end())
    throw bad_input(
        fmt::format("{}: {}: expected {}, got {}", file.path(), tensor.name, fmt::join(wanted, " or "), tensor.dtype));
  return kTypes.at(tensor.dtype);
}

std::string safetensors_header(const std::vector<OutputVector>& vectors,
                               const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header = {{"__metadata__", metadata}};
  std::size_t offset = 0;
  for (const OutputVector& vector : vectors) {
    const std::size_t end = offset + vector.values->size() * sizeof(float);
    header[vector.name] = {{"dtype", "F32"}, {"shape", {vector.values->size()}}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // keeps the data aligned for readers that map the file
  const std::uint64_t length = text.size();
  std::string out(reinterpret_cast<const char*>(&length), sizeof length);
  return out + text;
}

}  // namespace lmhead::tools
