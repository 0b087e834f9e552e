#include "head_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "commands.h"

namespace lmhead::tools {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::vector<std::string> kFloatTypes = {"F32", "BF16", "F16"};

json read_json(const fs::path& path) {
  std::ifstream file(path);
  if (!file || fs::is_directory(path)) throw bad_input(path.string() + ": cannot read it");
  try {
    json value = json::parse(file);
    if (value.is_object()) return value;
  } catch (const json::exception&) {
  }
  throw bad_input(path.string() + ": expected a JSON object");
}

/// Where each tensor of a model lies.
using TensorMap = std::map<std::string, fs::path>;

TensorMap read_index(const fs::path& path) {
  const json index = read_json(path);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) throw bad_input(path.string() + ": expected an object weight_map");
  TensorMap tensors;
  for (const auto& [name, shard] : map->items()) {
    // A shard is a file of the same folder; anything else would let a downloaded index read elsewhere.
    if (!shard.is_string() || fs::path(shard.get<std::string>()).filename() != fs::path(shard.get<std::string>()))
      throw bad_input(fmt::format("{}: {}: expected a file name, got {}", path.string(), name, shard.dump()));
    tensors[name] = path.parent_path() / shard.get<std::string>();
  }
  return tensors;
}

TensorMap read_single(const fs::path& path) {
  TensorMap tensors;
  const SafetensorsFile file = SafetensorsFile::open(path.string());
  for (const auto& [name, tensor] : file.tensors()) tensors[name] = path;
  return tensors;
}

TensorMap read_folder(const fs::path& folder) {
  const fs::path index = folder / "model.safetensors.index.json", single = folder / "model.safetensors";
  if (fs::exists(index)) return read_index(index);
  if (fs::exists(single)) return read_single(single);
  std::vector<fs::path> files;
  std::error_code error;
  const fs::directory_iterator entries(folder, error);
  if (error) throw bad_input(folder.string() + ": " + error.message());
  for (const auto& entry : entries)
    if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
  if (files.size() == 1) return read_single(files[0]);
  throw bad_input(
      fmt::format("{}: expected model.safetensors, model.safetensors.index.json or one other .safetensors "
                  "file, got {} of them",
                  folder.string(), files.size()));
}

/// Tensors called `name` or ending in ".name", as multimodal models nest them.
std::vector<std::string> matches(const TensorMap& tensors, const std::string& name) {
  if (tensors.count(name) > 0) return {name};
  std::vector<std::string> found;
  const std::string ending = "." + name;
  for (const auto& [candidate, path] : tensors)
    if (candidate.size() > ending.size() && candidate.ends_with(ending)) found.push_back(candidate);
  return found;
}

std::string list_names(const TensorMap& tensors) {
  constexpr std::size_t kShown = 6;
  std::vector<std::string> names;
  for (const auto& [name, path] : tensors)
    if (names.size() < kShown) names.push_back(name);
  return fmt::format("{}{}", fmt::join(names, ", "),
                     tensors.size() > kShown ? fmt::format(" and {} more", tensors.size() - kShown) : "");
}

std::string find_weight(const std::string& path, const TensorMap& tensors, const std::optional<std::string>& tensor,
                        bool may_be_tied) {
  if (tensor) {
    if (tensors.count(*tensor) == 0)
      throw bad_input(fmt::format("{}: no tensor {}; it has {}", path, *tensor, list_names(tensors)));
    return *tensor;
  }
  std::vector<std::string> wanted = {"lm_head.weight", "embed_out.weight"};
  if (may_be_tied) wanted.insert(wanted.end(), {"embed_tokens.weight", "wte.weight", "embed_in.weight"});
  for (const std::string& name : wanted) {
    const std::vector<std::string> found = matches(tensors, name);
    if (found.size() == 1) return found[0];
    if (found.size() > 1)
      throw bad_input(fmt::format("{}: several tensors may be the head ({}); choose one with --tensor", path,
                                  fmt::join(found, ", ")));
  }
  throw bad_input(fmt::format("{}: no lm_head.weight{}; it has {}; choose one with --tensor", path,
                              may_be_tied ? " and no embed_tokens.weight" : " (and tie_word_embeddings is false)",
                              list_names(tensors)));
}

