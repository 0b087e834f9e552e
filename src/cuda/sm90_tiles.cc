#include "cuda/sm90_tiles.h"

#include <algorithm>
#include <cmath>

namespace lmhead::cuda::sm90 {
namespace {

constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) { return ceil_div(a, b) * b; }
constexpr std::int64_t round_down(std::int64_t a, std::int64_t b) { return a / b * b; }

/// About half of the L2 cache of an H100 or H200.
constexpr std::int64_t kHiddenBytesInL2 = std::int64_t{24} << 20;
/// Below these a chunk's products spend more time on their fp32 sums than on multiplying.
constexpr std::int64_t kFewColumns = 1024, kFewRows = 4096;
/// Times in steps of one 128 x 256 x 64 tile product on one multiprocessor (0.64 us): a tile's own
/// overhead, and reading and writing 8 bytes at 4 TB/s spread over the device.
constexpr double kTileOverhead = 3.0, kStepsPerAddedByte = 0.64e-6 * 4e12;

/// Steps until all tiles are done: n1 tiles of t1 steps dealt first, then n2 shorter ones of t2.
double makespan(std::int64_t n1, double t1, std::int64_t n2, double t2, std::int64_t processors) {
  const std::int64_t rounds = n1 / processors, longer = n1 % processors;
  const double low = static_cast<double>(rounds) * t1, high = longer > 0 ? low + t1 : low;
  if (n2 == 0) return high;
  const auto fits = [&](double load, double end) {
    return end > load ? static_cast<std::int64_t>((end - load) / t2 + 1e-9) : std::int64_t{0};
  };
  double end =
      std::max(high, (static_cast<double>(n1) * t1 + static_cast<double>(n2) * t2) / static_cast<double>(processors));
  while (longer * fits(high, end) + (processors - longer) * fits(low, end) < n2) end += t2 / 8;
  return end;
}

/// Estimated steps of the whole backward with chunks of `columns` over all v columns.
double backward_steps(std::int64_t rows, std::int64_t h, std::int64_t v, std::int64_t columns,
                      std::int64_t processors) {
  const std::int64_t row_blocks = ceil_div(rows, kTileRows), width = ceil_div(h, kTileColumns);
  const double h_steps = static_cast<double>(ceil_div(h, kTileDepth)) + kTileOverhead;
  const double dw_steps = static_cast<double>(ceil_div(rows, kTileDepth)) + kTileOverhead;
  const auto chunk = [&](std::int64_t c) {
    const double dx_steps = static_cast<double>(ceil_div(c, kTileDepth)) + kTileOverhead;
    const std::int64_t dx = row_blocks * width, dw = ceil_div(c, kTileRows) * width;
    const double products = dx_steps >= dw_steps ? makespan(dx, dx_steps, dw, dw_steps, processors)
                                                 : makespan(dw, dw_steps, dx, dx_steps, processors);
    const double sums = static_cast<double>(rows) * static_cast<double>(h) * 8 / kStepsPerAddedByte;
    return static_cast<double>(ceil_div(row_blocks * ceil_div(c, kTileColumns), processors)) * h_steps + products +
           sums / 2;  // half of the traffic hides under the products
  };
  const std::int64_t last = v % columns;
  return static_cast<double>(v / columns) * chunk(columns) + (last > 0 ? chunk(last) : 0.0);
}

}  // namespace

int l2_group(std::int64_t row_blocks, std::int64_t h, std::int64_t percent) {
  const std::int64_t half_of_l2 = std::clamp<std::int64_t>(kHiddenBytesInL2 / (kTileRows * h * 2), 8, 24);
  const std::int64_t most = std::max<std::int64_t>(1, half_of_l2 * percent / 100);
  const std::int64_t groups = ceil_div(std::max<std::int64_t>(row_blocks, 1), most);
  return static_cast<int>(ceil_div(std::max<std::int64_t>(row_blocks, 1), groups));
}

std::int64_t forward_chunk_rows(std::int64_t n, std::int64_t bytes_per_row, std::size_t available) {
  const std::int64_t most = round_down(static_cast<std::int64_t>(available) / bytes_per_row, kTileRows);
  if (most == 0) return 0;
  return round_up(ceil_div(n, ceil_div(n, most)), kTileRows);
}

BackwardChunk backward_chunk(std::int64_t n, std::int64_t h, std::int64_t v, std::size_t available,
                             int multiprocessors) {
  const std::int64_t elements = static_cast<std::int64_t>(available / 2);
  const std::int64_t whole = round_up(v, kTileColumns);
  if (n > v) {
    const std::int64_t rows = round_down(elements / whole, kTileRows);
    if (rows >= n) return {n, whole};
    if (rows >= kFewRows) return {round_up(ceil_div(n, ceil_div(n, rows)), kTileRows), whole};
  }
  std::int64_t rows = n, most = round_down(elements / n, kTileColumns);
  if (most < std::min(kFewColumns, whole)) {
    const auto side = static_cast<std::int64_t>(std::sqrt(static_cast<double>(elements)));
    rows = std::min(n, round_down(side, kTileRows));
    if (rows < kTileRows) return {0, 0};
    most = round_down(elements / rows, kTileColumns);
  }
  if (most >= whole) return {rows, whole};
  if (most == 0) return {0, 0};
  std::int64_t best = most;
  double least = backward_steps(rows, h, v, most, multiprocessors);
  for (std::int64_t c = most - kTileColumns; c >= most / 2 && c > 0; c -= kTileColumns) {
    const double steps = backward_steps(rows, h, v, c, multiprocessors);
    if (steps < least) {
      least = steps;
      best = c;
    }
  }
  return {rows, best};
}

}  // namespace lmhead::cuda::sm90
