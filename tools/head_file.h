// The LM head of a model on disk: weight, bias, and the options its configuration gives.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "lmhead/types.h"
#include "safetensors.h"

namespace lmhead::tools {

struct Head {
  std::vector<std::shared_ptr<SafetensorsFile>> files;  ///< keep the views below valid
  std::string path;                                     ///< file that holds the weight
  std::string name;                                     ///< tensor name of the weight
  ConstMatrix weight;                                   ///< [V, H] fp32 | bf16 | fp16, in place
  ConstVector bias;                                     ///< [V], absent unless the model has lm_head.bias
  std::optional<double> softcap;  ///< final_logit_softcapping of config.json; 0 or null means none
  double logit_scale = 1.0;       ///< logit_scale, 1 / logits_scaling or lm_head_multiplier of config.json
};

/// Opens the head of `path`: a Hugging Face folder (model.safetensors, or a sharded
/// model.safetensors.index.json; with config.json when there is one), an index file, or one
/// .safetensors file.
///
/// The weight is `tensor` if given, else lm_head.weight, else the tied input embedding
/// (model.embed_tokens.weight and the like) unless config.json says tie_word_embeddings: false.
/// Throws CommandError (bad input).
Head open_head(const std::string& path, const std::optional<std::string>& tensor);

}  // namespace lmhead::tools
