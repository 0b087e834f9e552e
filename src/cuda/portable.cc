// "cuda_portable": tiles of cuBLASLt products with row passes between them, for any GPU from sm_80 on.
//
// A tile of products stays fp32 in the workspace until the softmax has read it; in the backward it is
// overwritten by dl, rounded once. Rows that are not active are masked, not compacted: cuBLASLt takes its
// sizes from the host, which must not wait for a count on the device. They cost products of zeros, cost no
// softmax work and add exactly nothing.
#include "core/implementation.h"
#include "core/return_if_error.h"
#include "cuda/convert.h"
#include "cuda/cublas_lt.h"
#include "cuda/launch.h"
#include "cuda/plan.h"
#include "cuda/portable_kernels.h"
#include "cuda/product.h"
#include "cuda/rows.h"
#include "cuda/selected.h"
#include "cuda/small_product.h"

namespace lmhead {
namespace {

using namespace cuda;  // NOLINT(google-build-using-namespace): this file is the backend

ConstMatrix row_slice(const ConstMatrix& m, std::int64_t begin, std::int64_t count) {
  return {static_cast<const std::byte*>(m.data) + begin * m.row_stride * static_cast<std::int64_t>(size_of(m.dtype)),
          count, m.cols, m.row_stride, m.dtype};
}
Matrix row_slice(const Matrix& m, std::int64_t begin, std::int64_t count) {
  return {static_cast<std::byte*>(m.data) + begin * m.row_stride * static_cast<std::int64_t>(size_of(m.dtype)), count,
          m.cols, m.row_stride, m.dtype};
}

/// One call: the problem, its plan and workspace, and the tile that is prepared now.
class Tiling {
 public:
  Tiling(const ResolvedProblem& r, const Plan& plan, const Tiles& tiles, const Execution& e)
      : r_(r),
        plan_(plan),
        tiles_(tiles),
        e_(e),
        stream_(stream_of(e)),
        small_(r.compute == DType::kFloat32 && !e.allow_tf32 && has_small_products(r.n, r.h, r.v_valid)) {}

  /// Terms of rows [begin, begin + count), and their hidden rows where the plan copies them.
  void prepare_rows(std::int64_t begin, std::int64_t count, const BackwardInputs* backward) {
    cuda::prepare_rows(row_inputs(r_, begin, count, backward != nullptr ? *backward : BackwardInputs{}), count,
                       backward != nullptr, tiles_.terms, stream_);
    const ConstMatrix rows = row_slice(r_.given.hidden, begin, count);
    hidden_ = {rows.data, rows.row_stride};
    if (plan_.copy_hidden) {
      const std::int64_t width = padded_width(r_.h);
      gather_rows(rows, {tiles_.hidden, count, r_.h, width, r_.compute}, tiles_.terms, {}, stream_);
      hidden_ = {tiles_.hidden, width};
    }
    rows_ = count;
  }

  /// Weight rows of columns [begin, end) of the shard.
  void prepare_columns(std::int64_t begin, std::int64_t end) {
    const ConstMatrix rows = row_slice(r_.given.weight, begin, end - begin);
    weight_ = {rows.data, rows.row_stride};
    if (plan_.copy_weight) {
      const std::int64_t width = padded_width(r_.h);
      gather_rows(rows, {tiles_.weight, end - begin, r_.h, width, r_.compute}, nullptr, {}, stream_);
      weight_ = {tiles_.weight, width};
    }
    begin_ = begin;
    end_ = end;
  }

  /// Products of the prepared rows and columns: [rows, columns] = hidden weight^T.
  Status products() const {
    Product p = product(rows_, end_ - begin_, r_.h);
    p.a = hidden_;
    p.b = weight_;
    p.transpose_b = true;
    p.out = tiles_.products;
    p.out_stride = plan_.products_stride;
    return run(p);
  }

  /// gradient[rows, H] (+)= dl weight.
  Status hidden_gradient(const Matrix& gradient, bool accumulate) const {
    Product p = product(rows_, r_.h, end_ - begin_);
    p.a = {tiles_.products, dl_stride()};
    p.b = weight_;
    return multiply_into(p, gradient, accumulate);
  }

