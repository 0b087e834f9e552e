// The portable backend's tiling against its promises, without a GPU: budgets, limits, cover of the vocabulary.
#include "cuda/plan.h"

#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "core/validate.h"
#include "cuda/cublas_lt.h"
#include "cuda/shared_library.h"
#include "cuda/small_product.h"
#include "testing/problem.h"

namespace lmhead::cuda {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Views of the given shape whose data is never touched.
ResolvedProblem shape(std::int64_t n, std::int64_t h, std::int64_t v, DType hidden, DType weight) {
  static std::byte somewhere[256];
  Problem p;
  p.hidden = {somewhere, n, h, h, hidden};
  p.weight = {somewhere, v, h, h, weight};
  p.targets = {somewhere, n, 1, DType::kInt64};
  Execution e;
  e.device = Device::kCuda;
  Result<ResolvedProblem> r = validate(p, e);
  EXPECT_TRUE(r.ok()) << r.status().to_string();
  return *r;
}

BackwardOutputs gradients(const ResolvedProblem& r, DType hidden, DType weight) {
  BackwardOutputs out;
  out.hidden = {const_cast<void*>(r.given.hidden.data), r.n, r.h, r.h, hidden};
  out.weight = {const_cast<void*>(r.given.weight.data), r.v_local, r.h, r.h, weight};
  return out;
}

std::size_t bytes_of(const ResolvedProblem& r, const BackwardOutputs* out, const Plan& plan) {
  Workspace measure;
  lay_out(r, out, plan, measure);
  return measure.used();
}

TEST(CudaPlan, EveryHeadKeepsItsBudget) {
  const std::vector<testing::Head> heads = testing::read_heads();
  ASSERT_FALSE(heads.empty());
  for (const testing::Head& head : heads) {
    for (const std::int64_t n : {1, 17, 1000, 2048, 16384, 262144}) {
      for (const std::size_t budget : {64 * kMiB, 512 * kMiB, 4096 * kMiB}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          const ResolvedProblem r = shape(n, head.hidden, head.vocab, DType::kBFloat16, dtype);
          const BackwardOutputs both = gradients(r, DType::kBFloat16, dtype);
          Execution e;
          e.workspace_budget = budget;
          for (const BackwardOutputs* out : {static_cast<const BackwardOutputs*>(nullptr), &both}) {
            const Result<Plan> plan = make_plan(r, out, e);
            ASSERT_TRUE(plan.ok()) << head.name << " " << n << " " << budget << " " << plan.status().to_string();
            EXPECT_LE(bytes_of(r, out, *plan), budget + accumulator_bytes(r, *plan)) << head.name << " " << n;
            // On top comes one fp32 accumulator of a 16-bit gradient, no more.
            const std::int64_t sums = n <= head.vocab ? n : head.vocab;
            EXPECT_LE(accumulator_bytes(r, *plan), static_cast<std::size_t>(sums * head.hidden * 4) + 256);
            EXPECT_GE(plan->rows, std::min<std::int64_t>(n, 256)) << "slivers at a real shape";
            if (out != nullptr) continue;
            const SegmentGrid head_grid = SegmentGrid::of(r.order(), 0, r.v_valid);
            SegmentGrid chunk = head_grid;
            for (chunk.end = 0; chunk.end < head_grid.end;) {
              chunk.begin = chunk.end;
              chunk.end = head_grid.chunk_end(chunk.begin, plan->columns);
              ASSERT_LE(chunk.count(), plan->segments) << head.name << " " << chunk.begin;
            }
          }
        }
      }
    }
  }
}

