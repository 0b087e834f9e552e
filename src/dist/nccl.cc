// Ranks as CUDA devices over NCCL. A nonblocking communicator, so that nothing waits past the timeout.
#include "lmhead/communicator.h"

#include <string>

#if LMHEAD_HAS_NCCL

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstring>
#include <string>
#include <thread>

#include "core/return_if_error.h"
#include "dist/timeout.h"

namespace lmhead {
namespace {

static_assert(sizeof(ncclUniqueId) == sizeof(NcclId));

using Clock = std::chrono::steady_clock;

Status failure(const char* call, const std::string& reason) {
  return {StatusCode::kCommunication, "nccl communicator: " + std::string(call) + ": " + reason};
}
Status check(cudaError_t error, const char* call) {
  return error == cudaSuccess ? Status() : failure(call, cudaGetErrorString(error));
}
Status check(ncclResult_t result, const char* call) {
  return result == ncclSuccess || result == ncclInProgress ? Status() : failure(call, ncclGetErrorString(result));
}

ncclDataType_t nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return ncclFloat32;
    case DType::kBFloat16: return ncclBfloat16;
    case DType::kFloat16: return ncclFloat16;
    default: return ncclFloat64;
  }
}

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(ncclComm_t comm, int rank, int size, std::chrono::milliseconds timeout)
      : Communicator(rank, size, Device::kCuda), comm_(comm), timeout_(bounded_timeout(timeout)) {}

  ~NcclCommunicator() override {
    if (staging_ != nullptr) cudaFree(staging_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (comm_ != nullptr) broken_.ok() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_);
  }

  const char* transport() const override { return "nccl"; }

  void abort(const Status& reason) override {
    if (!broken_.ok()) return;
    broken_ = failure("abort", reason.message());
    if (comm_ != nullptr) ncclCommAbort(comm_);
    comm_ = nullptr;
  }

  /// Waits for the communicator's own setup.
  Status settle(const char* call) {
    const auto start = Clock::now();
    for (ncclResult_t state = ncclInProgress; state == ncclInProgress;) {
      if (ncclResult_t asked = ncclCommGetAsyncError(comm_, &state); asked != ncclSuccess) state = asked;
      if (state == ncclInProgress && Clock::now() - start > timeout_) return broken(call, late());
      if (state != ncclSuccess && state != ncclInProgress) return broken(call, ncclGetErrorString(state));
      std::this_thread::yield();
    }
    return {};
  }

 protected:
  Status do_all_gather(const void* send, void* receive, std::size_t bytes, void* stream) override {
    return enqueue("all_gather", [&] {
      return ncclAllGather(send, receive, bytes, ncclUint8, comm_, static_cast<cudaStream_t>(stream));
    });
  }
  Status do_all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream) override {
    return enqueue("all_reduce_sum", [&] {
      return ncclAllReduce(data, data, static_cast<std::size_t>(count), nccl_type(dtype), ncclSum, comm_,
                           static_cast<cudaStream_t>(stream));
    });
  }
  Status do_reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype,
                               void* stream) override {
    return enqueue("reduce_scatter_sum", [&] {
      return ncclReduceScatter(send, receive, static_cast<std::size_t>(count), nccl_type(dtype), ncclSum, comm_,
                               static_cast<cudaStream_t>(stream));
    });
  }

  /// Through device memory and a stream of its own; waits with a deadline.
  Status do_exchange(const void* send, void* receive, std::size_t bytes) override {
    if (!broken_.ok()) return broken_;
    if (stream_ == nullptr)
      LMHEAD_RETURN_IF_ERROR(check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "exchange"));
    const std::size_t total = bytes * static_cast<std::size_t>(size());
    if (staging_bytes_ < total) {
      if (staging_ != nullptr) LMHEAD_RETURN_IF_ERROR(check(cudaFree(staging_), "exchange"));
      staging_ = nullptr, staging_bytes_ = 0;
      LMHEAD_RETURN_IF_ERROR(check(cudaMalloc(&staging_, total), "exchange"));
      staging_bytes_ = total;
    }
    std::byte* own = static_cast<std::byte*>(staging_) + bytes * static_cast<std::size_t>(rank());
    LMHEAD_RETURN_IF_ERROR(check(cudaMemcpyAsync(own, send, bytes, cudaMemcpyHostToDevice, stream_), "exchange"));
    LMHEAD_RETURN_IF_ERROR(do_all_gather(own, staging_, bytes, stream_));
    const auto start = Clock::now();
    for (cudaError_t state = cudaErrorNotReady; state == cudaErrorNotReady;) {
      state = cudaStreamQuery(stream_);
      if (state != cudaSuccess && state != cudaErrorNotReady) return broken("exchange", cudaGetErrorString(state));
      ncclResult_t async = ncclSuccess;
      if (ncclCommGetAsyncError(comm_, &async) != ncclSuccess || (async != ncclSuccess && async != ncclInProgress))
        return broken("exchange", ncclGetErrorString(async));
      if (state == cudaErrorNotReady && Clock::now() - start > timeout_) return broken("exchange", late());
      if (state == cudaErrorNotReady) std::this_thread::yield();
    }
    LMHEAD_RETURN_IF_ERROR(
        check(cudaMemcpyAsync(receive, staging_, total, cudaMemcpyDeviceToHost, stream_), "exchange"));
    return check(cudaStreamSynchronize(stream_), "exchange");
  }

 private:
  std::string late() const {
    return "not all ranks arrived within " + std::to_string(timeout_.count()) + " ms (one is gone, failed or late)";
  }
  Status broken(const char* call, const std::string& reason) {
    abort({StatusCode::kCommunication, reason});
    return broken_ = failure(call, reason);
  }
  template <class Fn>
  Status enqueue(const char* call, const Fn& fn) {
    if (!broken_.ok()) return broken_;
    if (const ncclResult_t result = fn(); result != ncclSuccess && result != ncclInProgress)
      return broken(call, ncclGetErrorString(result));
    return settle(call);
  }

  ncclComm_t comm_;
  const std::chrono::milliseconds timeout_;
  cudaStream_t stream_ = nullptr;
  void* staging_ = nullptr;
  std::size_t staging_bytes_ = 0;
  Status broken_;
};

}  // namespace