  /// gradient[columns, H] (+)= dl^T hidden.
  Status weight_gradient(const Matrix& gradient, bool accumulate) const {
    Product p = product(end_ - begin_, r_.h, rows_);
    p.a = {tiles_.products, dl_stride()};
    p.b = hidden_;
    p.transpose_a = true;
    return multiply_into(p, gradient, accumulate);
  }

  LogitTile logits() const {
    const Problem& p = r_.given;
    return {tiles_.products,
            plan_.products_stride,
            rows_,
            begin_,
            end_,
            p.bias,
            static_cast<float>(p.logit_scale),
            static_cast<float>(p.softcap.value_or(0.0))};
  }

  /// Elements of the compute type between rows of dl, which lies where the products were.
  std::int64_t dl_stride() const {
    return plan_.products_stride * static_cast<std::int64_t>(sizeof(float) / size_of(r_.compute));
  }

 private:
  Product product(std::int64_t m, std::int64_t n, std::int64_t k) const {
    Product p{};
    p.m = m;
    p.n = n;
    p.k = k;
    p.in = r_.compute;
    p.allow_tf32 = e_.allow_tf32;
    p.workspace = tiles_.blas;
    p.workspace_bytes = plan_.blas_bytes;
    return p;
  }
  Status multiply_into(Product p, const Matrix& gradient, bool accumulate) const {
    p.out = gradient.data;
    p.out_stride = gradient.row_stride;
    p.out_type = gradient.dtype;
    p.accumulate = accumulate;
    p.sum_in_parts = true;
    return run(p);
  }
  Status run(const Product& p) const { return small_ ? multiply_small(p, stream_) : multiply(p, stream_); }

  const ResolvedProblem& r_;
  const Plan& plan_;
  const Tiles& tiles_;
  const Execution& e_;
  cudaStream_t stream_;
  const bool small_;  ///< an fp32 problem whose products are summed in fp64
  std::int64_t rows_ = 0, begin_ = 0, end_ = 0;
  Operand hidden_{}, weight_{};
};

/// States or results of all rows. `outputs_of(begin, count)` says where those of a row chunk go.
/// Real: type of exponentials, sums and merges. Double for fp32 inputs, where an exp that errs by a few units the
/// same way in every column of a flat row would show in lse, and so in every gradient.
template <class Real, class OutputsOf>
Status run_forward_in(const ResolvedProblem& r, const Execution& e, OutputsOf&& outputs_of) {
  if (r.n == 0) return {};
  LMHEAD_RETURN_IF_ERROR(check_device_pointers(r, e));
  const Result<Plan> plan = make_plan(r, nullptr, e);
  if (!plan.ok()) return plan.status();
  Workspace workspace(e.workspace);
  const Tiles tiles = lay_out(r, nullptr, *plan, workspace);
  const cudaStream_t stream = stream_of(e);
  const std::int64_t start = r.given.vocab_start;
  const SegmentGrid shard = SegmentGrid::of(r.order(), start, start + r.v_valid);
  auto* const partial = static_cast<SoftmaxStateT<Real>*>(tiles.partial);
  Tiling tiling(r, *plan, tiles, e);

  for (std::int64_t row = 0; row < r.n; row += plan->rows) {
    const std::int64_t count = std::min(plan->rows, r.n - row);
    tiling.prepare_rows(row, count, nullptr);
    std::int64_t begin = shard.begin;
    do {  // once also for a shard without columns, whose rows get the empty state
      SegmentGrid chunk = shard;
      chunk.begin = begin;
      chunk.end = shard.chunk_end(begin, plan->columns);
      if (chunk.begin < chunk.end) {
        tiling.prepare_columns(chunk.begin - start, chunk.end - start);
        LMHEAD_RETURN_IF_ERROR(tiling.products());
        segment_states(tiling.logits(), chunk, start, tiles.terms, partial, stream);
      }
      fold_segments<Real>({partial, count, chunk, static_cast<SoftmaxStateT<Real>*>(tiles.carry), plan->rows,
                           begin == shard.begin, chunk.end == shard.end},
                          row_inputs(r, row, count), count, {}, outputs_of(row, count), stream);
      begin = chunk.end;
    } while (begin < shard.end);
  }
  return last_launch("cuda_portable forward");
}

template <class OutputsOf>
Status run_forward(const ResolvedProblem& r, const Execution& e, OutputsOf&& outputs_of) {
  return r.compute == DType::kFloat32 ? run_forward_in<double>(r, e, outputs_of)
                                      : run_forward_in<float>(r, e, outputs_of);
}

Status forward_partial(const ResolvedProblem& r, const Matrix& state, const Execution& e) {
  return run_forward(r, e, [&](std::int64_t begin, std::int64_t) {
    RowOutputs out{};
    out.state = static_cast<SoftmaxState*>(state.data) + begin;
    return out;
  });
}

Status forward(const ResolvedProblem& r, const ForwardOutputs& outputs, const Execution& e) {
  return run_forward(r, e, [&](std::int64_t begin, std::int64_t count) { return row_outputs(outputs, begin, count); });
}

/// Gradients of columns that take part in nothing: vocabulary padding, or everything without rows.
void clear_rest(const BackwardOutputs& out, std::int64_t first_column, std::int64_t v_local, cudaStream_t stream) {
  if (out.weight.absent() || out.accumulate_weight) return;
  clear_matrix(row_slice(out.weight, first_column, v_local - first_column), stream);
}

class Backward {
 public:
  Backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Plan& plan,
           const Tiles& tiles, const Execution& e)
      : r_(r), in_(in), out_(out), plan_(plan), tiles_(tiles), stream_(stream_of(e)), tiling_(r, plan, tiles, e) {}