TEST(CudaPlan, Fp32GradientsNeedNoAccumulator) {
  const ResolvedProblem r = shape(16384, 4096, 131072, DType::kBFloat16, DType::kBFloat16);
  const BackwardOutputs fp32 = gradients(r, DType::kFloat32, DType::kFloat32);
  const Result<Plan> plan = make_plan(r, &fp32, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(accumulator_bytes(r, *plan), 0u);
  EXPECT_FALSE(plan->hidden_accumulator || plan->weight_accumulator);
}

TEST(CudaPlan, OneProductRoundsStraightToTheGradient) {
  const ResolvedProblem r = shape(128, 64, 1000, DType::kBFloat16, DType::kBFloat16);
  const BackwardOutputs out = gradients(r, DType::kBFloat16, DType::kBFloat16);
  const Result<Plan> plan = make_plan(r, &out, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->rows, 128);
  EXPECT_EQ(plan->columns, 1000);
  EXPECT_FALSE(plan->hidden_accumulator || plan->weight_accumulator);
}

TEST(CudaPlan, TooSmallABudgetIsAnError) {
  const ResolvedProblem r = shape(1000, 4096, 131072, DType::kBFloat16, DType::kBFloat16);
  const BackwardOutputs out = gradients(r, DType::kBFloat16, DType::kBFloat16);
  Execution e;
  e.workspace_budget = 1024;
  const Result<Plan> plan = make_plan(r, &out, e);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.status().code(), StatusCode::kInvalidArgument);
  const std::string start = "workspace_budget: expected at least ";
  ASSERT_EQ(plan.status().message().rfind(start, 0), 0u) << plan.status().message();
  // The figure in the message is enough.
  e.workspace_budget = std::stoull(plan.status().message().substr(start.size()));
  EXPECT_TRUE(make_plan(r, &out, e).ok()) << plan.status().message();
}

TEST(CudaPlan, PiecesDoNotOverlapAndAreAligned) {
  const ResolvedProblem r = shape(1000, 100, 50257, DType::kBFloat16, DType::kFloat16);
  const BackwardOutputs out = gradients(r, DType::kBFloat16, DType::kFloat16);
  Execution e;
  e.workspace_budget = 16 * kMiB;
  const Result<Plan> plan = make_plan(r, &out, e);
  ASSERT_TRUE(plan.ok());
  auto* base = reinterpret_cast<std::byte*>(kWorkspaceAlignment * 16);
  Workspace workspace(base);
  const Tiles t = lay_out(r, &out, *plan, workspace);
  std::vector<std::byte*> pieces;
  for (void* piece : {static_cast<void*>(t.hidden_sums), static_cast<void*>(t.weight_sums), t.blas,
                      static_cast<void*>(t.products), static_cast<void*>(t.terms), t.hidden}) {
    if (piece == nullptr) continue;
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(piece) % kWorkspaceAlignment, 0u);
    pieces.push_back(static_cast<std::byte*>(piece));
  }
  ASSERT_GE(pieces.size(), 4u);
  for (std::size_t i = 1; i < pieces.size(); ++i) EXPECT_GT(pieces[i], pieces[i - 1]);
  EXPECT_LE(reinterpret_cast<std::byte*>(t.hidden) + plan->rows * padded_width(r.h) * 2, base + workspace.used());
}

// cuBLASLt has no algorithm for such strides, so tiles of the inputs are packed and gradients summed apart.
TEST(CudaPlan, RowsFarApartArePacked) {
  const std::int64_t far = (std::int64_t{1} << 31) + 64;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    ResolvedProblem r = shape(1000, 64, 4000, dtype, dtype);
    BackwardOutputs out = gradients(r, dtype, dtype);
    Result<Plan> near = make_plan(r, nullptr, {});
    ASSERT_TRUE(near.ok());
    EXPECT_FALSE(near->copy_hidden || near->copy_weight);
    r.given.hidden.row_stride = r.given.weight.row_stride = far;
    out.hidden.row_stride = out.weight.row_stride = far;
    const Result<Plan> forward = make_plan(r, nullptr, {}), backward = make_plan(r, &out, {});
    ASSERT_TRUE(forward.ok() && backward.ok());
    EXPECT_TRUE(forward->copy_hidden && forward->copy_weight);
    EXPECT_TRUE(backward->copy_hidden && backward->copy_weight);
    EXPECT_TRUE(backward->hidden_accumulator && backward->weight_accumulator);
    EXPECT_EQ(accumulator_bytes(r, *backward), 1000u * 64 * 4);
    // One row has no stride to step by.
    ResolvedProblem one = shape(1, 64, 4000, dtype, dtype);
    one.given.hidden.row_stride = far;
    const Result<Plan> single = make_plan(one, nullptr, {});
    ASSERT_TRUE(single.ok());
    EXPECT_FALSE(single->copy_hidden);
  }
}

