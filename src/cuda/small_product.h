// Products of small fp32 problems by an own kernel: sums in fp64, rounded once.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/product.h"

namespace lmhead::cuda {

/// Whether the products of an fp32 problem of these sizes are small: all three of them, so that forward and backward
/// agree on it, whatever their tiles.
bool has_small_products(std::int64_t n, std::int64_t h, std::int64_t v);

/// The product in fp32 with fp64 sums: an output is the exact sum rounded once, but for 2^-53 a term. In and out fp32.
/// With workspace long sums of few outputs are cut into parts, added in order.
Status multiply_small(const Product& product, cudaStream_t stream);

}  // namespace lmhead::cuda