Result<NcclId> nccl_id() {
  ncclUniqueId id;
  LMHEAD_RETURN_IF_ERROR(check(ncclGetUniqueId(&id), "nccl_id"));
  NcclId bytes;
  std::memcpy(bytes.data(), &id, sizeof id);
  return bytes;
}

Result<std::unique_ptr<Communicator>> nccl_communicator(const NcclId& id, int rank, int size,
                                                        std::chrono::milliseconds timeout) {
  if (size < 1 || rank < 0 || rank >= size)
    return Status(StatusCode::kInvalidArgument,
                  "rank: expected 0 <= rank < size, got rank " + std::to_string(rank) + " of " + std::to_string(size));
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), sizeof unique);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  LMHEAD_RETURN_IF_ERROR(check(ncclCommInitRankConfig(&comm, size, unique, rank, &config), "nccl_communicator"));
  auto communicator = std::make_unique<NcclCommunicator>(comm, rank, size, timeout);
  LMHEAD_RETURN_IF_ERROR(communicator->settle("nccl_communicator"));
  return std::unique_ptr<Communicator>(std::move(communicator));
}

}  // namespace lmhead

#else

namespace lmhead {
namespace {
Status unsupported(const char* call) {
  return {StatusCode::kUnsupported,
          std::string(call) + ": expected a build with NCCL (LMHEAD_CUDA and LMHEAD_NCCL), got one without"};
}
}  // namespace

Result<NcclId> nccl_id() { return unsupported("nccl_id"); }

Result<std::unique_ptr<Communicator>> nccl_communicator(const NcclId&, int, int, std::chrono::milliseconds) {
  return unsupported("nccl_communicator");
}

}  // namespace lmhead

#endif