  Status run() {
    const std::int64_t outer = plan_.vocabulary_outside ? r_.v_valid : r_.n;
    const std::int64_t inner = plan_.vocabulary_outside ? r_.n : r_.v_valid;
    const std::int64_t outer_step = plan_.vocabulary_outside ? plan_.columns : plan_.rows;
    const std::int64_t inner_step = plan_.vocabulary_outside ? plan_.rows : plan_.columns;
    for (std::int64_t o = 0; o < outer; o += outer_step) {
      for (std::int64_t i = 0; i < inner; i += inner_step) {
        LMHEAD_RETURN_IF_ERROR(plan_.vocabulary_outside ? tile(i, o) : tile(o, i));
      }
    }
    if (!out_.bias.absent()) store_vector(tiles_.bias_sums, r_.v_valid, out_.bias, out_.accumulate_bias, stream_);
    return last_launch("cuda_portable backward");
  }

 private:
  Status tile(std::int64_t row, std::int64_t column) {
    const std::int64_t rows = std::min(plan_.rows, r_.n - row);
    const std::int64_t end = std::min(column + plan_.columns, r_.v_valid), columns = end - column;
    if (row != row_) tiling_.prepare_rows(row, rows, &in_);
    if (column != column_) tiling_.prepare_columns(column, end);
    row_ = row;
    column_ = column;
    LMHEAD_RETURN_IF_ERROR(tiling_.products());
    logit_gradients(tiling_.logits(), r_.compute, !in_.dentropy.absent(), columns == r_.valid_vocab, tiles_.terms,
                    stream_);
    if (!in_.selected.absent())
      add_selected({tiles_.products, tiling_.dl_stride(), r_.compute, rows, column, end,
                    static_cast<float>(r_.given.logit_scale), static_cast<float>(r_.given.softcap.value_or(0.0))},
                   row_inputs(r_, row, rows, in_), {}, tiles_.terms, stream_);
    if (!out_.bias.absent())
      column_sums(tiles_.products, r_.compute, tiling_.dl_stride(), rows, columns, tiles_.bias_partial,
                  tiles_.bias_sums + column, row > 0, stream_);
    if (!out_.hidden.absent()) LMHEAD_RETURN_IF_ERROR(hidden_tile(row, rows, column, end));
    if (!out_.weight.absent()) LMHEAD_RETURN_IF_ERROR(weight_tile(row, rows, column, columns));
    return {};
  }

  Status hidden_tile(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t end) {
    const Matrix target = row_slice(out_.hidden, row, rows);
    const bool last = end == r_.v_valid;
    if (plan_.hidden_accumulator) {
      float* sums = tiles_.hidden_sums + (plan_.vocabulary_outside ? row * r_.h : 0);
      LMHEAD_RETURN_IF_ERROR(tiling_.hidden_gradient({sums, rows, r_.h, r_.h, DType::kFloat32}, column > 0));
      if (last) store_rows(sums, rows, target, tiles_.terms, {}, stream_, out_.accumulate_hidden);
      return {};
    }
    LMHEAD_RETURN_IF_ERROR(tiling_.hidden_gradient(target, column > 0 || out_.accumulate_hidden));
    // 0 times a non-finite weight is NaN, and inactive rows are exactly zero.
    if (last && !out_.accumulate_hidden) clear_inactive_rows(target, tiles_.terms, stream_);
    return {};
  }

