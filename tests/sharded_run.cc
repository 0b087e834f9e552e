#include "sharded_run.h"

#include "core/element.h"
#include "rank_threads.h"

namespace lmhead::testing {

namespace {

std::vector<std::byte> at_first(DType dtype, std::int64_t count, bool prefilled) {
  std::vector<std::byte> content(static_cast<std::size_t>(count) * size_of(dtype), std::byte{Buffer::kPoison});
  for (std::int64_t i = 0; prefilled && i < count; ++i) store_float(content.data(), dtype, i, prefill(i));
  return content;
}

}  // namespace

RankOutput::RankOutput(Arena& arena, DType dtype, std::int64_t count, bool prefilled)
    : dtype_(dtype), count_(count), buffer_(arena, at_first(dtype, count, prefilled)) {}

std::vector<double> RankOutput::values() const {
  const std::vector<std::byte> bytes = buffer_.download();
  std::vector<double> values(static_cast<std::size_t>(count_));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = load_float(bytes.data(), dtype_, static_cast<std::int64_t>(i));
  return values;
}

RankWorkspace::RankWorkspace(Arena& arena, int rank, const Result<WorkspaceSize>& size, Execution& execution) {
  if (!size.ok() || (arena.device() == Device::kCpu && rank % 2 == 1)) return;
  buffer_ = std::make_unique<Buffer>(arena, size->bytes);
  execution.workspace = buffer_->data();
  execution.workspace_bytes = size->bytes;
}

Problem shard_of(const Problem& whole, VocabShard shard) {
  Problem p = whole;
  p.weight.data = row_data(p.weight, shard.start);
  p.weight.rows = shard.size;
  if (!p.bias.absent()) {
    p.bias.data = static_cast<const std::byte*>(p.bias.data) +
                  shard.start * p.bias.stride * static_cast<std::int64_t>(size_of(p.bias.dtype));
    p.bias.size = shard.size;
  }
  p.vocab_start = shard.start;
  p.vocab_size = whole.weight.rows;
  return p;
}

Problem shard_of(const TestProblem& problem, VocabShard shard) { return shard_of(problem.host(), shard); }

RankResult run_rank(const BackendInfo& backend, const TestProblem& problem, Communicator& tp,
                    const ShardedOptions& options) {
  VocabShard shard = vocab_shard(problem.spec.v, tp.rank(), tp.size());
  if (!options.shards.empty()) {
    shard.start = 0;
    for (int r = 0; r < tp.rank(); ++r) shard.start += options.shards[static_cast<std::size_t>(r)];
    shard.size = options.shards[static_cast<std::size_t>(tp.rank())];
  }
  Arena& memory = arena(backend.device);
  const Stream stream(memory);
  const PlacedProblem placed(problem, memory);
  const Problem p = shard_of(placed.problem(), shard);
  Execution execution;
  execution.backend = backend.name.c_str();
  execution.device = backend.device;
  execution.stream = stream.get();
  execution.check = options.check;
  execution.threads = 1;
  const std::int64_t n = problem.spec.n, h = problem.spec.h;
  const DType result = problem.result();
  const bool with_entropy = p.entropy != EntropyMode::kOff;

  RankResult out;
  const RankOutput logprob(memory, result, n), entropy(memory, result, with_entropy ? n : 0), lse(memory, result, n);
  ForwardOutputs outputs{logprob.vector(), {}, lse.vector()};
  if (with_entropy) outputs.entropy = entropy.vector();
  const Traffic before = tp.traffic();
  const auto since = [&tp](const Traffic& start) {
    const Traffic& now = tp.traffic();
    return Traffic{now.all_gathers - start.all_gathers, now.all_reduces - start.all_reduces,
                   now.reduce_scatters - start.reduce_scatters, now.exchanges - start.exchanges,
                   now.bytes_sent - start.bytes_sent};
  };
  const auto failed = [&out](const char* what) {
    if (out.status.ok()) out.status = {StatusCode::kInternal, what};
  };
  Execution forward = execution;
  const RankWorkspace forward_memory(
      memory, tp.rank(), sharded_workspace_size(p, tp, Operation::kForward, ReduceHiddenGrad::kNone, {}, execution),
      forward);
  out.status = sharded_forward(p, tp, outputs, forward);
  out.forward = since(before);
  out.logprob = logprob.values();
  out.entropy = entropy.values();
  out.lse = lse.values();
  if (!forward_memory.intact()) failed("memory around the workspace of the forward was written");
  if (!out.status.ok() || options.forward_only) return out;

  const std::int64_t rows = options.reduce == ReduceHiddenGrad::kReduceScatter ? n / tp.size() : n;
  const RankOutput dx(memory, options.fp32_gradients ? result : problem.spec.hidden, rows * h,
                      options.accumulate_hidden);
  const RankOutput dw(memory, options.fp32_gradients ? result : problem.spec.weight, shard.size * h);
  const RankOutput db(memory, options.fp32_gradients || p.bias.absent() ? result : p.bias.dtype,
                      p.bias.absent() ? 0 : shard.size);
  BackwardInputs inputs;
  inputs.lse = lse.input();
  inputs.dlogprob = placed.dlogprob();
  if (p.entropy == EntropyMode::kGrad) {
    inputs.entropy = entropy.input();
    inputs.dentropy = placed.dentropy();
  }
  BackwardOutputs gradients;
  gradients.hidden = dx.matrix(h);
  gradients.accumulate_hidden = options.accumulate_hidden;
  if (shard.size > 0) gradients.weight = dw.matrix(h);
  if (!p.bias.absent() && shard.size > 0) gradients.bias = db.vector();
  const Traffic between = tp.traffic();
  Execution backward = execution;
  const RankWorkspace backward_memory(
      memory, tp.rank(), sharded_workspace_size(p, tp, Operation::kBackward, options.reduce, gradients, execution),
      backward);
  out.status = sharded_backward(p, tp, inputs, gradients, options.reduce, backward);
  out.backward = since(between);
  out.dx = dx.values();
  for (std::size_t i = 0; options.accumulate_hidden && i < out.dx.size(); ++i)
    out.dx[i] -= prefill(static_cast<std::int64_t>(i));
  out.dw = dw.values();
  out.db = db.values();
  if (!backward_memory.intact()) failed("memory around the workspace of the backward was written");
  if (!placed.changed_input().empty()) failed("an input was written");
  return out;
}

Outcome assemble(const std::vector<RankResult>& ranks, ReduceHiddenGrad reduce, std::string& failure) {
  Outcome all;
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    const RankResult& rank = ranks[r];
    if (!rank.status.ok()) {
      all.status = rank.status;
      return all;
    }
    if (r == 0) {
      all.logprob = rank.logprob;
      all.entropy = rank.entropy;
      all.lse = rank.lse;
    } else if (!same_bits(rank.logprob, all.logprob) || !same_bits(rank.entropy, all.entropy) ||
               !same_bits(rank.lse, all.lse)) {
      failure += "rank " + std::to_string(r) + " got other results than rank 0; ";
    }
    if (r == 0) {
      all.dx = rank.dx;
    } else if (reduce == ReduceHiddenGrad::kNone) {
      for (std::size_t i = 0; i < all.dx.size(); ++i) all.dx[i] += rank.dx[i];
    } else if (reduce == ReduceHiddenGrad::kReduceScatter) {
      all.dx.insert(all.dx.end(), rank.dx.begin(), rank.dx.end());
    } else if (!same_bits(rank.dx, all.dx)) {
      failure += "rank " + std::to_string(r) + " got another sum of dX than rank 0; ";
    }
    all.dw.insert(all.dw.end(), rank.dw.begin(), rank.dw.end());
    all.db.insert(all.db.end(), rank.db.begin(), rank.db.end());
  }
  return all;
}

Outcome run_threads(const BackendInfo& backend, const TestProblem& problem, int tp, const ShardedOptions& options,
                    std::string& failure, Traffic* forward, Traffic* backward) {
  std::vector<RankResult> results(static_cast<std::size_t>(tp));
  run_ranks(
      tp,
      [&](Communicator& c) {
        RankResult& mine = results[static_cast<std::size_t>(c.rank())];
        mine = run_rank(backend, problem, c, options);
        return mine.status;
      },
      std::chrono::seconds(30), backend.device);
  if (forward != nullptr) *forward = results.front().forward;
  if (backward != nullptr) *backward = results.front().backward;
  return assemble(results, options.reduce, failure);
}

std::vector<BackendInfo> cpu_backends() {
  std::vector<BackendInfo> list;
  for (const BackendInfo& b : backends())
    if (b.available && b.device == Device::kCpu) list.push_back(b);
  return list;
}

}  // namespace lmhead::testing
