// Backward of the "cpu" backend. The [rows, vocabulary] plane is walked in blocks of R x S; in each block
// the threads make dl [R, S] (logits product and gradient pass tile by tile, rounded once), then, after a
// barrier, dW += dl^T X over vocabulary tiles and dX += dl W over row tiles. Every gradient element has
// one writer at a time and one order of additions, which no thread count changes.
//
// Whichever of rows and vocabulary is walked in the outer loop has its gradient finished block by block;
// the other one accumulates in fp32 for the whole call. The order with the smaller accumulator is taken.
#include "cpu/blocked.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace lmhead {
namespace {

constexpr std::int64_t kHiddenTile = 256;  // rows of a dX item
constexpr std::int64_t kWeightTile = 512;  // vocabulary rows of a dW item

/// Sizes that fit the budget. Only block_rows and block_cols order sums; they depend on the shapes and the
/// budget alone.
struct Plan {
  bool rows_outer = false;
  std::int64_t block_rows = 0, block_cols = 0, tile_rows = 0;
  int threads = 1;
  bool convert_weight = false, narrow_hidden = false, narrow_weight = false;  // narrow: a 16-bit gradient
  DType x_type, w_type;

  std::int64_t strip() const { return std::min(block_cols, kStripColumns); }
};

struct Buffers {
  std::byte *dl, *x, *w;  // [R, S], [R, H], [S, H] where converted
  float *dx, *dw, *db;    // fp32 sums of 16-bit gradients; db [v_valid] always
  std::size_t bytes, accumulator;
  struct Thread {
    float *logits, *bias;
    std::byte* scratch;
    std::size_t scratch_bytes;
  };
  std::vector<Thread> thread;

