// The precision promise as a check: errors of an outcome against fp64, and the bounds they must keep.
#pragma once

#include <string>

#include "testing/exact.h"
#include "testing/run.h"

namespace lmhead::testing {

/// Largest errors of one outcome and the bounds in force. dx, dw and db are relative Frobenius errors.
struct Report {
  double logprob_err = 0, entropy_err = 0, dx_err = 0, dw_err = 0, db_err = 0;
  /// The bound on logprob and entropy at the row with the largest one; bounds of the gradients.
  double bound = 0, dx_bound = 0, dw_bound = 0, db_bound = 0;
  std::string failure;  ///< "" or what broke its bound, with row, value and every parameter

  bool ok() const { return failure.empty(); }
};

/// Checks the results that `outcome` holds against fp64:
///   |logprob - exact|, |entropy - exact| <= 4 baseline + 1e-6 + 2^-22 max(|m|, |z_y|, |value|),
///     baseline = largest error over the rows of the vendor GEMM with fp32 output and an fp64 softmax;
///   ||dX - exact|| <= 1.25 floor ||exact||, the same for dW and db, where floor is the relative error of
///     exact dl rounded once to the compute type, vendor GEMMs and rounding of the result. For fp32
///     inputs dl comes from the vendor's fp32 logits (or exact ones rounded to fp32) and from lse and
///     entropy in fp32 as the contract saves them, in fp64 or plain fp32 operations: the largest error;
///   where one column holds all the mass (one_hot, aligned, V = 1) the effect of an error of
///     1e-6 + 2^-22 max(...) in log p comes on top; on db one fp32 rounding a row;
///   single rows of dX: no more than 4 x the worst row of the floor plus that effect, so that one wrong
///     row in a large batch shows;
///   logprob <= 0 <= entropy; rows that are not active hold 0; rows without upstream gradient have dX = 0.
/// fp64 problems: 1e-11 (1 + max(|m|, |z_y|)) and 1e-10 relative
/// plus the effect of 1e-12 in log p.
Report check(const TestProblem& problem, const RunOptions& options, const Outcome& outcome, Arena& arena);

}  // namespace lmhead::testing
