#include "testing/run.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>

#include "core/element.h"

namespace lmhead::testing {
namespace {

/// A strided output and what must be left of it between the elements.
class Output {
 public:
  Output(Arena& arena, bool wanted, DType dtype, std::int64_t rows, std::int64_t cols, const RunOptions& options,
         bool accumulate = false)
      : tensor_(dtype, rows, wanted ? cols : 0, cols + options.out_pad) {
    if (!wanted) return;
    for (std::int64_t i = 0; i < rows && accumulate; ++i)
      for (std::int64_t j = 0; j < cols; ++j) tensor_.set(i, j, prefill(i * cols + j));
    buffer_ = std::make_unique<Buffer>(arena, tensor_.bytes);
  }
  Matrix matrix() const {
    if (!buffer_) return {};
    return {buffer_->data(), tensor_.rows, tensor_.cols, tensor_.row_stride, tensor_.dtype};
  }
  Matrix rows(std::int64_t begin, std::int64_t count) const {
    if (!buffer_) return {};
    return {buffer_->data() + static_cast<std::size_t>(begin * tensor_.row_stride) * size_of(tensor_.dtype), count,
            tensor_.cols, tensor_.row_stride, tensor_.dtype};
  }
  Vector vector() const { return elements(0, tensor_.rows); }
  Vector elements(std::int64_t begin, std::int64_t count) const {
    const Matrix m = rows(begin, count);
    return {m.data, m.rows, m.row_stride, m.dtype};
  }
  /// Values without padding; "" or what was written between them goes to `violation`.
  std::vector<double> collect(const char* name, std::string& violation) {
    if (!buffer_) return {};
    if (!buffer_->guards_intact()) violation = std::string("memory around ") + name + " was written";
    tensor_.bytes = buffer_->download();
    std::vector<double> values;
    values.reserve(static_cast<std::size_t>(tensor_.rows * tensor_.cols));
    const auto size = static_cast<std::int64_t>(size_of(tensor_.dtype));
    for (std::int64_t i = 0; i < tensor_.rows; ++i) {
      for (std::int64_t j = 0; j < tensor_.cols; ++j) values.push_back(tensor_.at(i, j));
      if (i + 1 == tensor_.rows) break;
      for (std::int64_t b = (i * tensor_.row_stride + tensor_.cols) * size; b < (i + 1) * tensor_.row_stride * size;
           ++b)
        if (tensor_.bytes[b] != std::byte{Buffer::kPoison})
          violation = std::string("a cell between rows of ") + name + " was written";
    }
    return values;
  }

 private:
  HostTensor tensor_;
  std::unique_ptr<Buffer> buffer_;
};

class Runner {
 public:
  Runner(const BackendInfo& backend, const TestProblem& problem, const RunOptions& options)
      : arena_(arena(backend.device)), problem_(problem), options_(options), placed_(problem, arena_) {
    execution_.backend = backend.name.c_str();
    execution_.device = backend.device;
    execution_.threads = options.threads;
    execution_.check = options.check;
    execution_.workspace_budget = options.workspace_budget;
  }