  Buffers(const ResolvedProblem& r, const BackwardOutputs& out, const Plan& p, std::size_t scratch_bytes, void* base) {
    Arena arena(base);
    const auto sized = [&](std::int64_t count, DType type) {
      return arena.take_bytes(static_cast<std::size_t>(count) * size_of(type));
    };
    dl = sized(p.block_rows * p.block_cols, r.compute);
    x = sized(std::max<std::int64_t>(p.block_rows, 2) * r.h, p.x_type);
    w = sized(p.convert_weight ? p.block_cols * r.h : 0, p.w_type);
    dx = arena.take<float>(p.narrow_hidden && p.rows_outer ? p.block_rows * r.h : 0);
    dw = arena.take<float>(p.narrow_weight && !p.rows_outer ? p.block_cols * r.h : 0);
    for (int k = 0; k < p.threads; ++k) {
      Thread t;
      t.logits = arena.take<float>(std::max<std::int64_t>(p.tile_rows, 2) * p.strip());
      t.bias = arena.take<float>(r.given.bias.absent() ? 0 : p.strip());
      t.scratch = arena.take_bytes(t.scratch_bytes = scratch_bytes);
      thread.push_back(t);
    }
    const std::size_t before = arena.used();
    if (p.narrow_hidden && !p.rows_outer) dx = arena.take<float>(r.n * r.h);
    if (p.narrow_weight && p.rows_outer) dw = arena.take<float>(r.v_valid * r.h);
    db = arena.take<float>(out.bias.absent() ? 0 : r.v_valid);
    accumulator = arena.used() - before;
    bytes = arena.used() + Workspace::kSlack;
  }
  std::size_t in_budget() const { return bytes - accumulator; }
};

std::size_t scratch_bytes(const ResolvedProblem& r, const BackwardOutputs& out, const Plan& p) {
  const GemmLibrary& gemm = gemm_library(r.compute);
  GemmShape s{.m = std::max<std::int64_t>(p.tile_rows, 2),
              .n = p.strip(),
              .k = r.h,
              .a_type = p.x_type,
              .b_type = p.w_type,
              .trans_a = false,
              .trans_b = true,
              .lda = r.h,
              .ldb = r.h,
              .ldc = p.strip(),
              .accumulate = false};
  std::size_t bytes = gemm.scratch_bytes(s);
  s = {.m = std::min(p.block_rows, kHiddenTile),
       .n = r.h,
       .k = p.block_cols,
       .a_type = r.compute,
       .b_type = p.w_type,
       .trans_a = false,
       .trans_b = false,
       .lda = p.block_cols,
       .ldb = r.h,
       .ldc = r.h,
       .accumulate = true};
  if (!out.hidden.absent()) bytes = std::max(bytes, gemm.scratch_bytes(s));
  s = {.m = std::min(p.block_cols, kWeightTile),
       .n = r.h,
       .k = p.block_rows,
       .a_type = r.compute,
       .b_type = p.x_type,
       .trans_a = true,
       .trans_b = false,
       .lda = p.block_cols,
       .ldb = r.h,
       .ldc = r.h,
       .accumulate = false};
  s.narrow_output = p.narrow_weight && out.weight.dtype == r.compute && gemm.narrow_output(s);
  if (!out.weight.absent()) bytes = std::max(bytes, gemm.scratch_bytes(s));
  return bytes;
}

Buffers sizes_of(const ResolvedProblem& r, const BackwardOutputs& out, const Plan& plan) {
  return Buffers(r, out, plan, scratch_bytes(r, out, plan), nullptr);
}

Result<Plan> make_plan(const ResolvedProblem& r, const BackwardOutputs& out, const Execution& e) {
  const std::size_t budget = budget_of(e);
  Plan plan;
  plan.x_type = operand_type(r.given.hidden.dtype, r.compute);
  plan.w_type = operand_type(r.given.weight.dtype, r.compute);
  plan.convert_weight = plan.w_type != r.given.weight.dtype;
  plan.narrow_hidden = !out.hidden.absent() && out.hidden.dtype != DType::kFloat32;
  plan.narrow_weight = !out.weight.absent() && out.weight.dtype != DType::kFloat32;
  plan.rows_outer = (plan.narrow_hidden ? r.n : 0) > (plan.narrow_weight ? r.v_valid : 0);

  // The largest block whose shared part takes half the budget: the products gain with R and S alike.
  const std::int64_t most_rows = std::max<std::int64_t>(r.n, 1), most_cols = std::max<std::int64_t>(r.v_valid, 1);
  const auto shared = [&](std::int64_t rows, std::int64_t cols) {
    Plan p = plan;
    p.block_rows = rows, p.block_cols = cols, p.threads = 0;
    return Buffers(r, out, p, 0, nullptr).in_budget();
  };
  double best = std::numeric_limits<double>::infinity();
  std::int64_t least_rows = most_rows, least_cols = most_cols;
  for (std::int64_t rows = 8192; rows >= 4; rows /= 2)
    for (std::int64_t cols = 8192; cols >= 16; cols /= 2) {
      least_rows = std::min(rows, most_rows), least_cols = std::min(cols, most_cols);
      if (shared(least_rows, least_cols) > budget / 2) continue;
      const double cost = 1.0 / static_cast<double>(least_rows) + 1.0 / static_cast<double>(least_cols);
      if (cost < best) best = cost, plan.block_rows = least_rows, plan.block_cols = least_cols;
    }
  if (plan.block_rows == 0) return budget_too_small(2 * shared(least_rows, least_cols), e);

  std::size_t least = 0;
  for (std::int64_t tile : {128, 64, 32, 16, 4}) {
    plan.tile_rows = std::min(tile, plan.block_rows);
    plan.threads = 1;
    const std::size_t one = sizes_of(r, out, plan).in_budget();
    plan.threads = 2;
    const std::size_t more = sizes_of(r, out, plan).in_budget() - one;
    least = one;
    if (one > budget) continue;
    const int fit =
        static_cast<int>(std::min<std::size_t>((budget - one) / std::max<std::size_t>(more, 1) + 1, 1 << 20));
    plan.threads = std::min(useful_threads(r, e), fit);
    if (fit >= useful_threads(r, e) || tile <= 32) return plan;
  }
  return budget_too_small(least, e);
}

class Backward {
 public:
  Backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e,
           const Plan& plan)
      : r_(r),
        in_(in),
        out_(out),
        plan_(plan),
        gemm_(gemm_library(r.compute)),
        kernels_(tile_kernels()),
        rows_(backward_rows(r, in)),
        workspace_(e, sizes_of(r, out, plan).bytes),
        buffers_(r, out, plan, scratch_bytes(r, out, plan), workspace_.base()),
        team_(plan.threads) {}

