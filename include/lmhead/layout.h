// The packed segment layout: where every token of every sequence lies under tensor and context parallelism.
//
// One derivation for packing footprints, targets, masks, kernels and results. Everything that moves data
// between a padded batch, a packed row and the shards of the ranks does it through the index maps below;
// they hold integers only, so the same map serves host memory, a GPU gather and a test.
//
//   sequence alignment  A_s = 1 if cp == 1 else 2*tp*cp
//   total alignment     A_t = lcm(L, F),  L = tp if cp == 1 else 2*tp*cp
//                       F = 1 | 32*tp*cp (MXFP8) | 128*tp*cp if tp > 1 else 16*cp (FP8)
//
// Each sequence is padded to a multiple of A_s; then the last one grows until the total is a multiple of A_t.
// Context parallelism is zig-zag: a padded segment of length L is cut into 2*cp equal chunks and rank r holds
// chunks r and 2*cp-1-r, in that order, so causal attention costs every rank the same.
//
// Row kinds, used in every name below:
//   source row   row of the unpadded concatenation of all sequences, [0, sum of lengths)
//   global row   row of the padded layout, [0, total())
//   local row    row of one context-parallel rank's shard, [0, local_total())
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "lmhead/status.h"

namespace lmhead {

/// Arithmetic of the training GEMMs, which decides how long a packed row has to be. A recipe that is only known at
/// run time ("auto") must be resolved before a layout is made: precision_from_name refuses it.
enum class Precision : std::uint8_t {
  kNone,   ///< bf16, fp16, fp32: no constraint
  kFp8,    ///< FP8 with per-tensor or blockwise scales
  kMxFp8,  ///< FP8 with a scale per 32 elements
};

/// "none", "fp8", "mxfp8".
const char* to_string(Precision precision);
/// The inverse, ignoring case. kInvalidArgument for any other name.
Result<Precision> precision_from_name(std::string_view name);

/// Parallel sizes that a layout depends on.
struct LayoutOptions {
  std::int64_t tp = 1;  ///< tensor-parallel ranks (sequence parallelism included), >= 1
  std::int64_t cp = 1;  ///< context-parallel ranks, >= 1
  Precision precision = Precision::kNone;
};

/// A_s: what each sequence of a packed row is padded to, in tokens as the two below. kInvalidArgument, of all three,
/// for tp < 1, cp < 1 or tp * cp > 2^20.
Result<std::int64_t> sequence_alignment(const LayoutOptions& options);
/// A_t: what a packed row's total is padded to.
Result<std::int64_t> total_alignment(const LayoutOptions& options);
/// What the sequence dimension of an unpacked, padded batch is padded to: lcm(tp, F at cp = 1).
Result<std::int64_t> unpacked_alignment(const LayoutOptions& options);

/// Half-open run of rows.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  friend bool operator==(const Span&, const Span&) = default;
};

/// The layout of one packed row, or of one micro-batch of them. Immutable.
class PackedLayout {
 public:
  /// lengths: real tokens of each sequence, each >= 1; none gives ((), (0), 0).
  /// kInvalidArgument for a length or a parallel size < 1, and for totals beyond 64 bits.
  static Result<PackedLayout> make(std::span<const std::int64_t> lengths, const LayoutOptions& options = {});
  /// The same from offsets [S + 1] that start at 0 and rise strictly.
  static Result<PackedLayout> from_cu_seqlens(std::span<const std::int64_t> cu_seqlens,
                                              const LayoutOptions& options = {});

  const LayoutOptions& options() const { return options_; }
  std::int64_t num_sequences() const { return static_cast<std::int64_t>(lengths_.size()); }
  /// [S] real and padded tokens of each sequence; [S + 1] offsets of source and global rows.
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  const std::vector<std::int64_t>& padded_lengths() const { return padded_lengths_; }
  const std::vector<std::int64_t>& cu_seqlens() const { return cu_seqlens_; }
  const std::vector<std::int64_t>& cu_seqlens_padded() const { return cu_seqlens_padded_; }
  /// Real tokens.
  std::int64_t num_tokens() const { return cu_seqlens_.back(); }
  /// Global rows: padded tokens over all context-parallel ranks. Attention gets cu_seqlens_padded and total on
  /// every rank, unsharded.
  std::int64_t total() const { return cu_seqlens_padded_.back(); }
  /// Rows of one context-parallel rank, total / cp; under sequence parallelism a multiple of tp.
  std::int64_t local_total() const { return total() / options_.cp; }

