#include "cuda/sm90_plan.h"

#include <string>

#include "cuda/launch.h"

namespace lmhead::cuda::sm90 {

Status budget_too_small(std::size_t needed, const Execution& e) {
  return {StatusCode::kInvalidArgument, "workspace_budget: expected more than " + std::to_string(needed) +
                                            " bytes for this problem, got " + std::to_string(budget_of(e))};
}

Segments make_segments(const SegmentGrid& grid, std::int64_t vocab_start) {
  return {static_cast<int>(grid.octant_size), static_cast<int>(grid.per_octant), static_cast<int>(grid.first()),
          static_cast<int>(grid.count()),     static_cast<int>(grid.begin),      static_cast<int>(grid.end),
          static_cast<int>(vocab_start)};
}

namespace {
bool is_general(const Problem& p) { return !p.bias.absent() || p.softcap || !(p.logit_scale > 0); }
}  // namespace

Head make_head(const Problem& p, const float* bias) {
  return {bias, static_cast<float>(p.logit_scale), p.softcap ? static_cast<float>(*p.softcap) : 0.0f, is_general(p)};
}

Status hidden_map(CUtensorMap* map, const ResolvedProblem& r, std::int64_t begin, std::int64_t rows, int box_rows) {
  const ConstMatrix& m = r.given.hidden;
  const std::int64_t stride = stride_of(m);
  return encode_tensor_map(map, static_cast<const std::uint16_t*>(m.data) + begin * stride, r.compute, rows, r.h,
                           stride, static_cast<std::uint32_t>(box_rows), kTileDepth);
}
Status weight_map(CUtensorMap* map, const ResolvedProblem& r, int box_rows) {
  const ConstMatrix& m = r.given.weight;
  return encode_tensor_map(map, m.data, r.compute, r.v_valid, r.h, stride_of(m), static_cast<std::uint32_t>(box_rows),
                           kTileDepth);
}

}  // namespace lmhead::cuda::sm90