  void run() {
    team_.run([&](int member) {
      clear();
      const std::int64_t row_blocks = ceil_div(std::ssize(rows_), plan_.block_rows);
      const std::int64_t col_blocks = ceil_div(r_.v_valid, plan_.block_cols);
      if (row_blocks == 0) return;
      const std::int64_t outer = plan_.rows_outer ? row_blocks : col_blocks;
      const std::int64_t inner = plan_.rows_outer ? col_blocks : row_blocks;
      for (std::int64_t o = 0; o < outer; ++o)
        for (std::int64_t i = 0; i < inner; ++i)
          block(member, plan_.rows_outer ? o : i, plan_.rows_outer ? i : o, row_blocks, col_blocks);
      finish_bias();
    });
  }

 private:
  struct Block {
    const std::int64_t* rows;     // indices of its rows
    std::int64_t row, row_count;  // first row among the computed ones
    std::int64_t col, col_count;
    bool first_row, last_row, first_col, last_col;  // of its column of blocks, of its row of blocks
    Operand x, w;
  };

  /// Writes the zeros: rows that are not computed, padding columns, and everything when nothing is.
  void clear() {
    constexpr std::int64_t kRows = 256;
    if (!out_.hidden.absent() && !out_.accumulate_hidden)
      team_.for_each(ceil_div(r_.n, kRows), [&](std::int64_t item) {
        const std::int64_t begin = item * kRows, end = std::min(r_.n, begin + kRows);
        auto next = std::lower_bound(rows_.begin(), rows_.end(), begin);
        const bool computed = r_.v_valid > 0;
        for (std::int64_t i = begin; i < end; ++i) {
          if (computed && next != rows_.end() && *next == i) {
            ++next;
          } else {
            std::memset(row_data(out_.hidden, i), 0, static_cast<std::size_t>(r_.h) * size_of(out_.hidden.dtype));
          }
        }
      });
    const std::int64_t first = rows_.empty() ? 0 : r_.v_valid;
    if (!out_.weight.absent() && !out_.accumulate_weight)
      team_.for_each(ceil_div(r_.v_local - first, kRows), [&](std::int64_t item) {
        const std::int64_t begin = first + item * kRows;
        for (std::int64_t j = begin; j < std::min(r_.v_local, begin + kRows); ++j)
          std::memset(row_data(out_.weight, j), 0, static_cast<std::size_t>(r_.h) * size_of(out_.weight.dtype));
      });
    if (!out_.bias.absent() && !out_.accumulate_bias)
      team_.for_each(1, [&](std::int64_t) {
        for (std::int64_t j = first; j < r_.v_local; ++j) store_float(out_.bias, j, 0.0);
      });
    if (!out_.bias.absent())
      team_.for_each(1, [&](std::int64_t) { std::fill(buffers_.db, buffers_.db + r_.v_valid, 0.0f); });
  }

  void finish_bias() {
    if (out_.bias.absent()) return;
    team_.for_each(1, [&](std::int64_t) {
      for (std::int64_t j = 0; j < r_.v_valid; ++j)
        store_float(out_.bias, j,
                    static_cast<double>(buffers_.db[j]) + (out_.accumulate_bias ? load_float(out_.bias, j) : 0.0));
    });
  }

