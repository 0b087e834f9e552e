// Forward of the "cpu" backend. A work item is (row tile, strip of up to two segments): one product into
// the thread's tile, then one state for each row and segment. A last phase folds each row's states in
// canonical order, so no result depends on which thread did what, or when.
#include "core/return_if_error.h"
#include "cpu/blocked.h"

namespace lmhead {
namespace {

struct Segment {
  std::int64_t octant, begin, end;  // columns of the shard
};
struct Strip {
  std::int64_t begin, end, first_segment, last_segment;
};

struct Vocabulary {
  std::vector<Segment> segments;
  std::vector<Strip> strips;
  std::int64_t widest = 0, narrowest = kStripColumns;

  Vocabulary(const ResolvedProblem& r, std::int64_t strip_columns) {
    const std::int64_t start = r.given.vocab_start, per_strip = strip_columns / kSegmentColumns;
    for_each_segment(r.order(), start, start + r.v_valid, [&](std::int64_t octant, std::int64_t b, std::int64_t e) {
      const std::int64_t from_octant = b - octant * r.order().octant_size();
      const auto index = static_cast<std::int64_t>(segments.size());
      if (segments.empty() || segments.back().octant != octant || from_octant / kSegmentColumns % per_strip == 0)
        strips.push_back({b - start, b - start, index, index});
      segments.push_back({octant, b - start, e - start});
      strips.back().end = e - start;
      strips.back().last_segment = index + 1;
    });
    for (const Strip& strip : strips) {
      widest = std::max(widest, strip.end - strip.begin);
      narrowest = std::min(narrowest, strip.end - strip.begin);
    }
  }
};

/// Rows of a tile, where the budget and the thread count leave the choice. oneDNN copies the weight's tile once a
/// product: with 128 rows that copy is 5 to 10 % of it.
constexpr std::int64_t kTileRows = 256;
constexpr Configuration kConfigurations[] = {{kDefaultConfiguration, kTileRows}, {"rows_64", 64}, {"rows_128", 128}};
/// Items a thread below which the default's tiles are made smaller, to share the work better.
constexpr std::int64_t kItems = 8;

/// Sizes that fit the budget. None changes a result bit.
struct Plan {
  int threads = 1;
  std::int64_t tile_rows = 0, group_rows = 0, strip_columns = kStripColumns;
  std::int64_t block_strips = 0;  // strips of the weight that are copied at a time; 0: used in place
  DType x_type, w_type;
  bool copy_x = false;  // rows are brought together even where they could be read in place
};

struct Buffers {
  SoftmaxState* states;  // [group_rows, segments]
  std::byte* x;          // [group_rows, H]
  std::byte* w;          // [block_strips * strip_columns, H]
  struct Thread {
    float *logits, *bias;
    std::byte* scratch;
    std::size_t scratch_bytes;
  };
  std::vector<Thread> thread;
  std::size_t bytes;

