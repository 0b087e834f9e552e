// The formulas in fp64, straight from their definition: two passes over all logits, no running state.
// Shares nothing with the library but the conversion of 16-bit numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "testing/problem.h"

namespace lmhead::testing {

/// Per-row results from finished logits.
struct Scores {
  std::vector<double> z;                      ///< [N, valid vocabulary], natural units; rows that are not active are 0
  std::vector<double> max, target;            ///< [N] largest logit, logit at the target (0 outside the vocabulary)
  std::vector<double> logprob, entropy, lse;  ///< [N]
};

/// <hidden_i, weight_j> in fp64 of the values rounded to the compute type, [N, valid vocabulary].
std::vector<double> exact_products(const TestProblem& problem);
/// The same by the vendor GEMM of the arena, fp32 from the accumulator on.
std::vector<double> vendor_products(const TestProblem& problem, Arena& arena);
/// Bias, scale, softcap, temperature and softmax of products, in fp64.
Scores score(const TestProblem& problem, const std::vector<double>& products);

/// How dl is computed from finished logits.
enum class Arithmetic {
  kExact,  ///< fp64
  kSaved,  ///< fp64 from fp32 logits, and from lse and entropy in fp32 as the contract saves them
  kFp32,   ///< the formula in plain fp32 operations, from the same
};
/// dl [N, valid vocabulary] for the problem's upstream gradients.
std::vector<double> logit_gradients(const TestProblem& problem, const Scores& scores,
                                    Arithmetic arithmetic = Arithmetic::kExact);

/// Gradients of the inputs as matrices of doubles; dw holds the rows of `weight_rows`.
struct Gradients {
  std::vector<double> dx, dw, db;  ///< [N, H], [weight_rows, H], [weight_rows]
};
Gradients exact_gradients(const TestProblem& problem, const std::vector<double>& dl,
                          const std::vector<std::int64_t>& weight_rows);
/// The floor: dl rounded once to the compute type, vendor GEMMs, results rounded to the given types.
Gradients floor_gradients(const TestProblem& problem, const std::vector<double>& dl,
                          const std::vector<std::int64_t>& weight_rows, Arena& arena, DType dx_type, DType dw_type,
                          DType db_type);

}  // namespace lmhead::testing