  void block(int member, std::int64_t row_block, std::int64_t col_block, std::int64_t row_blocks,
             std::int64_t col_blocks) {
    Block b{};
    b.row = row_block * plan_.block_rows;
    b.rows = rows_.data() + b.row;
    b.row_count = std::min(plan_.block_rows, std::ssize(rows_) - b.row);
    b.col = col_block * plan_.block_cols;
    b.col_count = std::min(plan_.block_cols, r_.v_valid - b.col);
    b.first_row = row_block == 0, b.last_row = row_block == row_blocks - 1;
    b.first_col = col_block == 0, b.last_col = col_block == col_blocks - 1;
    b.x = hidden_rows(b, (plan_.rows_outer || row_blocks == 1) && !b.first_col);
    b.w = weight_rows(b, (!plan_.rows_outer || col_blocks == 1) && !b.first_row);

    Buffers::Thread& t = buffers_.thread[static_cast<std::size_t>(member)];
    const RowTiles tiles{b.row_count, plan_.tile_rows};
    const std::int64_t strips = ceil_div(b.col_count, plan_.strip());
    team_.for_each(tiles.tiles() * strips, [&](std::int64_t item) {
      const std::int64_t tile = item % tiles.tiles();
      make_dl(t, b, tiles.begin(tile), tiles.end(tile), item / tiles.tiles() * plan_.strip());
    });
    const std::int64_t weight_items =
        out_.weight.absent() && out_.bias.absent() ? 0 : ceil_div(b.col_count, kWeightTile);
    const RowTiles hidden_tiles{b.row_count, kHiddenTile};
    const std::int64_t hidden_items = out_.hidden.absent() ? 0 : hidden_tiles.tiles();
    team_.for_each(weight_items + hidden_items, [&](std::int64_t item) {
      if (item < weight_items) {
        add_weight(t, b, item * kWeightTile, std::min(b.col_count, (item + 1) * kWeightTile));
      } else {
        add_hidden(t, b, hidden_tiles.begin(item - weight_items), hidden_tiles.end(item - weight_items));
      }
    });
  }

  /// The block's rows of hidden: in place, or gathered and converted by all threads (once if `ready`).
  Operand hidden_rows(const Block& b, bool ready) {
    const ConstMatrix& hidden = r_.given.hidden;
    if (b.row_count > 1 && consecutive(b.rows, b.row_count) && hidden.dtype == plan_.x_type)
      return in_place(hidden, b.rows[0]);
    const Operand x{buffers_.x, r_.h, plan_.x_type};
    if (ready) return x;
    team_.for_each(std::max<std::int64_t>(b.row_count, 2), [&](std::int64_t i) {  // a lone row twice
      kernels_.convert(row_data(hidden, b.rows[std::min(i, b.row_count - 1)]), hidden.dtype,
                       const_cast<std::byte*>(x.row(i)), x.type, r_.h);
    });
    return x;
  }

  Operand weight_rows(const Block& b, bool ready) {
    const ConstMatrix& weight = r_.given.weight;
    if (!plan_.convert_weight) return in_place(weight, b.col);
    const Operand w{buffers_.w, r_.h, plan_.w_type};
    if (ready) return w;
    constexpr std::int64_t kRows = 64;
    team_.for_each(ceil_div(b.col_count, kRows), [&](std::int64_t item) {
      for (std::int64_t j = item * kRows; j < std::min(b.col_count, (item + 1) * kRows); ++j)
        kernels_.convert(row_data(weight, b.col + j), weight.dtype, const_cast<std::byte*>(w.row(j)), w.type, r_.h);
    });
    return w;
  }

  std::byte* dl(std::int64_t row, std::int64_t col) const {
    return buffers_.dl + static_cast<std::size_t>(row * plan_.block_cols + col) * size_of(r_.compute);
  }

