// Communicator: what the library needs from a group of ranks. Ranks may be threads, MPI processes or
// NCCL devices; no transport's type shows here.
//
// Rules for every transport:
//  - All ranks of a group make the same calls in the same order, each from one thread at a time.
//  - A call that cannot finish (a rank is gone, failed or makes another call) ends with kCommunication on
//    every rank that waits for it, at the latest after the group's timeout. The group is then broken:
//    every later call returns the same error. Make a new group.
//  - A rank without memory for a call's buffers gets kOutOfMemory and aborts the group.
//  - Sums run in rank order: accumulated in fp32 (fp64 for fp64) and rounded once, so that they repeat
//    bit for bit and threads and MPI agree. NCCL sums in its own fixed order and in the given dtype.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "lmhead/status.h"
#include "lmhead/types.h"

namespace lmhead {

/// Calls that this rank made so far, and the bytes it sent to others in them.
struct Traffic {
  std::int64_t all_gathers = 0;
  std::int64_t all_reduces = 0;
  std::int64_t reduce_scatters = 0;
  std::int64_t exchanges = 0;  ///< headers of the checked mode
  std::int64_t bytes_sent = 0;
};

/// One rank's end of a group.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Where the pointers of all_gather, all_reduce_sum and reduce_scatter_sum must live.
  Device device() const { return device_; }
  /// "local", "mpi" or "nccl".
  virtual const char* transport() const = 0;

  /// receive [size * bytes] gets every rank's `bytes` bytes in rank order. In place when
  /// send == receive + rank * bytes; the two must not overlap otherwise.
  /// `stream`: the cudaStream_t to enqueue on for Device::kCuda, where the call does not wait.
  Status all_gather(const void* send, void* receive, std::size_t bytes, void* stream = nullptr);

  /// data [count] floating: replaced by its sum over ranks, the same bits on every rank.
  Status all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream = nullptr);

  /// send [size * count]; receive [count] gets the sum over ranks of part `rank`. No overlap.
  Status reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype, void* stream = nullptr);

  /// all_gather of a small message in host memory on every transport; waits for the result.
  Status exchange(const void* send, void* receive, std::size_t bytes);

  /// Tells the other ranks that this one will make no further call. Where the transport can (threads,
  /// NCCL) they fail at once with `reason`, else when their timeout passes.
  virtual void abort(const Status& reason) = 0;

  const Traffic& traffic() const { return traffic_; }

 protected:
  Communicator(int rank, int size, Device device) : rank_(rank), size_(size), device_(device) {}

  virtual Status do_all_gather(const void* send, void* receive, std::size_t bytes, void* stream) = 0;
  virtual Status do_all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream) = 0;
  virtual Status do_reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype,
                                       void* stream) = 0;
  virtual Status do_exchange(const void* send, void* receive, std::size_t bytes) = 0;

 private:
  const int rank_, size_;
  const Device device_;
  Traffic traffic_;
};

/// Time after which a rank stops waiting for the others. A group's timeout may be up to a year; longer ones are a year.
inline constexpr std::chrono::milliseconds kDefaultTimeout{std::chrono::minutes(5)};

/// Most ranks of a local group on a CUDA device.
inline constexpr int kMaxLocalCudaRanks = 64;

/// `size` ranks in this process. Give one to each thread; destroying one tells the others that its rank is
/// gone.
///
/// Device::kCpu: on host memory. Device::kCuda: all ranks on one CUDA device, each thread's current one; their
/// threads meet on the host, and what they enqueue is ordered between their streams by events, so no call waits
/// for the device. Sums have the bits of host ranks.
/// kInvalidArgument unless size >= 1 (and <= kMaxLocalCudaRanks on CUDA); kUnsupported for kCuda without CUDA.
Result<std::vector<std::unique_ptr<Communicator>>> local_communicators(
    int size, std::chrono::milliseconds timeout = kDefaultTimeout, Device device = Device::kCpu);

/// A group over an MPI communicator, on host memory. `mpi_comm` points to an MPI_Comm (duplicated, not
/// owned); nullptr is MPI_COMM_WORLD. MPI must be initialised, with MPI_THREAD_SERIALIZED or more where
/// calls come from several threads, and stay so until the group is destroyed. Collective over the ranks.
/// After an error MPI_Finalize may wait for the rank that is gone: end with MPI_Abort instead.
/// kUnsupported in a build without MPI.
Result<std::unique_ptr<Communicator>> mpi_communicator(const void* mpi_comm = nullptr,
                                                       std::chrono::milliseconds timeout = kDefaultTimeout);

/// What the ranks of an NCCL group share before it exists: made on one rank, sent to the others by any means.
using NcclId = std::array<std::byte, 128>;
/// kUnsupported in a build without NCCL.
Result<NcclId> nccl_id();
/// This rank's end of an NCCL group, on the CUDA device that is current. Waits until all ranks called it.
/// The timeout covers this call and exchange(); the other calls only enqueue work.
/// kUnsupported in a build without NCCL.
Result<std::unique_ptr<Communicator>> nccl_communicator(const NcclId& id, int rank, int size,
                                                        std::chrono::milliseconds timeout = kDefaultTimeout);

}  // namespace lmhead