/// Opens the file that holds `name` and finds it there.
std::pair<std::shared_ptr<SafetensorsFile>, const Tensor*> open_tensor(const TensorMap& tensors,
                                                                       const std::string& name) {
  const std::string where = tensors.at(name).string();
  auto file = std::make_shared<SafetensorsFile>(SafetensorsFile::open(where));
  const Tensor* tensor = file->find(name);
  if (tensor == nullptr) throw bad_input(fmt::format("{}: no tensor {}, which the index places there", where, name));
  return {file, tensor};
}

/// A number of config.json, or of its text_config; `fallback` when absent or null.
double config_number(const fs::path& path, const json& config, const char* key, double fallback) {
  for (const json* level : {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (level == nullptr || !level->is_object() || !level->contains(key) || (*level)[key].is_null()) continue;
    if (!(*level)[key].is_number())
      throw bad_input(fmt::format("{}: {}: expected a number, got {}", path.string(), key, (*level)[key].dump()));
    return (*level)[key].get<double>();
  }
  return fallback;
}

bool config_ties(const json& config) {
  for (const json* level : {&config, config.contains("text_config") ? &config["text_config"] : nullptr})
    if (level != nullptr && level->is_object() && level->contains("tie_word_embeddings") &&
        (*level)["tie_word_embeddings"].is_boolean())
      return (*level)["tie_word_embeddings"].get<bool>();
  return true;
}

}  // namespace

Head open_head(const std::string& path, const std::optional<std::string>& tensor) {
  std::error_code error;
  if (!fs::exists(path, error)) throw bad_input(path + ": " + (error ? error.message() : "no such file or folder"));
  const bool folder = fs::is_directory(path), index = !folder && fs::path(path).extension() == ".json";
  const TensorMap tensors = folder ? read_folder(path) : index ? read_index(path) : read_single(path);

  Head head;
  bool may_be_tied = true;
  const fs::path config_path = (folder ? fs::path(path) : fs::path(path).parent_path()) / "config.json";
  if ((folder || index) && fs::exists(config_path)) {
    const json config = read_json(config_path);
    may_be_tied = config_ties(config);
    const double softcap = config_number(config_path, config, "final_logit_softcapping", 0.0);
    if (softcap != 0.0) head.softcap = softcap;
    const double divisor = config_number(config_path, config, "logits_scaling", 1.0);
    if (divisor == 0.0)
      throw bad_input(config_path.string() + ": logits_scaling: expected a number other than 0, got 0");
    head.logit_scale = config_number(config_path, config, "logit_scale", 1.0) / divisor *
                       config_number(config_path, config, "lm_head_multiplier", 1.0);
  }

  head.name = find_weight(path, tensors, tensor, may_be_tied);
  const auto [weight_file, weight] = open_tensor(tensors, head.name);
  if (weight->shape.size() != 2)
    throw bad_input(
        fmt::format("{}: {}: expected [V, H], got {}", weight_file->path(), head.name, weight->shape_text()));
  head.weight = {weight_file->aligned(*weight), weight->shape[0], weight->shape[1], weight->shape[1],
                 require_dtype(*weight_file, *weight, kFloatTypes)};
  head.path = weight_file->path();
  head.files.push_back(weight_file);

  // Only a head of its own has a bias, a tied embedding has none.
  const std::string stem = head.name.substr(0, head.name.rfind('.'));
  const std::string bias_name = stem + ".bias";
  if ((stem.ends_with("lm_head") || stem.ends_with("embed_out")) && tensors.count(bias_name) > 0) {
    const auto [bias_file, bias] = open_tensor(tensors, bias_name);
    if (bias->shape != std::vector<std::int64_t>{head.weight.rows})
      throw bad_input(fmt::format("{}: {}: expected [{}], got {}", bias_file->path(), bias_name, head.weight.rows,
                                  bias->shape_text()));
    head.bias = {bias_file->aligned(*bias), head.weight.rows, 1, require_dtype(*bias_file, *bias, kFloatTypes)};
    head.files.push_back(bias_file);
  }
  return head;
}

}  // namespace lmhead::tools