  /// dl of rows [begin, end) of the block and one strip from column `col` of it.
  void make_dl(const Buffers::Thread& t, const Block& b, std::int64_t begin, std::int64_t end, std::int64_t col) {
    const Problem& p = r_.given;
    const std::int64_t cols = std::min(plan_.strip(), b.col_count - col);
    gemm_.multiply({.m = b.row_count == 1 ? 2 : end - begin,
                    .n = cols,
                    .k = r_.h,
                    .a_type = b.x.type,
                    .b_type = b.w.type,
                    .trans_a = false,
                    .trans_b = true,
                    .lda = b.x.stride,
                    .ldb = b.w.stride,
                    .ldc = cols,
                    .accumulate = false},
                   b.x.row(begin), b.w.row(col), t.logits, t.scratch, t.scratch_bytes);
    const float* bias = bias_strip(r_, b.col + col, cols, t.bias);
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t row = b.rows[i];
      const auto value = [&](const ConstVector& v) {
        return v.absent() ? 0.0f : static_cast<float>(load_float(v, row));
      };
      const RowGradient gradient{.map = logit_map(r_, row),
                                 .lse = value(in_.lse),
                                 .entropy = value(in_.entropy),
                                 .a = value(in_.dlogprob),
                                 .g = value(in_.dentropy),
                                 .slope = static_cast<float>(p.logit_scale / temperature(r_, row))};
      // With selected ids every one-hot part is theirs.
      const std::int64_t target = in_.selected.absent() ? target_column(r_, row) : -1;
      kernels_.logit_gradient(t.logits + (i - begin) * cols, cols, bias, gradient,
                              target < 0 ? -1 : target - b.col - col, r_.compute, dl(i, col));
      if (!in_.selected.absent()) mend_selected(row, b.col + col, cols, gradient, dl(i, col));
    }
  }

  /// Rewrites dl at the row's selected ids: their upstream gradient is subtracted in fp32 before the one
  /// rounding, as the target's is.
  void mend_selected(std::int64_t row, std::int64_t first, std::int64_t cols, const RowGradient& g,
                     std::byte* out) const {
    const SelectedGradient& s = in_.selected;
    const Problem& p = r_.given;
    for (std::int64_t k = 0; k < s.ids.cols; ++k) {
      const std::int64_t id = load_int(s.ids.data, s.ids.dtype, row * s.ids.row_stride + k);
      const std::int64_t j = id - p.vocab_start - first;
      if (id < 0 || j < 0 || j >= cols) continue;
      const float z = static_cast<float>(load_float(s.logits, row, k)), log_p = z - g.lse, prob = std::exp(log_p);
      float dz = static_cast<float>(selected_upstream(s, row, id)) - g.a * prob;
      if (g.g != 0 && prob != 0) dz -= g.g * prob * (log_p + g.entropy);
      const float saturation = p.softcap ? z * static_cast<float>(temperature(r_, row) / *p.softcap) : 0.0f;
      store_float(out, r_.compute, j, static_cast<double>(dz * g.slope * (1.0f - saturation * saturation)));
    }
  }

  /// dW and db rows [begin, end) of the block: this block's rows added, and written out after the last.
  void add_weight(const Buffers::Thread& t, const Block& b, std::int64_t begin, std::int64_t end) {
    if (!out_.bias.absent())
      kernels_.add_column_sums(dl(0, begin), r_.compute, b.row_count, end - begin, plan_.block_cols,
                               buffers_.db + b.col + begin);
    if (out_.weight.absent()) return;
    GemmShape shape{.m = end - begin,
                    .n = r_.h,
                    .k = b.row_count,
                    .a_type = r_.compute,
                    .b_type = b.x.type,
                    .trans_a = true,
                    .trans_b = false,
                    .lda = plan_.block_cols,
                    .ldb = b.x.stride,
                    .ldc = std::max(out_.weight.row_stride, r_.h),
                    .accumulate = !b.first_row || out_.accumulate_weight};
    const auto multiply = [&](void* c) {
      gemm_.multiply(shape, dl(0, begin), b.x.data, c, t.scratch, t.scratch_bytes);
    };
    if (!plan_.narrow_weight) return multiply(row_data(out_.weight, b.col + begin));
    if (b.first_row && b.last_row && out_.weight.dtype == r_.compute && gemm_.narrow_output(shape)) {
      shape.narrow_output = true;  // all rows at once: no fp32 sum to keep
      return multiply(row_data(out_.weight, b.col + begin));
    }
    shape.ldc = r_.h;
    float* c = buffers_.dw + ((plan_.rows_outer ? b.col : 0) + begin) * r_.h;
    multiply(c);
    if (!b.last_row) return;
    for (std::int64_t j = begin; j < end; ++j, c += r_.h)
      kernels_.convert(c, DType::kFloat32, row_data(out_.weight, b.col + j), out_.weight.dtype, r_.h);
  }

  /// dX rows [begin, end) of the block: this block's columns added, and written out after the last.
  void add_hidden(const Buffers::Thread& t, const Block& b, std::int64_t begin, std::int64_t end) {
    GemmShape shape{.m = end - begin,
                    .n = r_.h,
                    .k = b.col_count,
                    .a_type = r_.compute,
                    .b_type = b.w.type,
                    .trans_a = false,
                    .trans_b = false,
                    .lda = plan_.block_cols,
                    .ldb = b.w.stride,
                    .ldc = r_.h,
                    .accumulate = !b.first_col};
    if (plan_.narrow_hidden) {
      float* c = buffers_.dx + ((plan_.rows_outer ? 0 : b.row) + begin) * r_.h;
      gemm_.multiply(shape, dl(begin, 0), b.w.data, c, t.scratch, t.scratch_bytes);
      if (!b.last_col) return;
      for (std::int64_t i = begin; i < end; ++i, c += r_.h)
        kernels_.convert(c, DType::kFloat32, row_data(out_.hidden, b.rows[i]), out_.hidden.dtype, r_.h);
      return;
    }
    shape.accumulate |= out_.accumulate_hidden;
    if (consecutive(b.rows + begin, end - begin)) {
      shape.ldc = std::max(out_.hidden.row_stride, r_.h);
      gemm_.multiply(shape, dl(begin, 0), b.w.data, reinterpret_cast<float*>(row_data(out_.hidden, b.rows[begin])),
                     t.scratch, t.scratch_bytes);
      return;
    }
    // Scattered rows: products in the logits tile, then row by row into place.
    const bool add = shape.accumulate;
    const std::int64_t room = std::max<std::int64_t>(plan_.tile_rows, 2) * plan_.strip();
    const std::int64_t cols = std::min(r_.h, room), rows = room / cols;
    shape.accumulate = false;
    for (std::int64_t k = 0; k < r_.h; k += cols)
      for (std::int64_t i = begin; i < end; i += rows) {
        shape.m = std::min(rows, end - i);
        shape.ldc = shape.n = std::min(cols, r_.h - k);
        gemm_.multiply(shape, dl(i, 0), b.w.data + static_cast<std::size_t>(k) * size_of(b.w.type), t.logits, t.scratch,
                       t.scratch_bytes);
        for (std::int64_t j = 0; j < shape.m; ++j) {
          float* to = reinterpret_cast<float*>(row_data(out_.hidden, b.rows[i + j])) + k;
          if (add) {
            kernels_.add(t.logits + j * shape.n, shape.n, to);
          } else {
            std::memcpy(to, t.logits + j * shape.n, static_cast<std::size_t>(shape.n) * sizeof(float));
          }
        }
      }
  }

  const ResolvedProblem& r_;
  const BackwardInputs& in_;
  const BackwardOutputs& out_;
  const Plan plan_;
  const GemmLibrary& gemm_;
  const TileKernels& kernels_;
  const std::vector<std::int64_t> rows_;
  Workspace workspace_;
  Buffers buffers_;
  Team team_;
};

}  // namespace

Result<WorkspaceSize> blocked_backward_workspace(const ResolvedProblem& r, const BackwardOutputs& out,
                                                 const Execution& e) {
  Result<Plan> plan = make_plan(r, out, e);
  if (!plan.ok()) return plan.status();
  const Buffers sizes = sizes_of(r, out, *plan);
  return WorkspaceSize{sizes.bytes, sizes.accumulator};
}

Status blocked_backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out,
                        const Execution& e) {
  Result<Plan> plan = make_plan(r, out, e);
  if (!plan.ok()) return plan.status();
  Backward(r, in, out, e, *plan).run();
  return {};
}

}  // namespace lmhead
