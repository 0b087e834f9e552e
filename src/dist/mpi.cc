// Ranks as MPI processes: nonblocking collectives polled until a deadline, through buffers of our own.
#include "lmhead/communicator.h"

#if LMHEAD_HAS_MPI

#define OMPI_SKIP_MPICXX 1  // the C interface only: the removed C++ one does not compile without warnings
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "dist/host_communicator.h"
#include "dist/timeout.h"

namespace lmhead {
namespace {

/// Bytes that a rank sends to each other one in a single MPI call: far below the int counts of MPI, and a
/// bound on the buffers.
constexpr std::size_t kChunk = std::size_t{16} << 20;

std::string error_text(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return "MPI error " + std::to_string(code);
  return {text, static_cast<std::size_t>(length)};
}

class MpiCommunicator final : public HostCommunicator {
 public:
  MpiCommunicator(MPI_Comm comm, int rank, int size, std::chrono::milliseconds timeout)
      : HostCommunicator(rank, size, Device::kCpu), comm_(comm), timeout_(bounded_timeout(timeout)) {}

  ~MpiCommunicator() override {
    int finalized = 0;
    MPI_Finalized(&finalized);
    // A broken group still has a call in flight: its communicator must stay.
    if (finalized == 0 && broken_.ok()) MPI_Comm_free(&comm_);
  }

  const char* transport() const override { return "mpi"; }

  void abort(const Status& reason) override {
    if (broken_.ok()) broken_ = failure(reason.message());
  }

 protected:
  Status gather(const void* send, void* receive, std::size_t bytes, const char* operation) override {
    return in_chunks(
        bytes, operation,
        [&](std::size_t begin, std::size_t count, Buffers& b, MPI_Request* request) {
          std::memcpy(b.send.data(), static_cast<const std::byte*>(send) + begin, count);
          return MPI_Iallgather(b.send.data(), static_cast<int>(count), MPI_BYTE, b.receive.data(),
                                static_cast<int>(count), MPI_BYTE, comm_, request);
        },
        receive, 1);
  }

  Status all_to_all(const void* send, void* receive, std::size_t bytes, const char* operation) override {
    return in_chunks(
        bytes, operation,
        [&](std::size_t begin, std::size_t count, Buffers& b, MPI_Request* request) {
          for (std::size_t r = 0; r < ranks(); ++r)
            std::memcpy(b.send.data() + r * count, static_cast<const std::byte*>(send) + r * bytes + begin, count);
          return MPI_Ialltoall(b.send.data(), static_cast<int>(count), MPI_BYTE, b.receive.data(),
                               static_cast<int>(count), MPI_BYTE, comm_, request);
        },
        receive, ranks());
  }

 private:
  struct Buffers {
    std::vector<std::byte> send, receive;
  };

  std::size_t ranks() const { return static_cast<std::size_t>(size()); }
  static Status failure(const std::string& message) {
    return {StatusCode::kCommunication, "mpi communicator: " + message};
  }

  /// MPI cannot cancel a collective and may still write: the buffers of a failed one live as long as the process.
  static void keep(std::unique_ptr<Buffers> buffers) {
    static std::mutex mutex;  // the groups of several threads may fail at once
    static auto* const in_flight = new std::vector<std::unique_ptr<Buffers>>;
    const std::lock_guard lock(mutex);
    in_flight->push_back(std::move(buffers));
  }

  /// Runs `start` for every chunk of a message of `bytes` a rank, and puts each rank's answer in its place. A message
  /// of no bytes is sent too, since it is where ranks meet.
  template <class Start>
  Status in_chunks(std::size_t bytes, const char* operation, const Start& start, void* receive,
                   std::size_t parts_sent) {
    std::size_t begin = 0;
    do {
      const std::size_t count = std::min(kChunk, bytes - begin);
      if (!broken_.ok()) return broken_;
      auto buffers = std::make_unique<Buffers>();
      buffers->send.resize(std::max<std::size_t>(1, count * parts_sent));
      buffers->receive.resize(std::max<std::size_t>(1, count * ranks()));
      MPI_Request request = MPI_REQUEST_NULL;
      if (const int code = start(begin, count, *buffers, &request); code != MPI_SUCCESS)
        return broken_ = failure(std::string(operation) + " failed: " + error_text(code));
      if (Status status = wait(&request, operation); !status.ok()) {
        keep(std::move(buffers));
        return broken_ = status;
      }
      for (std::size_t r = 0; r < ranks(); ++r)
        if (count > 0)
          std::memcpy(static_cast<std::byte*>(receive) + r * bytes + begin, buffers->receive.data() + r * count, count);
      begin += count;
    } while (begin < bytes);
    return {};
  }

  Status wait(MPI_Request* request, const char* operation) const {
    const auto start = std::chrono::steady_clock::now();
    for (;;) {
      int done = 0;
      if (const int code = MPI_Test(request, &done, MPI_STATUS_IGNORE); code != MPI_SUCCESS)
        return failure(std::string(operation) + " failed: " + error_text(code));
      if (done != 0) return {};
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited > timeout_)
        return failure("not all ranks reached " + std::string(operation) + " within " +
                       std::to_string(timeout_.count()) + " ms (one is gone, failed or late)");
      // Poll hard while the others are probably about to arrive, then leave the core to them.
      if (waited < std::chrono::microseconds(200)) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    }
  }

  MPI_Comm comm_;
  const std::chrono::milliseconds timeout_;
  Status broken_;
};

}  // namespace

Result<std::unique_ptr<Communicator>> mpi_communicator(const void* mpi_comm, std::chrono::milliseconds timeout) {
  int initialized = 0;
  MPI_Initialized(&initialized);
  if (initialized == 0)
    return Status(StatusCode::kInvalidArgument, "mpi_comm: expected MPI to be initialised (MPI_Init_thread), got none");
  const MPI_Comm given = mpi_comm == nullptr ? MPI_COMM_WORLD : *static_cast<const MPI_Comm*>(mpi_comm);
  MPI_Comm comm = MPI_COMM_NULL;
  if (const int code = MPI_Comm_dup(given, &comm); code != MPI_SUCCESS)
    return Status(StatusCode::kCommunication, "mpi_comm: expected a communicator, got " + error_text(code));
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  int rank = 0, size = 0;
  MPI_Comm_rank(comm, &rank);
  MPI_Comm_size(comm, &size);
  return std::unique_ptr<Communicator>(std::make_unique<MpiCommunicator>(comm, rank, size, timeout));
}

}  // namespace lmhead

#else

namespace lmhead {

Result<std::unique_ptr<Communicator>> mpi_communicator(const void*, std::chrono::milliseconds) {
  return Status(StatusCode::kUnsupported, "mpi_communicator: expected a build with MPI (LMHEAD_MPI), got one without");
}

}  // namespace lmhead

#endif
