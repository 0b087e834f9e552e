// What only a GPU can show: streams, threads, graph capture, no synchronisation and no allocation inside
// a call, bits that repeat, refusals of host pointers and misaligned workspaces, indices beyond 2^31.
#include <cuda_runtime_api.h>

#include <cmath>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "core/return_if_error.h"
#include "testing.h"

namespace lmhead {
namespace {

using testing::Buffer;
using testing::Case;
using testing::Outcome;
using testing::PlacedProblem;
using testing::TestProblem;

void require(cudaError_t error) { ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error); }

struct Stream {
  Stream() { require(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(handle); }
  cudaStream_t handle = nullptr;
};

/// One problem on the device with its outputs, run any number of times on a stream.
class Call {
 public:
  Call(const BackendInfo& backend, const TestProblem& problem, cudaStream_t stream, std::size_t budget = 0)
      : arena_(testing::arena(Device::kCuda)),
        n_(problem.spec.n),
        placed_(problem, arena_),
        logprob_(arena_, bytes(n_)),
        entropy_(arena_, bytes(n_)),
        lse_(arena_, bytes(n_)),
        dx_(arena_, bytes(n_ * problem.spec.h)),
        dw_(arena_, bytes(problem.spec.v * problem.spec.h)) {
    execution_.backend = backend.name.c_str();
    execution_.device = Device::kCuda;
    execution_.stream = stream;
    execution_.workspace_budget = budget;
    gradients_.hidden = {dx_.data(), n_, problem.spec.h, problem.spec.h, DType::kFloat32};
    gradients_.weight = {dw_.data(), problem.spec.v, problem.spec.h, problem.spec.h, DType::kFloat32};
    const auto forward_size = workspace_size(placed_.problem(), Operation::kForward, {}, execution_);
    const auto backward_size = workspace_size(placed_.problem(), Operation::kBackward, gradients_, execution_);
    EXPECT_TRUE(forward_size.ok() && backward_size.ok());
    if (!forward_size.ok() || !backward_size.ok()) return;
    workspace_ = std::make_unique<Buffer>(arena_, std::max(forward_size->bytes, backward_size->bytes));
    execution_.workspace = workspace_->data();
    execution_.workspace_bytes = workspace_->size();
  }

  Status operator()() const {
    LMHEAD_RETURN_IF_ERROR(forward(placed_.problem(), {vector(logprob_), vector(entropy_), vector(lse_)}, execution_));
    return backward(placed_.problem(),
                    {const_vector(lse_), const_vector(entropy_), placed_.dlogprob(), placed_.dentropy()}, gradients_,
                    execution_);
  }
  Execution& execution() { return execution_; }
  const Problem& problem() const { return placed_.problem(); }

