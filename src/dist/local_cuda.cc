// Ranks as threads of one process on one CUDA device. Threads meet on the host; streams wait for each other's work
// through events, the host for none of it.
#include <cstring>
#include <string>

#include "core/return_if_error.h"
#include "cuda/local_group.h"
#include "dist/meeting.h"

namespace lmhead {
namespace {

/// The meeting, and two marks a rank: its tensors are written; it has read the others'. A mark is recorded again only
/// after every rank has left the call before, and so has waited for it.
struct Group {
  struct Marks {
    cuda::StreamMark ready, read;
  };
  Group(int size, std::chrono::milliseconds timeout) : meeting(size, timeout), marks(static_cast<std::size_t>(size)) {}
  Meeting meeting;
  std::vector<Marks> marks;
};

class LocalCudaCommunicator final : public Communicator {
 public:
  LocalCudaCommunicator(int rank, int size, std::shared_ptr<Group> group)
      : Communicator(rank, size, Device::kCuda), group_(std::move(group)) {}
  ~LocalCudaCommunicator() override { group_->meeting.break_off("rank " + std::to_string(rank()) + " is gone"); }

  const char* transport() const override { return "local"; }

  void abort(const Status& reason) override {
    group_->meeting.break_off("rank " + std::to_string(rank()) + ": " + reason.message());
  }

 protected:
  Status do_all_gather(const void* send, void* receive, std::size_t bytes, void* stream) override {
    return in_order({"all_gather", send, bytes}, stream,
                    [&](const std::vector<Post>& posts) { return copy_all(posts, receive, bytes, stream); });
  }

  Status do_reduce_scatter_sum(const void* send, void* receive, std::int64_t count, DType dtype,
                               void* stream) override {
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
    return in_order({"reduce_scatter_sum", send, bytes}, stream, [&](const std::vector<Post>& posts) {
      return cuda::sum_ranks(tensors(posts), count * rank(), count, dtype, receive, stream);
    });
  }

  /// Each rank sums its share in place, which no other rank reads, then takes the other shares.
  Status do_all_reduce_sum(void* data, std::int64_t count, DType dtype, void* stream) override {
    const std::int64_t share = (count + size() - 1) / size();
    const auto begin = [&](std::int64_t r) { return std::min(count, share * r); };
    const auto at = [&](const void* base, std::int64_t element) {
      return static_cast<const std::byte*>(base) + static_cast<std::size_t>(element) * size_of(dtype);
    };
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(dtype);
    const Status summed = in_order({"all_reduce_sum", data, bytes}, stream, [&](const std::vector<Post>& posts) {
      const std::int64_t first = begin(rank());
      return cuda::sum_ranks(tensors(posts), first, begin(rank() + 1) - first, dtype,
                             const_cast<std::byte*>(at(data, first)), stream);
    });
    if (!summed.ok()) return summed;
    return in_order({"all_reduce_sum", data, bytes}, stream, [&](const std::vector<Post>& posts) -> Status {
      for (int r = 0; r < size(); ++r) {
        const std::int64_t first = begin(r), elements = begin(r + 1) - first;
        if (r == rank() || elements == 0) continue;
        LMHEAD_RETURN_IF_ERROR(cuda::copy_on_device(const_cast<std::byte*>(at(data, first)),
                                                    at(posts[static_cast<std::size_t>(r)].send, first),
                                                    static_cast<std::size_t>(elements) * size_of(dtype), stream));
      }
      return {};
    });
  }

  Status do_exchange(const void* send, void* receive, std::size_t bytes) override {
    return group_->meeting.meet(rank(), {"exchange", send, bytes}, [&](const std::vector<Post>& posts) {
      for (std::size_t r = 0; bytes > 0 && r < posts.size(); ++r)
        std::memcpy(static_cast<std::byte*>(receive) + r * bytes, posts[r].send, bytes);
      return Status();
    });
  }

 private:
  static cuda::RankTensors tensors(const std::vector<Post>& posts) {
    cuda::RankTensors all{};
    all.ranks = static_cast<int>(posts.size());
    for (std::size_t r = 0; r < posts.size(); ++r) all.data[r] = posts[r].send;
    return all;
  }

  static Status copy_all(const std::vector<Post>& posts, void* receive, std::size_t bytes, void* stream) {
    for (std::size_t r = 0; bytes > 0 && r < posts.size(); ++r) {
      std::byte* to = static_cast<std::byte*>(receive) + r * bytes;
      if (to != posts[r].send) LMHEAD_RETURN_IF_ERROR(cuda::copy_on_device(to, posts[r].send, bytes, stream));
    }
    return {};
  }

  /// `work` reads the ranks' tensors on `stream`: after all of them were written, and before any of them changes.
  template <class Work>
  Status in_order(Post post, void* stream, const Work& work) {
    Group::Marks& mine = group_->marks[static_cast<std::size_t>(rank())];
    post.device = cuda::current_ordinal();
    if (Status recorded = mine.ready.record(stream); !recorded.ok()) {
      abort(recorded);
      return recorded;
    }
    const Status met = group_->meeting.meet(rank(), post, [&](const std::vector<Post>& posts) -> Status {
      for (const Group::Marks& other : group_->marks)
        if (&other != &mine) LMHEAD_RETURN_IF_ERROR(other.ready.precede(stream));
      LMHEAD_RETURN_IF_ERROR(work(posts));
      return mine.read.record(stream);
    });
    if (!met.ok()) return met;
    for (const Group::Marks& other : group_->marks)
      if (&other != &mine) LMHEAD_RETURN_IF_ERROR(other.read.precede(stream));
    return {};
  }

  const std::shared_ptr<Group> group_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> local_cuda_communicators(int size, std::chrono::milliseconds timeout) {
  const auto group = std::make_shared<Group>(size, timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<LocalCudaCommunicator>(r, size, group));
  return ranks;
}

}  // namespace lmhead