  Buffers(const ResolvedProblem& r, const Plan& plan, const Vocabulary& vocabulary, std::size_t scratch_bytes,
          void* base) {
    Arena arena(base);
    const std::int64_t group = std::max<std::int64_t>(plan.group_rows, 2);
    states = arena.take<SoftmaxState>(plan.group_rows * static_cast<std::int64_t>(vocabulary.segments.size()));
    x = arena.take_bytes(static_cast<std::size_t>(group * r.h) * size_of(plan.x_type));
    w = arena.take_bytes(static_cast<std::size_t>(plan.block_strips * plan.strip_columns * r.h) * size_of(plan.w_type));
    for (int k = 0; k < plan.threads; ++k) {
      Thread t;
      t.logits = arena.take<float>(std::max<std::int64_t>(plan.tile_rows, 2) * vocabulary.widest);
      t.bias = arena.take<float>(r.given.bias.absent() ? 0 : vocabulary.widest);
      t.scratch = arena.take_bytes(t.scratch_bytes = scratch_bytes);
      thread.push_back(t);
    }
    bytes = arena.used() + Workspace::kSlack;
  }
};

std::size_t scratch_bytes(const ResolvedProblem& r, const Plan& plan, const Vocabulary& vocabulary) {
  const GemmShape largest{.m = std::max<std::int64_t>(plan.tile_rows, 2),
                          .n = vocabulary.widest,
                          .k = r.h,
                          .a_type = plan.x_type,
                          .b_type = plan.w_type,
                          .trans_a = false,
                          .trans_b = true,
                          .lda = r.h,
                          .ldb = r.h,
                          .ldc = vocabulary.widest,
                          .accumulate = false};
  return std::max(invariant_gemm(r.compute, vocabulary.widest).scratch_bytes(largest),
                  invariant_gemm(r.compute, vocabulary.narrowest).scratch_bytes(largest));
}

std::size_t bytes_of(const ResolvedProblem& r, const Plan& plan, const Vocabulary& vocabulary) {
  return Buffers(r, plan, vocabulary, scratch_bytes(r, plan, vocabulary), nullptr).bytes;
}

Result<Plan> make_plan(const ResolvedProblem& r, const Execution& e) {
  const std::size_t budget = budget_of(e);
  Plan plan;
  plan.x_type = operand_type(r.given.hidden.dtype, r.compute);
  plan.w_type = operand_type(r.given.weight.dtype, r.compute);
  const std::int64_t row = std::max<std::int64_t>(r.h * static_cast<std::int64_t>(size_of(plan.w_type)), 1);
  const auto quarter = static_cast<std::int64_t>(budget / 4);
  const auto moved = [&](const ConstMatrix& m) {
    return gemm_library(r.compute).stride_changes_bits(r.h, row_stride(m));
  };
  plan.copy_x = moved(r.given.hidden);
  const bool convert = plan.w_type != r.given.weight.dtype || moved(r.given.weight);
  if (convert && kStripColumns * row > quarter) plan.strip_columns = kSegmentColumns;
  const Vocabulary vocabulary(r, plan.strip_columns);
  if (convert)
    plan.block_strips = std::clamp<std::int64_t>(quarter / (plan.strip_columns * row), 1,
                                                 std::max<std::int64_t>(1, std::ssize(vocabulary.strips)));
  // Rows of a group: what a quarter of the budget holds of states and gathered rows.
  const std::int64_t per_row = std::ssize(vocabulary.segments) * static_cast<std::int64_t>(sizeof(SoftmaxState)) +
                               r.h * static_cast<std::int64_t>(size_of(plan.x_type));
  std::size_t least = 0;
  const std::int64_t first_tile = r.configuration != nullptr ? r.configuration->value : kTileRows;
  for (std::int64_t tile : {256, 128, 64, 32, 16, 4}) {
    if (tile > first_tile) continue;
    if (first_tile == kTileRows && tile > 64 &&
        ceil_div(r.n, tile) * std::ssize(vocabulary.strips) < kItems * useful_threads(r, e))
      continue;
    plan.tile_rows = std::min(tile, std::max<std::int64_t>(r.n, 1));
    plan.group_rows = std::clamp(quarter / per_row / tile * tile, plan.tile_rows, std::max<std::int64_t>(r.n, 1));
    plan.threads = 1;
    const std::size_t one = bytes_of(r, plan, vocabulary);
    plan.threads = 2;
    const std::size_t more = bytes_of(r, plan, vocabulary) - one;
    least = one;
    if (one > budget) continue;
    const int fit =
        static_cast<int>(std::min<std::size_t>((budget - one) / std::max<std::size_t>(more, 1) + 1, 1 << 20));
    plan.threads = std::min(useful_threads(r, e), fit);
    if (fit >= useful_threads(r, e) || tile <= 32) return plan;
  }
  return budget_too_small(least, e);
}

class Forward {
 public:
  Forward(const ResolvedProblem& r, SoftmaxState* state, const Execution& e, const Plan& plan)
      : r_(r),
        plan_(plan),
        vocabulary_(r, plan.strip_columns),
        kernels_(tile_kernels()),
        rows_(forward_rows(r)),
        out_(state),
        workspace_(e, bytes_of(r, plan, vocabulary_)),
        buffers_(r, plan, vocabulary_, scratch_bytes(r, plan, vocabulary_), workspace_.base()),
        team_(plan.threads) {}