  /// Every output byte after all work is done, and whether the guards of the workspace hold.
  std::vector<std::byte> results() const {
    EXPECT_TRUE(workspace_->guards_intact());
    std::vector<std::byte> all;
    for (const Buffer* b : {&logprob_, &entropy_, &lse_, &dx_, &dw_}) {
      EXPECT_TRUE(b->guards_intact());
      const std::vector<std::byte> part = b->download();
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }
  /// Outputs and workspace become NaN again.
  void poison() {
    for (const Buffer* b :
         std::initializer_list<const Buffer*>{&logprob_, &entropy_, &lse_, &dx_, &dw_, workspace_.get()})
      require(cudaMemset(b->data(), Buffer::kPoison, b->size()));
    require(cudaDeviceSynchronize());
  }

 private:
  static std::size_t bytes(std::int64_t floats) { return static_cast<std::size_t>(floats) * sizeof(float); }
  Vector vector(const Buffer& b) const { return {b.data(), n_, 1, DType::kFloat32}; }
  ConstVector const_vector(const Buffer& b) const { return {b.data(), n_, 1, DType::kFloat32}; }

  testing::Arena& arena_;
  std::int64_t n_;
  PlacedProblem placed_;
  Buffer logprob_, entropy_, lse_, dx_, dw_;
  std::unique_ptr<Buffer> workspace_;
  BackwardOutputs gradients_;
  Execution execution_;
};

/// Holds back everything queued on a stream after it until released, or for five seconds.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) { require(cudaLaunchHostFunc(stream, wait, this)); }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  static void wait(void* gate) {
    auto* self = static_cast<Gate*>(gate);
    std::unique_lock lock(self->mutex_);
    self->opened_.wait_for(lock, std::chrono::seconds(5), [self] { return self->open_; });
  }
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

// Masks, softcap, bias and per-row temperatures: every kernel of the backend runs.
const Case kEverything = {.n = 300,
                          .h = 72,
                          .v = 4100,
                          .data = testing::Data::kPeaked,
                          .bias = DType::kFloat32,
                          .row_temperature = true,
                          .softcap = 30.0,
                          .valid_vocab = 4099,
                          .ignore_every = 7,
                          .active = DType::kBool,
                          .inactive_every = 5,
                          .zero_every = 11};

std::vector<BackendInfo> cuda_backends() {
  std::vector<BackendInfo> found;
  for (const BackendInfo& backend : testing::available_backends())
    if (backend.device == Device::kCuda) found.push_back(backend);
  return found;
}

class Cuda : public testing::BackendTest {};

TEST_P(Cuda, BitsRepeatAtEveryBudget) {
  const TestProblem problem(kEverything);
  for (const std::size_t budget : {std::size_t{0}, std::size_t{4} << 20, std::size_t{1} << 20}) {
    const Stream stream;
    Call call(backend(), problem, stream.handle, budget);
    std::vector<std::byte> first;
    for (int repeat = 0; repeat < 5; ++repeat) {
      call.poison();
      const Status status = call();
      ASSERT_TRUE(status.ok()) << status.to_string();
      const std::vector<std::byte> results = call.results();
      if (repeat == 0) first = results;
      EXPECT_TRUE(results == first) << "run " << repeat << " with budget " << budget;
    }
  }
}

TEST_P(Cuda, NoSynchronisationAndNoAllocation) {
  const TestProblem problem(kEverything);
  const Stream stream;
  Call call(backend(), problem, stream.handle, std::size_t{2} << 20);
  ASSERT_TRUE(call().ok());  // creates handles and loads modules
  const std::vector<std::byte> expected = call.results();
  call.poison();
  std::size_t free_before = 0, free_after = 0, total = 0;
  require(cudaMemGetInfo(&free_before, &total));
  Gate gate(stream.handle);
  const auto start = std::chrono::steady_clock::now();
  const Status status = call();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(cudaStreamQuery(stream.handle), cudaErrorNotReady) << "the call waited for the stream";
  EXPECT_LT(seconds, 2.0);
  require(cudaMemGetInfo(&free_after, &total));
  EXPECT_EQ(free_before, free_after) << "the call allocated device memory";
  gate.open();
  ASSERT_TRUE(status.ok()) << status.to_string();
  EXPECT_TRUE(call.results() == expected);
}

TEST_P(Cuda, GraphReplayEqualsTheCall) {
  const TestProblem problem(kEverything);
  const Stream stream;
  Call call(backend(), problem, stream.handle);
  ASSERT_TRUE(call().ok());
  const std::vector<std::byte> expected = call.results();

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  require(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
  const Status status = call();
  require(cudaStreamEndCapture(stream.handle, &graph));
  ASSERT_TRUE(status.ok()) << status.to_string();
  require(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) {
    call.poison();
    require(cudaGraphLaunch(executable, stream.handle));
    EXPECT_TRUE(call.results() == expected) << "replay " << replay;
  }
  // The graph reads its inputs where they are: other bits there give other results.
  const ConstMatrix& hidden = call.problem().hidden;
  require(cudaMemset(const_cast<void*>(hidden.data), 0x3c, static_cast<std::size_t>(hidden.rows * hidden.cols) * 2));
  require(cudaDeviceSynchronize());
  require(cudaGraphLaunch(executable, stream.handle));
  const std::vector<std::byte> replayed = call.results();
  EXPECT_FALSE(replayed == expected);
  ASSERT_TRUE(call().ok());
  EXPECT_TRUE(call.results() == replayed);
  require(cudaGraphExecDestroy(executable));
  require(cudaGraphDestroy(graph));
}

TEST_P(Cuda, CheckedModeRefusesCapture) {
  const TestProblem problem(kEverything);
  const Stream stream;
  Call call(backend(), problem, stream.handle);
  call.execution().check = true;
  ASSERT_TRUE(call().ok());
  cudaGraph_t graph = nullptr;
  require(cudaStreamBeginCapture(stream.handle, cudaStreamCaptureModeThreadLocal));
  const Status status = call();
  require(cudaStreamEndCapture(stream.handle, &graph));
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_EQ(status.message(), "check: expected false while a CUDA graph is captured, got true");
  require(cudaGraphDestroy(graph));
}

TEST_P(Cuda, TwoThreadsOnTwoStreams) {
  Case other = kEverything;
  other.n = 257;
  other.h = 136;
  other.v = 3000;
  other.valid_vocab = 2999;
  other.seed = 2;
  const TestProblem problems[2] = {TestProblem(kEverything), TestProblem(other)};
  const Stream streams[2];
  Call calls[2] = {Call(backend(), problems[0], streams[0].handle), Call(backend(), problems[1], streams[1].handle)};
  std::vector<std::byte> alone[2];
  for (int k = 0; k < 2; ++k) {
    ASSERT_TRUE(calls[k]().ok());
    alone[k] = calls[k].results();
    calls[k].poison();
  }
  Status statuses[2];
  std::vector<std::thread> threads;
  for (int k = 0; k < 2; ++k)
    threads.emplace_back([&, k] {
      for (int repeat = 0; repeat < 50 && statuses[k].ok(); ++repeat) statuses[k] = calls[k]();
      if (statuses[k].ok() && last_backend() != backend().name) statuses[k] = {StatusCode::kInternal, last_backend()};
    });
  for (std::thread& thread : threads) thread.join();
  for (int k = 0; k < 2; ++k) {
    EXPECT_TRUE(statuses[k].ok()) << statuses[k].to_string();
    EXPECT_TRUE(calls[k].results() == alone[k]) << "thread " << k;
  }
}

TEST_P(Cuda, HostPointersAndMisalignedWorkspacesAreRefused) {
  const TestProblem problem(kEverything);
  const Stream stream;
  Call call(backend(), problem, stream.handle);
  const Execution good = call.execution();
  call.execution().workspace = static_cast<std::byte*>(good.workspace) + 16;
  Status status = call();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << status.to_string();
  EXPECT_NE(status.message().find("workspace: expected"), std::string::npos) << status.message();

  call.execution() = good;
  Problem on_host = call.problem();
  on_host.weight.data = problem.weight.bytes.data();
  std::vector<float> logprob(static_cast<std::size_t>(problem.spec.n));
  ForwardOutputs outputs;
  outputs.lse = {logprob.data(), problem.spec.n, 1, DType::kFloat32};
  status = forward(on_host, outputs, call.execution());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "weight: expected device memory, got a host pointer");
}

// N * V, V * H and N * H beyond 2^31 each. Column offsets: the shard of the last columns alone, which
// starts near offset 0, must give the states that the whole head gives there.
TEST_P(Cuda, IndicesBeyondTwoToThe31) {
  const std::int64_t h = 4096, v = 600000, n = 530000;
  std::size_t free_bytes = 0, total = 0;
  require(cudaMemGetInfo(&free_bytes, &total));
  if (free_bytes < (std::size_t{20} << 30)) GTEST_SKIP() << "needs 20 GiB of device memory";
  testing::Arena& arena = testing::arena(Device::kCuda);
  // Large tensors repeat one small block of random bf16 rows; only the rows looked at matter.
  const std::int64_t block = 1024;
  const TestProblem small({.n = block, .h = h, .v = block, .entropy = EntropyMode::kMetric});
  const auto repeated = [&](const testing::HostTensor& from, std::int64_t rows) {
    const std::size_t block_bytes = from.bytes.size();
    auto* data = static_cast<std::byte*>(arena.allocate(static_cast<std::size_t>(rows * h) * 2));
    arena.upload(data, from.bytes.data(), block_bytes);
    for (std::int64_t row = block; row < rows; row += block)
      require(cudaMemcpy(data + row * h * 2, data, static_cast<std::size_t>(std::min(block, rows - row) * h) * 2,
                         cudaMemcpyDeviceToDevice));
    return data;
  };
  std::byte* hidden = repeated(small.hidden, n);
  std::byte* weight = repeated(small.weight, v);
  const Buffer targets(arena, static_cast<std::size_t>(n) * 8, 0), states(arena, static_cast<std::size_t>(n) * 16);

  const auto run = [&](std::int64_t first_row, std::int64_t rows, std::int64_t start, std::int64_t columns) {
    Problem p;
    p.hidden = {hidden + first_row * h * 2, rows, h, h, DType::kBFloat16};
    p.weight = {weight + start * h * 2, columns, h, h, DType::kBFloat16};
    p.targets = {targets.data(), rows, 1, DType::kInt64};
    p.vocab_start = start;
    p.vocab_size = v;
    Execution e;
    e.backend = backend().name.c_str();
    e.device = Device::kCuda;
    const auto size = workspace_size(p, Operation::kForwardPartial, {}, e);
    EXPECT_TRUE(size.ok()) << size.status().to_string();
    const Buffer workspace(arena, size.ok() ? size->bytes : 256);
    e.workspace = workspace.data();
    e.workspace_bytes = workspace.size();
    const Status status = forward_partial(p, {states.data(), rows, 4, 4, DType::kFloat32}, e);
    EXPECT_TRUE(status.ok()) << status.to_string();
    std::vector<float> host(static_cast<std::size_t>(rows) * 4);
    arena.download(host.data(), states.data(), host.size() * sizeof(float));
    return host;
  };
  // The last rows of the long batch against the same rows alone, over the last columns alone.
  const std::int64_t columns = 2048, rows = 64;
  const std::vector<float> in_batch = run(0, n, v - columns, columns);
  const std::vector<float> alone = run(n - rows, rows, v - columns, columns);
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* a = in_batch.data() + (n - rows + i) * 4;
    const float* b = alone.data() + i * 4;
    EXPECT_TRUE(std::abs(a[0] - b[0]) <= 1e-4f && std::abs(a[1] - b[1]) <= 1e-4f * b[1]) << "row " << i;
  }
  // All columns repeat the block: the sum over the whole head is v / block times the block's, whole blocks.
  const std::int64_t whole = v / block * block;
  const std::vector<float> head = run(0, rows, 0, whole), once = run(0, rows, 0, block);
  for (std::int64_t i = 0; i < rows; ++i) {
    const double a = head[i * 4] + std::log(head[i * 4 + 1]);
    const double b = once[i * 4] + std::log(once[i * 4 + 1]) + std::log(static_cast<double>(v / block));
    EXPECT_TRUE(std::abs(a - b) <= 1e-4) << "row " << i << ": " << a << " against " << b;
  }
  arena.release(hidden, 0);
  arena.release(weight, 0);
}

INSTANTIATE_TEST_SUITE_P(Backends, Cuda, ::testing::ValuesIn(cuda_backends()), testing::backend_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Cuda);

}  // namespace
}  // namespace lmhead