  Outcome run() {
    const Case& c = problem_.spec;
    const DType result = problem_.result();
    const bool fp32 = options_.fp32_gradients || options_.accumulate || !options_.shards.empty();
    Output logprob(arena_, true, result, c.n, 1, options_), lse(arena_, true, result, c.n, 1, options_),
        entropy(arena_, c.entropy != EntropyMode::kOff, result, c.n, 1, options_);
    const bool back = options_.backward;
    // Shards share one dX buffer when they accumulate, else each writes its own part.
    const std::int64_t parts =
        options_.accumulate ? 1 : std::max<std::int64_t>(1, static_cast<std::int64_t>(options_.shards.size()));
    Output dx(arena_, back && options_.want_dx, fp32 ? result : c.hidden, c.n * parts, c.h, options_,
              options_.accumulate),
        dw(arena_, back && options_.want_dw, fp32 ? result : c.weight, c.v, c.h, options_, options_.accumulate),
        db(arena_, back && options_.want_db && c.bias.has_value(), fp32 || !c.bias ? result : *c.bias, c.v, 1, options_,
           options_.accumulate);

    forward({logprob.vector(), entropy.vector(), lse.vector()});
    if (back && outcome_.status.ok()) {
      BackwardInputs in;
      in.lse = as_const(lse.vector());
      if (options_.use_dlogprob) in.dlogprob = placed_.dlogprob();
      if (options_.use_dentropy && !problem_.dentropy.absent()) {
        in.dentropy = placed_.dentropy();
        in.entropy = as_const(entropy.vector());
      }
      for_each_shard([&](std::size_t k, const Problem& shard, std::int64_t start) {
        BackwardOutputs out;
        out.hidden = dx.rows(options_.accumulate ? 0 : c.n * static_cast<std::int64_t>(k), c.n);
        out.weight = dw.rows(start, shard.weight.rows);
        out.bias = db.elements(start, shard.weight.rows);

        out.accumulate_hidden = options_.accumulate && options_.want_dx;
        out.accumulate_weight = options_.accumulate && options_.want_dw;
        out.accumulate_bias = options_.accumulate && !out.bias.absent();
        for (int repeat = 0; repeat < options_.backwards; ++repeat)
          call(shard, Operation::kBackward, out, k,
               [&](const Execution& e) { return lmhead::backward(shard, in, out, e); });
      });
    }

    collect(outcome_.logprob, logprob, "logprob");
    collect(outcome_.entropy, entropy, "entropy");
    collect(outcome_.lse, lse, "lse");
    collect(outcome_.dx, dx, "the hidden gradient");
    collect(outcome_.dw, dw, "the weight gradient");
    collect(outcome_.db, db, "the bias gradient");
    const auto one = static_cast<std::size_t>(c.n * c.h);
    for (std::size_t i = one; i < outcome_.dx.size(); ++i) outcome_.dx[i % one] += outcome_.dx[i];
    if (outcome_.dx.size() > one) outcome_.dx.resize(one);
    if (const std::string changed = placed_.changed_input(); !changed.empty()) outcome_.violation = changed;
    return std::move(outcome_);
  }

 private:
  static ConstVector as_const(const Vector& v) { return {v.data, v.size, v.stride, v.dtype}; }

  void collect(std::vector<double>& to, Output& output, const char* name) {
    to = output.collect(name, outcome_.violation);
  }

  /// fn(k, shard problem, start) for each shard, or once for the whole head.
  template <class Fn>
  void for_each_shard(const Fn& fn) {
    const Problem& whole = placed_.problem();
    if (options_.shards.empty()) return fn(std::size_t{0}, whole, std::int64_t{0});
    std::int64_t start = 0;
    for (std::size_t k = 0; k < options_.shards.size(); ++k) {
      Problem shard = whole;
      shard.weight.rows = options_.shards[k];
      shard.weight.data = static_cast<const std::byte*>(whole.weight.data) +
                          static_cast<std::size_t>(start * whole.weight.row_stride) * size_of(whole.weight.dtype);
      if (!whole.bias.absent()) {
        shard.bias.size = options_.shards[k];
        shard.bias.data = static_cast<const std::byte*>(whole.bias.data) +
                          static_cast<std::size_t>(start * whole.bias.stride) * size_of(whole.bias.dtype);
      }
      shard.vocab_start = start;
      shard.vocab_size = problem_.spec.v;
      fn(k, shard, start);
      start += options_.shards[k];
    }
  }