  void run() {
    std::fill(out_, out_ + r_.n, empty_state());
    if (rows_.empty() || vocabulary_.segments.empty()) return;
    team_.run([&](int member) {
      for (std::int64_t first = 0; first < std::ssize(rows_); first += plan_.group_rows)
        group(member, rows_.data() + first, std::min(plan_.group_rows, std::ssize(rows_) - first));
    });
  }

 private:
  void group(int member, const std::int64_t* rows, std::int64_t count) {
    const ConstMatrix& hidden = r_.given.hidden;
    Operand x = in_place(hidden, rows[0]);
    if (count == 1 || !consecutive(rows, count) || x.type != plan_.x_type || plan_.copy_x) {
      x = {buffers_.x, r_.h, plan_.x_type};
      team_.for_each(std::max<std::int64_t>(count, 2), [&](std::int64_t i) {  // a lone row twice
        kernels_.convert(row_data(hidden, rows[std::min(i, count - 1)]), hidden.dtype, const_cast<std::byte*>(x.row(i)),
                         x.type, r_.h);
      });
    }
    const RowTiles tiles{count, plan_.tile_rows};
    const std::int64_t strips = std::ssize(vocabulary_.strips);
    const std::int64_t block = plan_.block_strips > 0 ? plan_.block_strips : strips;
    for (std::int64_t s = 0; s < strips; s += block) {
      const Strip* strip = &vocabulary_.strips[static_cast<std::size_t>(s)];
      const std::int64_t in_block = std::min(block, strips - s);
      const Operand w = weight_block(strip, in_block);
      team_.for_each(in_block * tiles.tiles(), [&](std::int64_t item) {
        const std::int64_t t = item % tiles.tiles(), k = item / tiles.tiles();
        const Operand strip_w{w.row(strip[k].begin - strip[0].begin), w.stride, w.type};
        fold_tile(buffers_.thread[static_cast<std::size_t>(member)], strip[k], strip_w, x, rows, tiles.begin(t),
                  tiles.end(t), count);
      });
    }
    constexpr std::int64_t kRows = 64;
    team_.for_each(ceil_div(count, kRows), [&](std::int64_t item) {
      for (std::int64_t i = item * kRows; i < std::min(count, (item + 1) * kRows); ++i) out_[rows[i]] = fold_row(i);
    });
  }

  /// The weight rows of strips [strip, strip + count), converted or packed by all threads where needed.
  Operand weight_block(const Strip* strip, std::int64_t count) {
    const ConstMatrix& weight = r_.given.weight;
    if (plan_.block_strips == 0) return in_place(weight, strip->begin);
    const Operand w{buffers_.w, r_.h, plan_.w_type};
    constexpr std::int64_t kRows = 64;
    const std::int64_t begin = strip->begin, rows = strip[count - 1].end - begin;
    team_.for_each(ceil_div(rows, kRows), [&](std::int64_t item) {
      for (std::int64_t j = item * kRows; j < std::min(rows, (item + 1) * kRows); ++j)
        kernels_.convert(row_data(weight, begin + j), weight.dtype, const_cast<std::byte*>(w.row(j)), w.type, r_.h);
    });
    return w;
  }

