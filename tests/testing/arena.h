// Where the buffers of a test live: host memory, or one CUDA device. The seam that lets the same
// test program run every backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "lmhead/types.h"

namespace lmhead::testing {

/// Memory of one device, and that device's vendor GEMM, the baseline of the error bounds.
class Arena {
 public:
  virtual ~Arena() = default;
  virtual Device device() const = 0;
  /// 256-byte aligned, uninitialised; untouched pages of large host blocks cost nothing. Aborts when
  /// there is no memory.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* data, std::size_t bytes) = 0;
  virtual void upload(void* to, const void* from, std::size_t bytes) = 0;
  /// Waits for all work on the device first.
  virtual void download(void* to, const void* from, std::size_t bytes) = 0;
  /// A stream of its own, which waits for no other one; nullptr on the CPU.
  virtual void* make_stream() { return nullptr; }
  virtual void release_stream(void*) {}
  /// c[i, j] = sum_k a[i, k] b[j, k], accumulated and returned in fp32; a [m, k] and b [n, k] hold
  /// values that `type` represents exactly and are multiplied in that type.
  virtual std::vector<float> multiply(DType type, const std::vector<float>& a, const std::vector<float>& b,
                                      std::int64_t m, std::int64_t n, std::int64_t k) = 0;
};

/// The arena for a device. Device::kCuda needs tests/cuda_arena.cc in the program.
Arena& arena(Device device);
#if LMHEAD_HAS_CUDA
Arena& cuda_arena();  // tests/cuda_arena.cc
#endif

/// A stream of an arena's device.
class Stream {
 public:
  explicit Stream(Arena& arena) : arena_(arena), stream_(arena.make_stream()) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { arena_.release_stream(stream_); }
  void* get() const { return stream_; }

 private:
  Arena& arena_;
  void* stream_;
};

/// Device memory with 256 guard bytes on each side. `fill` is what the memory holds at first:
/// 0xff bytes are NaN in every floating type.
class Buffer {
 public:
  static constexpr unsigned char kPoison = 0xff;

  Buffer(Arena& arena, std::size_t bytes, unsigned char fill = kPoison);
  Buffer(Arena& arena, const std::vector<std::byte>& content);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer();

  std::byte* data() const { return base_ + kGuard; }
  std::size_t size() const { return bytes_; }
  std::vector<std::byte> download() const;
  bool guards_intact() const;

 private:
  static constexpr std::size_t kGuard = 256;
  Arena& arena_;
  std::size_t bytes_;
  std::byte* base_;
};

}  // namespace lmhead::testing
