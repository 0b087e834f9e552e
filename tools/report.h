// The HTML report of `lmhead score`: the text with its tokens coloured by surprisal or entropy.
#pragma once

#include <string>
#include <vector>

#include "batch_file.h"
#include "scores.h"

namespace lmhead::tools {

/// Reads TOKENS.json, a list of `rows` strings: string i is the text of id i of the batch (of
/// input_ids, or of targets where the batch has those). Throws bad input.
std::vector<std::string> read_tokens(const std::string& path, std::int64_t rows);

/// One self-contained HTML page. `tokens` may be empty: ids are shown then. Needs scores.entropy.
std::string render_report(const Batch& batch, const Scores& scores, const std::vector<std::string>& tokens);

}  // namespace lmhead::tools