  void fold_tile(const Buffers::Thread& t, const Strip& strip, const Operand& w, const Operand& x,
                 const std::int64_t* rows, std::int64_t begin, std::int64_t end, std::int64_t count) {
    const std::int64_t cols = strip.end - strip.begin, segments = std::ssize(vocabulary_.segments);
    invariant_gemm(r_.compute, cols)
        .multiply({.m = count == 1 ? 2 : end - begin,
                   .n = cols,
                   .k = r_.h,
                   .a_type = x.type,
                   .b_type = w.type,
                   .trans_a = false,
                   .trans_b = true,
                   .lda = x.stride,
                   .ldb = w.stride,
                   .ldc = cols,
                   .accumulate = false},
                  x.row(begin), w.data, t.logits, t.scratch, t.scratch_bytes);
    const float* bias = bias_strip(r_, strip.begin, cols, t.bias);
    for (std::int64_t i = begin; i < end; ++i) {
      const LogitMap map = logit_map(r_, rows[i]);
      const std::int64_t target = target_column(r_, rows[i]);
      for (std::int64_t s = strip.first_segment; s < strip.last_segment; ++s) {
        const Segment& segment = vocabulary_.segments[static_cast<std::size_t>(s)];
        const std::int64_t at = segment.begin - strip.begin;
        buffers_.states[i * segments + s] =
            kernels_.segment_state(t.logits + (i - begin) * cols + at, segment.end - segment.begin,
                                   bias == nullptr ? nullptr : bias + at, map, target - segment.begin);
      }
    }
  }

  SoftmaxState fold_row(std::int64_t i) const {
    SoftmaxState octants[kOctants];
    for (SoftmaxState& s : octants) s = empty_state();
    const SoftmaxState* states = buffers_.states + i * std::ssize(vocabulary_.segments);
    for (const Segment& segment : vocabulary_.segments)
      octants[segment.octant] = merge(octants[segment.octant], *states++);
    return merge_tree(octants, kOctants);
  }

  const ResolvedProblem& r_;
  const Plan plan_;
  const Vocabulary vocabulary_;
  const TileKernels& kernels_;
  const std::vector<std::int64_t> rows_;
  SoftmaxState* const out_;
  Workspace workspace_;
  Buffers buffers_;
  Team team_;
};

/// Rows of a call are done in chunks of this many, so its workspace stops growing there.
constexpr std::int64_t kMostRows = 16384;

/// The first chunk, which is the largest: its plan serves them all.
ResolvedProblem first_chunk(const ResolvedProblem& r) { return row_range(r, 0, std::min(r.n, kMostRows)); }

/// Runs done(part, begin, end) with each chunk's states.
template <class Done>
Status for_each_chunk(const ResolvedProblem& r, const Execution& e, SoftmaxState* states, bool keep, Done&& done) {
  Result<Plan> plan = make_plan(first_chunk(r), e);
  if (!plan.ok()) return plan.status();
  for (std::int64_t begin = 0; begin < r.n; begin += kMostRows) {
    const std::int64_t end = std::min(r.n, begin + kMostRows);
    const ResolvedProblem part = row_range(r, begin, end);
    SoftmaxState* chunk = states + (keep ? begin : 0);
    Forward(part, chunk, e, *plan).run();
    LMHEAD_RETURN_IF_ERROR(done(part, chunk, begin, end));
  }
  return {};
}

}  // namespace

std::span<const Configuration> blocked_configurations(Operation operation) {
  // The backward's tiles cut the sums over rows: other tiles would be other bits.
  return operation == Operation::kBackward ? std::span<const Configuration>() : kConfigurations;
}

Result<WorkspaceSize> blocked_forward_workspace(const ResolvedProblem& r, const Execution& e) {
  const ResolvedProblem part = first_chunk(r);
  Result<Plan> plan = make_plan(part, e);
  if (!plan.ok()) return plan.status();
  return WorkspaceSize{bytes_of(part, *plan, Vocabulary(part, plan->strip_columns)), 0};
}

Status blocked_forward_partial(const ResolvedProblem& r, const Matrix& state, const Execution& e) {
  return for_each_chunk(r, e, static_cast<SoftmaxState*>(state.data), true, [](auto&&...) { return Status(); });
}

Status blocked_forward(const ResolvedProblem& r, const ForwardOutputs& out, const Execution& e) {
  std::vector<SoftmaxState> states(static_cast<std::size_t>(std::min(r.n, kMostRows)));
  return for_each_chunk(r, e, states.data(), false,
                        [&](const ResolvedProblem& part, SoftmaxState* chunk, std::int64_t begin, std::int64_t end) {
                          return combine_host(part, {chunk, part.n, kStateWidth, kStateWidth, DType::kFloat32},
                                              row_range(out, begin, end), e);
                        });
}

}  // namespace lmhead
