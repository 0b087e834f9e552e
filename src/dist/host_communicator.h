// Collectives on host memory out of two byte-moving primitives, the same for threads and MPI.
#pragma once

#include "lmhead/communicator.h"

namespace lmhead {

/// Reductions are an all-to-all, a sum in rank order, and for all_reduce a gather: the traffic of a
/// ring, any floating dtype, one rounding, and bits that depend on nothing but the inputs.
class HostCommunicator : public Communicator {
 protected:
  using Communicator::Communicator;

  /// receive [size * bytes] <- every rank's send [bytes]; in place when send == receive + rank * bytes.
  virtual Status gather(const void* send, void* receive, std::size_t bytes, const char* operation) = 0;
  /// receive part r [bytes] <- rank r's send part `rank` [bytes].
  virtual Status all_to_all(const void* send, void* receive, std::size_t bytes, const char* operation) = 0;

  Status do_all_gather(const void* send, void* receive, std::size_t bytes, void* stream) final;
  Status do_all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream) final;
  Status do_reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype, void* stream) final;
  Status do_exchange(const void* send, void* receive, std::size_t bytes) final;
};

}  // namespace lmhead
