// What the forward's and the backward's plans share: operands as the kernels take them, rows and columns in the
// workspace.
#pragma once

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/rows.h"
#include "cuda/sm90_forward.h"
#include "cuda/sm90_list.h"
#include "cuda/sm90_rows.h"
#include "cuda/sm90_tiles.h"

namespace lmhead::cuda::sm90 {

/// How many row blocks share weight tiles in L2, in per cent of the default: the configuration.
inline std::int64_t l2_percent(const ResolvedProblem& r) {
  return r.configuration != nullptr ? r.configuration->value : 100;
}

Status budget_too_small(std::size_t needed, const Execution& e);

/// A row stride that TMA accepts also where one row leaves it open.
inline std::int64_t stride_of(const ConstMatrix& m) { return m.rows > 1 ? m.row_stride : round_up(m.cols, 8); }

Head make_head(const Problem& p, const float* bias);
Segments make_segments(const SegmentGrid& grid, std::int64_t vocab_start);

/// Rows [begin, begin + rows) of hidden, and the valid rows of the weight, in boxes of kTileDepth columns.
Status hidden_map(CUtensorMap* map, const ResolvedProblem& r, std::int64_t begin, std::int64_t rows, int box_rows);
Status weight_map(CUtensorMap* map, const ResolvedProblem& r, int box_rows);

/// What both directions keep about rows and columns.
struct CommonBuffers {
  std::int32_t *index, *parts;
  std::int64_t* active;
  RowTerms* terms;
  int* compacted;
  float* bias;

  CommonBuffers(Workspace& w, const ResolvedProblem& r, std::int64_t rows) {
    static_cast<void>(w.take_bytes(kCheckBytes));
    index = w.take<std::int32_t>(rows);
    active = w.take<std::int64_t>(1);
    parts = w.take<std::int32_t>(list_parts(rows));
    terms = w.take<RowTerms>(rows);
    compacted = w.take<int>(1);
    bias = r.given.bias.absent() ? nullptr : w.take<float>(padded(r));
  }
  static std::int64_t padded(const ResolvedProblem& r) { return r.v_valid + kTileColumns; }

  void prepare_bias(const ResolvedProblem& r, cudaStream_t stream) const {
    if (bias != nullptr) load_bias(r.given.bias, r.v_valid, padded(r), bias, stream);
  }
  ListBuffers list() const { return {parts, index, active, terms}; }
};

// The calls of the backend (core/implementation.h), and the workspace that each needs.
Status run_forward(const ResolvedProblem& r, const ForwardOutputs& outputs, SoftmaxState* states, const Execution& e);
Result<std::size_t> forward_workspace(const ResolvedProblem& r, const Execution& e);
Status run_backward(const ResolvedProblem& r, const BackwardInputs& in, const BackwardOutputs& out, const Execution& e);
Result<WorkspaceSize> backward_workspace(const ResolvedProblem& r, const BackwardOutputs& out, const Execution& e);

}  // namespace lmhead::cuda::sm90