  Status weight_tile(std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
    const Matrix target = row_slice(out_.weight, column, columns);
    if (plan_.weight_accumulator) {
      float* sums = tiles_.weight_sums + (plan_.vocabulary_outside ? 0 : column * r_.h);
      LMHEAD_RETURN_IF_ERROR(tiling_.weight_gradient({sums, columns, r_.h, r_.h, DType::kFloat32}, row > 0));
      if (row + rows == r_.n) store_rows(sums, columns, target, nullptr, {}, stream_, out_.accumulate_weight);
      return {};
    }
    return tiling_.weight_gradient(target, row > 0 || out_.accumulate_weight);
  }

  const ResolvedProblem& r_;
  const BackwardInputs& in_;
  const BackwardOutputs& out_;
  const Plan& plan_;
  const Tiles& tiles_;
  cudaStream_t stream_;
  Tiling tiling_;
  std::int64_t row_ = -1, column_ = -1;  ///< the prepared tile
};

Status backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e) {
  LMHEAD_RETURN_IF_ERROR(check_device_pointers(r, e));
  const cudaStream_t stream = stream_of(e);
  clear_rest(out, r.n == 0 ? 0 : r.v_valid, r.v_local, stream);
  if (r.n == 0 || r.v_valid == 0) {
    if (!out.hidden.absent() && !out.accumulate_hidden) clear_matrix(out.hidden, stream);
    if (!out.bias.absent()) store_vector(nullptr, 0, out.bias, out.accumulate_bias, stream);
    return last_launch("cuda_portable backward");
  }
  const Result<Plan> plan = make_plan(r, &out, e);
  if (!plan.ok()) return plan.status();
  Workspace workspace(e.workspace);
  const Tiles tiles = lay_out(r, &out, *plan, workspace);
  return Backward(r, in, out, *plan, tiles, e).run();
}

Result<WorkspaceSize> workspace_size(const ResolvedProblem& r, Operation operation, const BackwardOutputs& gradients,
                                     const Execution& e) {
  if (r.n == 0) return WorkspaceSize{};
  const BackwardOutputs* wanted = operation == Operation::kBackward ? &gradients : nullptr;
  const Result<Plan> plan = make_plan(r, wanted, e);
  if (!plan.ok()) return plan.status();
  Workspace measure;
  lay_out(r, wanted, *plan, measure);
  return WorkspaceSize{measure.used(), accumulator_bytes(r, *plan)};
}

Status supports(const ResolvedProblem& r, const Execution&) {
  if (r.result == DType::kFloat64) return {StatusCode::kUnsupported, "float64 runs on the reference backend only"};
  return cublas_lt().status();
}

Status available() {
  const Result<const DeviceProperties*> device = current_device();
  if (!device.ok()) return device.status();
  if ((*device)->major >= 8) return {};
  return {StatusCode::kUnsupported, (*device)->name + ": expected compute capability 8.0 or later, got " +
                                        std::to_string((*device)->major) + "." + std::to_string((*device)->minor)};
}

std::string describe() {
  const Result<const DeviceProperties*> device = current_device();
  if (!device.ok()) return device.status().message();
  const std::string name =
      (*device)->name + " (sm_" + std::to_string((*device)->major) + std::to_string((*device)->minor) + "), ";
  const Result<const CublasLt*> library = cublas_lt();
  if (!library.ok()) return name + library.status().message();
  const std::size_t version = (*library)->cublasLtGetVersion();
  return name + "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

}  // namespace

const Implementation kPortableCuda = {
    .name = "cuda_portable",
    .device = Device::kCuda,
    .available = available,
    .describe = describe,
    .supports = supports,
    .workspace_size = workspace_size,
    .check_values = cuda::check_values,
    .forward_partial = forward_partial,
    .combine = cuda::combine,
    .forward = forward,
    .backward = backward,
};

}  // namespace lmhead
