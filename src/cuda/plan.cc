#include "cuda/plan.h"

#include <algorithm>
#include <optional>

#include "cuda/portable_kernels.h"
#include "cuda/product.h"

namespace lmhead::cuda {
namespace {

/// A launch of a tile (four products and row passes) costs about as much time as moving this many bytes.
constexpr double kTileOverheadBytes = 8e7;
constexpr std::int64_t kMinColumns = 64;
constexpr std::int64_t kFewRows = 256;
/// What cuBLASLt asks for at most on Hopper.
constexpr std::size_t kMaxBlasBytes = std::size_t{32} << 20;
/// Tile sides stay inside cuBLASLt's 32-bit sizes.
constexpr std::int64_t kMaxSide = std::int64_t{1} << 30;

bool wants(const Matrix& m) { return !m.absent(); }

/// cuBLASLt has no algorithm for some strides of 2^31 elements; rows so far apart are copied to packed tiles.
constexpr std::int64_t kMaxStrideBytes = (std::int64_t{1} << 31) - 1;
template <class AnyMatrix>
bool is_far(const AnyMatrix& m) {
  return m.rows > 1 && m.row_stride > kMaxStrideBytes / static_cast<std::int64_t>(size_of(m.dtype));
}

/// A 16-bit gradient is written by the product itself only if it is finished in one product.
bool needs_sums(const Matrix& gradient, DType compute, bool finished_at_once) {
  if (!wants(gradient)) return false;
  if (is_far(gradient)) return true;
  return gradient.dtype != DType::kFloat32 && !(finished_at_once && gradient.dtype == compute);
}

std::int64_t segments_in(const ResolvedProblem& r, std::int64_t columns) {
  const SegmentGrid grid = SegmentGrid::of(r.order(), r.given.vocab_start, r.given.vocab_start + r.v_valid);
  // Each octant that a chunk touches adds at most two cut segments.
  const std::int64_t octants = std::min<std::int64_t>(kOctants, columns / grid.octant_size + 2);
  return std::min(grid.count(), columns / kSegmentColumns + 2 * octants);
}

Plan shape(const ResolvedProblem& r, const BackwardOutputs* gradients, std::size_t budget, bool vocabulary_outside,
           std::int64_t rows, std::int64_t columns) {
  Plan plan;
  plan.rows = rows;
  plan.columns = columns;
  plan.vocabulary_outside = vocabulary_outside;
  std::size_t wanted_bytes = product_workspace(rows, columns, r.compute);
  if (gradients != nullptr)
    wanted_bytes =
        std::max({wanted_bytes, product_workspace(rows, r.h, r.compute), product_workspace(columns, r.h, r.compute)});
  plan.blas_bytes = std::min({kMaxBlasBytes, budget / 8 / kWorkspaceAlignment * kWorkspaceAlignment,
                              wanted_bytes / kWorkspaceAlignment * kWorkspaceAlignment});
  plan.products_stride = round_up(columns, 8);
  plan.copy_weight = r.given.weight.dtype != r.compute || is_far(r.given.weight);
  plan.copy_hidden = r.given.hidden.dtype != r.compute || is_far(r.given.hidden);
  if (gradients == nullptr) {
    plan.segments = segments_in(r, columns);
  } else {
    // An inactive row adds exactly nothing to dW whatever its hidden state holds: 0 * NaN must not happen.
    plan.copy_hidden = plan.copy_hidden || wants(gradients->weight);
    plan.hidden_accumulator = needs_sums(gradients->hidden, r.compute, columns >= r.v_valid);
    plan.weight_accumulator = needs_sums(gradients->weight, r.compute, rows >= r.n);
  }
  return plan;
}

std::size_t bytes_inside(const ResolvedProblem& r, const BackwardOutputs* gradients, const Plan& plan) {
  Workspace measure;
  lay_out(r, gradients, plan, measure);
  return measure.used() - accumulator_bytes(r, plan);
}

/// Bytes that the plan's loops move beside the products' own work: operands read again for each tile, fp32
/// accumulators read and written.
double traffic(const ResolvedProblem& r, const BackwardOutputs* gradients, const Plan& plan) {
  const double element = static_cast<double>(size_of(r.compute));
  const double row_chunks = static_cast<double>(ceil_div(r.n, plan.rows));
  const double column_chunks = static_cast<double>(ceil_div(std::max<std::int64_t>(r.v_valid, 1), plan.columns));
  double per_hidden = element, per_weight = element;
  if (gradients != nullptr) {
    per_hidden = 2 * element + (wants(gradients->hidden) ? 8.0 : 0.0);
    per_weight = 2 * element + (wants(gradients->weight) ? 8.0 : 0.0);
  }
  const double h = static_cast<double>(r.h);
  return column_chunks * static_cast<double>(r.n) * h * per_hidden +
         row_chunks * static_cast<double>(r.v_valid) * h * per_weight + row_chunks * column_chunks * kTileOverheadBytes;
}

/// Most columns that fit for this many rows: all, else a multiple of a segment, else of kMinColumns.
std::optional<Plan> widest(const ResolvedProblem& r, const BackwardOutputs* gradients, std::size_t budget,
                           bool vocabulary_outside, std::int64_t rows) {
  const std::int64_t all = std::max<std::int64_t>(r.v_valid, 1);
  const auto fits = [&](std::int64_t columns) {
    return bytes_inside(r, gradients, shape(r, gradients, budget, vocabulary_outside, rows, columns)) <= budget;
  };
  if (all <= kMaxSide && fits(all)) return shape(r, gradients, budget, vocabulary_outside, rows, all);
  for (const std::int64_t step : {kSegmentColumns, kMinColumns}) {
    std::int64_t low = 0, high = std::min(all, kMaxSide) / step;  // in steps; `low` fits
    while (low < high) {
      const std::int64_t middle = (low + high + 1) / 2;
      if (fits(middle * step)) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    if (low > 0) return shape(r, gradients, budget, vocabulary_outside, rows, low * step);
  }
  return std::nullopt;
}

}  // namespace

std::size_t accumulator_bytes(const ResolvedProblem& r, const Plan& plan) {
  const bool on_top = plan.vocabulary_outside ? plan.hidden_accumulator : plan.weight_accumulator;
  if (!on_top) return 0;
  Workspace measure;
  measure.take<float>((plan.vocabulary_outside ? r.n : r.v_valid) * r.h);
  return measure.used();
}

Tiles lay_out(const ResolvedProblem& r, const BackwardOutputs* gradients, const Plan& plan, Workspace& workspace) {
  const std::int64_t element = static_cast<std::int64_t>(size_of(r.compute)), width = padded_width(r.h);
  Tiles t;
  if (plan.hidden_accumulator) t.hidden_sums = workspace.take<float>((plan.vocabulary_outside ? r.n : plan.rows) * r.h);
  if (plan.weight_accumulator)
    t.weight_sums = workspace.take<float>((plan.vocabulary_outside ? plan.columns : r.v_valid) * r.h);
  t.blas = workspace.take_bytes(static_cast<std::int64_t>(plan.blas_bytes));
  t.products = workspace.take<float>(plan.rows * plan.products_stride);
  t.terms = workspace.take<RowTerms>(plan.rows);
  if (plan.copy_hidden) t.hidden = workspace.take_bytes(plan.rows * width * element);
  if (plan.copy_weight) t.weight = workspace.take_bytes(plan.columns * width * element);
  if (gradients == nullptr) {
    const std::int64_t state =
        static_cast<std::int64_t>(r.compute == DType::kFloat32 ? sizeof(SoftmaxStateT<double>) : sizeof(SoftmaxState));
    t.partial = workspace.take_bytes(plan.segments * plan.rows * state);
    t.carry = workspace.take_bytes(kOctants * plan.rows * state);
  } else if (!gradients->bias.absent()) {
    t.bias_sums = workspace.take<float>(r.v_valid);
    t.bias_partial = workspace.take<float>(column_slices(plan.rows) * plan.columns);
  }
  return t;
}

Result<Plan> make_plan(const ResolvedProblem& r, const BackwardOutputs* gradients, const Execution& e) {
  const std::size_t budget = budget_of(e);
  // The outer loop's accumulator is [N, H] with the vocabulary outside, [V, H] with the rows outside.
  const bool vocabulary_outside = gradients != nullptr && r.n <= r.v_valid;
  std::optional<Plan> best;
  double best_cost = 0;
  for (std::int64_t rows = std::min(r.n, kMaxSide); rows >= 1;
       rows = rows > kFewRows ? round_up(rows / 2, kFewRows) : rows / 2) {
    const std::optional<Plan> plan = widest(r, gradients, budget, vocabulary_outside, rows);
    const double cost = plan ? traffic(r, gradients, *plan) : 0;
    if (plan && (!best || cost < best_cost)) {
      best = plan;
      best_cost = cost;
    }
    if (best && rows <= kFewRows) break;  // fewer only when nothing larger fits
  }
  if (best) return *best;
  Plan least =
      shape(r, gradients, budget, vocabulary_outside, 1, std::min(std::max<std::int64_t>(r.v_valid, 1), kMinColumns));
  least.blas_bytes = 0;  // its eighth of the budget is added below
  return Status(StatusCode::kInvalidArgument,
                "workspace_budget: expected at least " +
                    std::to_string(bytes_inside(r, gradients, least) / 7 * 8 + 8 * kWorkspaceAlignment) +
                    " bytes for this problem, got " + std::to_string(budget));
}

}  // namespace lmhead::cuda