  void forward(const ForwardOutputs& out) {
    if (options_.shards.empty()) {
      call(placed_.problem(), Operation::kForward, {}, 0,
           [&](const Execution& e) { return lmhead::forward(placed_.problem(), out, e); });
      return;
    }
    RunOptions dense = options_;
    dense.out_pad = 0;
    const std::int64_t n = problem_.spec.n, ranks = static_cast<std::int64_t>(options_.shards.size());
    Output states(arena_, true, problem_.result(), n * ranks, kStateWidth, dense);
    Problem first;
    for_each_shard([&](std::size_t k, const Problem& shard, std::int64_t) {
      if (k == 0) first = shard;
      call(shard, Operation::kForwardPartial, {}, k, [&](const Execution& e) {
        return lmhead::forward_partial(shard, states.rows(static_cast<std::int64_t>(k) * n, n), e);
      });
    });
    if (!outcome_.status.ok()) return;
    const Matrix m = states.matrix();
    outcome_.status = lmhead::combine(first, {m.data, m.rows, m.cols, m.row_stride, m.dtype}, out, execution_);
    collect(outcome_.states, states, "the states");
  }

  /// Room for what the forward of shard k keeps, as the query asks for.
  void reserve_cache(const Problem& problem, std::size_t k) {
    const Result<std::size_t> size = cache_size(problem, options_.cache_budget, execution_);
    outcome_.status = size.status();
    if (!size.ok()) return;
    if (*size > options_.cache_budget) outcome_.violation = "cache_size answered more than its budget";
    caches_.resize(std::max(caches_.size(), k + 1));
    caches_[k] = std::make_unique<Buffer>(arena_, *size);
    outcome_.cache_bytes += *size;
  }

  /// Runs fn with a poisoned workspace of exactly the size that the query asks for, and shard k's cache.
  template <class Fn>
  void call(const Problem& problem, Operation operation, const BackwardOutputs& gradients, std::size_t k,
            const Fn& fn) {
    if (options_.cache_budget > 0 && operation != Operation::kBackward && outcome_.status.ok())
      reserve_cache(problem, k);
    if (!outcome_.status.ok()) return;
    const std::vector<std::string> known = configurations(execution_.backend, operation);
    const bool has = std::find(known.begin(), known.end(), options_.configuration) != known.end();
    execution_.configuration = has ? options_.configuration.c_str() : kDefaultConfiguration;
    Result<WorkspaceSize> size = workspace_size(problem, operation, gradients, execution_);
    if (!size.ok()) {
      outcome_.status = size.status();
      return;
    }
    if (!options_.own_workspace) {
      outcome_.status = fn(execution_);
      return;
    }
    const Buffer workspace(arena_, size->bytes);
    Execution with = execution_;
    with.workspace = workspace.data();
    with.workspace_bytes = workspace.size();
    if (options_.cache_budget > 0) {
      with.cache = caches_[k]->data();
      with.cache_bytes = caches_[k]->size();
    }
    outcome_.status = fn(with);
    if (options_.cache_budget > 0 && !caches_[k]->guards_intact())
      outcome_.violation = "memory around the cache was written";
    if (!workspace.guards_intact()) outcome_.violation = "memory around the workspace was written";
  }

  Arena& arena_;
  const TestProblem& problem_;
  const RunOptions& options_;
  PlacedProblem placed_;
  Execution execution_;
  std::vector<std::unique_ptr<Buffer>> caches_;  ///< one a shard
  Outcome outcome_;
};

}  // namespace

Outcome run(const BackendInfo& backend, const TestProblem& problem, const RunOptions& options) {
  return Runner(backend, problem, options).run();
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) { return first_difference(a, b).empty(); }

std::string first_difference(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::to_string(a.size()) + " values against " + std::to_string(b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::bit_cast<std::uint64_t>(a[i]) == std::bit_cast<std::uint64_t>(b[i])) continue;
    char text[96];
    std::snprintf(text, sizeof text, "element %zu: %.9g against %.9g", i, a[i], b[i]);
    return text;
  }
  return {};
}

}  // namespace lmhead::testing
