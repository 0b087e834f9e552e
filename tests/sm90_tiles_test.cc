// Chunk sizes of the sm90 backend against its promises, without a GPU.
#include "cuda/sm90_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lmhead::cuda::sm90 {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr int kMultiprocessors = 132;

TEST(Sm90Tiles, ForwardChunksFitAndAreEven) {
  for (const std::int64_t n : {1, 127, 129, 16384, 262144}) {
    for (const std::int64_t bytes_per_row : {16, 2048, 10240, 40000}) {
      const std::int64_t rows = forward_chunk_rows(n, bytes_per_row, 120 * kMiB);
      ASSERT_GT(rows, 0);
      EXPECT_EQ(rows % kTileRows, 0);
      EXPECT_LE(rows * bytes_per_row, static_cast<std::int64_t>(120 * kMiB));
      const std::int64_t chunks = (n + rows - 1) / rows;
      EXPECT_LT(rows * chunks - n, kTileRows * chunks) << "a chunk is nearly empty";
    }
  }
  EXPECT_EQ(forward_chunk_rows(1000, 10240, kMiB), 0) << "128 rows do not fit";
}

TEST(Sm90Tiles, BackwardChunksFit) {
  for (const std::int64_t n : {1, 100, 8192, 16384, 262144}) {
    for (const std::int64_t v : {3, 300, 32768, 151936, 262144}) {
      for (const std::size_t mib : {32, 512, 4096}) {
        const BackwardChunk c = backward_chunk(n, 2048, v, mib * kMiB, kMultiprocessors);
        ASSERT_GT(c.rows, 0) << n << " " << v << " " << mib;
        EXPECT_LE(static_cast<std::size_t>(c.rows * c.columns) * 2, mib * kMiB) << n << " " << v << " " << mib;
        EXPECT_EQ(c.columns % kTileColumns, 0);
        EXPECT_TRUE(c.rows == n || c.rows % kTileRows == 0) << c.rows;
      }
    }
  }
}

// dW is finished in one product wherever a chunk of all rows is not a sliver, dX where the rows are many.
TEST(Sm90Tiles, BackwardChunksRunAlongTheLongerSide) {
  EXPECT_EQ(backward_chunk(16384, 4096, 131072, 512 * kMiB, kMultiprocessors).rows, 16384);
  const BackwardChunk rows = backward_chunk(131072, 4096, 32768, 512 * kMiB, kMultiprocessors);
  EXPECT_EQ(rows.columns, 32768);
  EXPECT_EQ(rows.rows, 8192);
}

TEST(Sm90Tiles, ChosenWidthIsBetweenHalfAndAllOfWhatFits) {
  for (const std::int64_t h : {640, 2048, 4096, 8192}) {
    const BackwardChunk c = backward_chunk(16384, h, 131072, 512 * kMiB, kMultiprocessors);
    EXPECT_GE(c.columns, 8192);
    EXPECT_LE(c.columns, 16384);
  }
}

TEST(Sm90Tiles, BudgetBelowATileIsRefused) {
  EXPECT_EQ(backward_chunk(1 << 20, 4096, 131072, 1024, kMultiprocessors).rows, 0);
}

TEST(Sm90Tiles, GroupsCoverTheRowBlocksEvenly) {
  for (const std::int64_t blocks : {1, 7, 64, 128, 2048}) {
    for (const std::int64_t h : {8, 640, 4096, 16384}) {
      for (const std::int64_t percent : {1, 50, 100, 200, 400}) {
        const std::int64_t group = l2_group(blocks, h, percent), groups = (blocks + group - 1) / group;
        EXPECT_GE(group, 1);
        EXPECT_LE(group, std::max<std::int64_t>(1, 24 * percent / 100));
        EXPECT_LE(group * groups - blocks, groups) << "the last group is short";
      }
      EXPECT_GE(l2_group(blocks, h, 200), l2_group(blocks, h));
    }
  }
}

}  // namespace
}  // namespace lmhead::cuda::sm90
