// What ranks that share one CUDA device need of it: order between their streams, copies, sums over ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lmhead/communicator.h"

namespace lmhead::cuda {

/// A point in the work of one rank's stream that other streams can wait for. One thread records; every thread that
/// waits must have met it on the host since.
class StreamMark {
 public:
  StreamMark() = default;
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;
  ~StreamMark();

  Status record(void* stream);
  /// What `stream` does from here on comes after the recorded point; nothing to wait for before the first record.
  Status precede(void* stream) const;

 private:
  void* event_ = nullptr;  ///< cudaEvent_t, made on the device of the first record
};

/// Ordinal of the calling thread's device; -1 without one.
int current_ordinal();

Status copy_on_device(void* to, const void* from, std::size_t bytes, void* stream);

/// The tensors of all ranks, in rank order.
struct RankTensors {
  const void* data[kMaxLocalCudaRanks];
  int ranks;
};
/// out[i] = sum over ranks of data[r][first + i] for i in [0, count): in rank order, in fp32 (fp64 for fp64), rounded
/// once, as ranks on the host sum. `out` may be data[r] + first of one rank.
Status sum_ranks(const RankTensors& tensors, std::int64_t first, std::int64_t count, DType dtype, void* out,
                 void* stream);

}  // namespace lmhead::cuda
