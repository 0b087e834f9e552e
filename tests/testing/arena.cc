#include "testing/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "testing/parallel.h"

namespace lmhead::testing {
namespace {

constexpr std::size_t kSparseBytes = std::size_t{1} << 28;

class HostArena final : public Arena {
 public:
  Device device() const override { return Device::kCpu; }

  void* allocate(std::size_t bytes) override {
    if (bytes < kSparseBytes) return ::operator new (bytes, std::align_val_t{256});
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) {
      std::fprintf(stderr, "cannot map %zu bytes\n", bytes);
      std::abort();
    }
    return data;
  }
  void release(void* data, std::size_t bytes) override {
    if (bytes < kSparseBytes) {
      ::operator delete (data, std::align_val_t{256});
    } else {
      munmap(data, bytes);
    }
  }
  void upload(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }
  void download(void* to, const void* from, std::size_t bytes) override { std::memcpy(to, from, bytes); }

  // One fp32 accumulator an output, k ascending, restarted every 1024: the sum that one register of a
  // GEMM micro-kernel forms. Products of 16-bit values are exact in fp32. 16 columns at a time only so
  // that the compiler can vectorise; no output depends on it.
  std::vector<float> multiply(DType, const std::vector<float>& a, const std::vector<float>& b, std::int64_t m,
                              std::int64_t n, std::int64_t k) override {
    constexpr std::int64_t kColumns = 16, kDepth = 1024;
    std::vector<float> c(static_cast<std::size_t>(m * n));
    parallel_ranges((n + kColumns - 1) / kColumns, m * n * k, [&](std::int64_t b0, std::int64_t b1) {
      std::vector<float> packed(static_cast<std::size_t>(k * kColumns));
      for (std::int64_t block = b0; block < b1; ++block) {
        const std::int64_t j0 = block * kColumns, width = std::min(kColumns, n - j0);
        for (std::int64_t j = 0; j < width; ++j)
          for (std::int64_t d = 0; d < k; ++d) packed[d * kColumns + j] = b[(j0 + j) * k + d];
        for (std::int64_t i = 0; i < m; ++i) {
          float total[kColumns] = {};
          for (std::int64_t d0 = 0; d0 < k; d0 += kDepth) {
            float sum[kColumns] = {};
            for (std::int64_t d = d0; d < std::min(k, d0 + kDepth); ++d) {
              const float x = a[i * k + d];
              for (std::int64_t j = 0; j < kColumns; ++j) sum[j] += x * packed[d * kColumns + j];
            }
            for (std::int64_t j = 0; j < kColumns; ++j) total[j] += sum[j];
          }
          std::copy_n(total, width, c.begin() + i * n + j0);
        }
      }
    });
    return c;
  }
};

}  // namespace

Arena& arena(Device device) {
  static HostArena host;
  if (device == Device::kCpu) return host;
#if LMHEAD_HAS_CUDA
  return cuda_arena();
#else
  std::fprintf(stderr, "this program was built without CUDA\n");
  std::abort();
#endif
}

Buffer::Buffer(Arena& arena, std::size_t bytes, unsigned char fill)
    : Buffer(arena, std::vector<std::byte>(bytes, std::byte{fill})) {}

Buffer::Buffer(Arena& arena, const std::vector<std::byte>& content)
    : arena_(arena),
      bytes_(content.size()),
      base_(static_cast<std::byte*>(arena.allocate(content.size() + 2 * kGuard))) {
  const std::vector<std::byte> guard(kGuard, std::byte{0xa5});
  arena_.upload(base_, guard.data(), kGuard);
  if (bytes_ > 0) arena_.upload(base_ + kGuard, content.data(), bytes_);
  arena_.upload(base_ + kGuard + bytes_, guard.data(), kGuard);
}

Buffer::Buffer(Buffer&& other) noexcept : arena_(other.arena_), bytes_(other.bytes_), base_(other.base_) {
  other.base_ = nullptr;
}

Buffer::~Buffer() {
  if (base_ != nullptr) arena_.release(base_, bytes_ + 2 * kGuard);
}

std::vector<std::byte> Buffer::download() const {
  std::vector<std::byte> content(bytes_);
  if (bytes_ > 0) arena_.download(content.data(), base_ + kGuard, bytes_);
  return content;
}

bool Buffer::guards_intact() const {
  std::vector<std::byte> guard(kGuard);
  for (const std::byte* at : {base_, base_ + kGuard + bytes_}) {
    arena_.download(guard.data(), at, kGuard);
    if (std::any_of(guard.begin(), guard.end(), [](std::byte b) { return b != std::byte{0xa5}; })) return false;
  }
  return true;
}

}  // namespace lmhead::testing
