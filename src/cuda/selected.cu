#include "cuda/selected.h"

#include "cuda/element.cuh"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

constexpr int kThreads = 256;

/// A thread an (active row, slot); a repeated id is written twice with the same value.
__global__ void add_selected_kernel(GradientTile tile, RowInputs rows, RowList list, const RowTerms* terms) {
  const SelectedGradient& s = rows.selected;
  const std::int64_t slots = tile.rows * s.ids.cols;
  for (std::int64_t e = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; e < slots;
       e += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t i = e / s.ids.cols, k = e % s.ids.cols;
    const RowTerms t = terms[i];
    if (!t.active) continue;
    const std::int64_t row = list.index != nullptr ? list.index[i] : i;
    const std::int64_t id = load_int(s.ids.data, s.ids.dtype, row * s.ids.row_stride + k);
    const std::int64_t j = id - rows.vocab_start;
    if (id < 0 || j < tile.begin || j >= tile.end) continue;
    float upstream = 0.0f;
    for (std::int64_t other = 0; other < s.ids.cols; ++other)
      if (load_int(s.ids.data, s.ids.dtype, row * s.ids.row_stride + other) == id)
        upstream += load_float(s.upstream.data, s.upstream.dtype, row * s.upstream.row_stride + other);
    const float z = load_float(s.logits.data, s.logits.dtype, row * s.logits.row_stride + k);
    const float log_p = z - t.lse, p = expf(log_p);
    float dz = upstream - t.a * p;
    if (t.g != 0.0f && p != 0.0f) dz -= t.g * p * (log_p + t.entropy);
    float slope = tile.scale * t.inverse_temperature;
    if (tile.softcap > 0.0f) {
      const float saturation = z / (t.inverse_temperature * tile.softcap);
      slope *= 1.0f - saturation * saturation;
    }
    store_float(tile.dl, tile.type, i * tile.stride + j - tile.begin, dz * slope);
  }
}

}  // namespace

void add_selected(const GradientTile& tile, const RowInputs& rows, const RowList& list, const RowTerms* terms,
                  cudaStream_t stream) {
  const std::int64_t slots = tile.rows * rows.selected.ids.cols;
  if (slots > 0) add_selected_kernel<<<grid_for(slots, kThreads), kThreads, 0, stream>>>(tile, rows, list, terms);
}

}  // namespace lmhead::cuda
