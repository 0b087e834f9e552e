// The BATCH.safetensors that `lmhead score` reads.
//
//   hidden      [N, H] F32 | BF16 | F16   final hidden states, as they enter the LM head
//   targets     [N] I32 | I64             row i scores targets[i]; -100: the row scores nothing
//   input_ids   [N] I32 | I64             instead of targets: row i scores the next id of its own sequence,
//                                         the last row of a sequence scores nothing
//   cu_seqlens  [S + 1] I32 | I64         optional: sequence s holds rows [cu_seqlens[s], cu_seqlens[s + 1])
//   loss_mask   [N] BOOL | integer        optional: row i, the row that predicts, is scored if loss_mask[i] > 0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lmhead/types.h"
#include "safetensors.h"

namespace lmhead::tools {

/// Target of a row that scores nothing.
inline constexpr std::int64_t kIgnoreIndex = -100;

struct Batch {
  SafetensorsFile file;                  ///< keeps the views below valid
  ConstMatrix hidden;                    ///< [N, H]
  bool shifted = false;                  ///< targets were derived from input_ids
  std::vector<std::int64_t> ids;         ///< [N] input_ids, or targets where the file has those
  std::vector<std::int64_t> targets;     ///< [N] id that row i scores, or kIgnoreIndex (unscored by mask too)
  std::vector<std::int64_t> cu_seqlens;  ///< [S + 1]; {0, N} without the tensor
  std::vector<std::string> unused;       ///< tensors of the file that score does not read

  std::int64_t rows() const { return hidden.rows; }
  std::int64_t sequences() const { return static_cast<std::int64_t>(cu_seqlens.size()) - 1; }
};

/// Reads and checks all but the values of hidden. Throws CommandError (bad input).
Batch read_batch(const std::string& path);

/// Throws bad input unless every target is in [0, vocab). Names the tensor and the row of the file.
void check_targets(const Batch& batch, std::int64_t vocab);

/// Throws bad input "NAME: expected finite values, got nan at [row, column]" at the first non-finite value.
void check_finite(const std::string& name, const ConstMatrix& matrix);

}  // namespace lmhead::tools