bool is_mapped(const std::string& library) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(library) != std::string::npos) return true;
  return false;
}

TEST(CublasLibrary, IsOpenedByItsFirstUse) {
  EXPECT_FALSE(is_mapped("libcublas"));
  const Result<const CublasLt*> library = cublas_lt();
  ASSERT_TRUE(library.ok()) << library.status().to_string();
  EXPECT_TRUE(is_mapped("libcublasLt"));
  EXPECT_EQ((*library)->cublasLtGetVersion() / 10000, std::size_t{CUBLAS_VER_MAJOR});
}

TEST(SmallProducts, EachSideCountsInWholeTiles) {
  EXPECT_TRUE(has_small_products(1, 1, 1));
  EXPECT_TRUE(has_small_products(0, 64, 0));
  EXPECT_TRUE(has_small_products(64, 1024, 1024));
  EXPECT_FALSE(has_small_products(65, 1024, 1024));
  EXPECT_FALSE(has_small_products(64, 1025, 1024));
  EXPECT_FALSE(has_small_products(64, 1024, 1025));
  EXPECT_TRUE(has_small_products(1, 1024, 2048));
  EXPECT_FALSE(has_small_products(1, 1024, 2049)) << "one row costs a tile of 32";
  EXPECT_FALSE(has_small_products(std::int64_t{1} << 40, std::int64_t{1} << 40, std::int64_t{1} << 40));
}

TEST(CublasLibrary, MissingOnesAndMissingFunctionsAreNamed) {
  SharedLibrary missing("libcublasNone.so.13");
  void (*function)() = nullptr;
  missing.resolve("cublasCreate_v2", &function);
  EXPECT_FALSE(missing.ok());
  EXPECT_NE(missing.error().find("libcublasNone.so.13: cannot open shared object file"), std::string::npos)
      << missing.error();
  SharedLibrary present("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR));
  ASSERT_TRUE(present.ok()) << present.error();
  present.resolve("cublasLtNone", &function);
  EXPECT_NE(present.error().find("cublasLtNone"), std::string::npos) << present.error();
  EXPECT_EQ(function, nullptr);
}

TEST(CudaSegments, ChunksCoverAShardOnceAndFitTheirStates) {
  for (const std::int64_t vocab : {1, 7, 8, 520, 4096, 8199, 50257, 151936}) {
    for (const std::int64_t columns : {64, 128, 1024, 3072, 65536}) {
      for (const std::int64_t shards : {1, 3, 8}) {
        for (std::int64_t s = 0; s < shards; ++s) {
          const SegmentGrid shard =
              SegmentGrid::of(VocabularyOrder{vocab}, vocab * s / shards, vocab * (s + 1) / shards);
          std::int64_t at = shard.begin, chunks = 0;
          while (at < shard.end) {
            SegmentGrid chunk = shard;
            chunk.begin = at;
            chunk.end = shard.chunk_end(at, columns);
            ASSERT_GT(chunk.end, at);
            ASSERT_LE(chunk.end - at, columns);
            std::int64_t column = at;
            for (std::int64_t g = chunk.first(); g < chunk.first() + chunk.count(); ++g) {
              const std::int64_t b = std::max(chunk.begin, chunk.origin(g)), e = std::min(chunk.end, chunk.limit(g));
              ASSERT_EQ(b, column);
              ASSERT_LE(e - b, kSegmentColumns);
              ASSERT_EQ(chunk.id(b), g);
              ASSERT_EQ(chunk.id(e - 1), g);
              column = e;
            }
            ASSERT_EQ(column, chunk.end);
            at = chunk.end;
            ++chunks;
          }
          // The grid is the canonical one.
          std::int64_t expected = 0;
          for_each_segment(VocabularyOrder{vocab}, shard.begin, shard.end,
                           [&](std::int64_t octant, std::int64_t b, std::int64_t) {
                             ++expected;
                             EXPECT_EQ(shard.id(b) / shard.per_octant, octant);
                           });
          EXPECT_EQ(shard.count(), expected);
        }
      }
    }
  }
}

}  // namespace
}  // namespace lmhead::cuda