  // Index maps. An entry of -1 means "no such row": padding, or nothing to predict.

  /// [total] source row of each global row; -1 for padding.
  std::vector<std::int64_t> source_rows() const;
  /// [num_tokens] global row of each source row: the inverse.
  std::vector<std::int64_t> global_rows() const;
  /// [total] global row whose token is predicted at each global row: the next one of the same sequence; -1 for a
  /// sequence's last real token and for padding. Shards take their own rows of it: the shift comes first.
  std::vector<std::int64_t> target_rows() const;
  /// [local_total] global row of each local row of `cp_rank`. kInvalidArgument unless 0 <= cp_rank < cp.
  Result<std::vector<std::int64_t>> local_rows(std::int64_t cp_rank) const;
  /// [total] position of each global row in the concatenation of all ranks' shards, cp_rank * local_total + local
  /// row: the inverse of local_rows over all ranks, and the index that undoes an all-gather.
  std::vector<std::int64_t> gathered_rows() const;

  /// Where each sequence lies in a padded batch [rows, width].
  struct BatchPosition {
    std::int64_t row = 0;     ///< batch row
    std::int64_t column = 0;  ///< column of the sequence's first token
  };
  /// [rows * width] global row of each batch cell; -1 where no token lies. `positions` has one entry a sequence.
  /// kInvalidArgument when a sequence leaves the batch or two overlap.
  Result<std::vector<std::int64_t>> batch_rows(std::span<const BatchPosition> positions, std::int64_t rows,
                                               std::int64_t width) const;
  /// [rows * (width - 1)] global row whose result belongs into each cell of a prediction batch, where cell (b, t)
  /// predicts the token at column t + 1; -1 where nothing is predicted. Width 0 is an error.
  Result<std::vector<std::int64_t>> prediction_rows(std::span<const BatchPosition> positions, std::int64_t rows,
                                                    std::int64_t width) const;

  /// Targets of every global row: the next id of the same sequence, `ignore_index` where nothing is predicted.
  /// input_ids, targets: [total], else kInvalidArgument; they may be the same memory.
  Status shift_targets(std::span<const std::int64_t> input_ids, std::int64_t ignore_index,
                       std::span<std::int64_t> targets) const;
  Status shift_targets(std::span<const std::int32_t> input_ids, std::int32_t ignore_index,
                       std::span<std::int32_t> targets) const;
  /// Row mask from token mask: row i is active if the token that it predicts is. token_mask, row_mask: [total], else
  /// kInvalidArgument; they may be the same memory.
  Status shift_mask(std::span<const std::uint8_t> token_mask, std::span<std::uint8_t> row_mask) const;

 private:
  PackedLayout() = default;

  LayoutOptions options_;
  std::vector<std::int64_t> lengths_;
  std::vector<std::int64_t> padded_lengths_;
  std::vector<std::int64_t> cu_seqlens_{0};
  std::vector<std::int64_t> cu_seqlens_padded_{0};
};

/// Rows without activity that still join two runs into one span.
inline constexpr std::int64_t kActiveSpanGap = 128;

/// Runs of active rows (active[i] != 0), in order; runs that lie at most `max_gap` inactive rows apart are one span.
/// For a packed row pass the mask of one rank's local rows; spans are then in that rank's coordinates.
/// kInvalidArgument for max_gap < 0.
Result<std::vector<Span>> active_spans(std::span<const std::uint8_t> active, std::int64_t max_gap = kActiveSpanGap);

/// The spans of one context-parallel rank, in its local rows, for a mask over global rows [total]. kInvalidArgument for
/// another length, and unless 0 <= cp_rank < cp and max_gap >= 0.
Result<std::vector<Span>> active_spans(const PackedLayout& layout, std::span<const std::uint8_t> active,
                                       std::int64_t cp_rank, std::int64_t max_gap = kActiveSpanGap);

/// Checks spans that a caller brings: sorted, not overlapping, not empty, inside [0, rows), and covering every active
/// row; kInvalidArgument otherwise. `active` [rows]; absent with spans present is an error too, since then nothing says
/// what the spans must cover.
Status check_active_spans(std::span<const Span> spans, std::int64_t rows,
                          std::optional<std::span<const std::uint8_t>> active);

}  // namespace lmhead
