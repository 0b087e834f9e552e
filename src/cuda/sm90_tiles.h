// Tile shapes and chunk sizes of the sm90 backend: plain arithmetic, no CUDA. The tile shape of the
// logits product is one for every problem, so that a row's bits depend on H, V and the dtype alone; the
// chunk sizes below change no bit of log-prob or entropy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmhead::cuda::sm90 {

inline constexpr int kTileRows = 128, kTileColumns = 256, kNarrowColumns = 64, kTileDepth = 64;

/// Row blocks that share weight tiles in L2: their hidden rows fill about half of it, or `percent` of that.
int l2_group(std::int64_t row_blocks, std::int64_t h, std::int64_t percent = 100);

/// Rows of a forward chunk whose bytes (partial states, gathered hidden rows) fit, evened out over the
/// chunks; a multiple of kTileRows, 0 when not even one tile fits.
std::int64_t forward_chunk_rows(std::int64_t n, std::int64_t bytes_per_row, std::size_t available);

/// Chunk of dl [rows, columns] in the backward.
struct BackwardChunk {
  std::int64_t rows, columns;  ///< multiples of the tile, or all of N or V; 0 when no tile fits
};
/// N <= V: all rows, chunks along the vocabulary, so that dW is finished in one product; else chunks along
/// the rows; both when the budget leaves slivers. Among the sizes that fit, the one whose tiles leave the
/// fewest multiprocessors idle at the end of a launch.
BackwardChunk backward_chunk(std::int64_t n, std::int64_t h, std::int64_t v, std::size_t available,
                             int multiprocessors);

}  // namespace lmhead::cuda::sm90
