// The CUDA side of tests/testing/arena.h: device memory and cuBLAS as the vendor GEMM.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "core/half.h"
#include "cuda/shared_library.h"
#include "testing/arena.h"

namespace lmhead::testing {
namespace {

void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::abort();
}
void require(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "%s: cuBLAS status %d\n", what, static_cast<int>(status));
  std::abort();
}

/// Opened by the first problem on a device: `lmhead` links this file and mostly runs without it.
struct Cublas {
  decltype(&::cublasCreate_v2) create = nullptr;
  decltype(&::cublasSetMathMode) set_math_mode = nullptr;
  /// cublasGemmEx, which its C++ header overloads.
  cublasStatus_t (*gemm)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*, const void*,
                         cudaDataType, int, const void*, cudaDataType, int, const void*, void*, cudaDataType, int,
                         cublasComputeType_t, cublasGemmAlgo_t) = nullptr;

  Cublas() {
    cuda::SharedLibrary library("libcublas.so." + std::to_string(CUBLAS_VER_MAJOR));
    library.resolve("cublasCreate_v2", &create);
    library.resolve("cublasSetMathMode", &set_math_mode);
    library.resolve("cublasGemmEx", &gemm);
    if (library.ok()) return;
    std::fprintf(stderr, "%s\n", library.error().c_str());
    std::abort();
  }
};

class CudaArena final : public Arena {
 public:
  CudaArena() {
    // Thousands of small buffers come and go: keep freed memory instead of returning it each time.
    cudaMemPool_t pool{};
    require(cudaDeviceGetDefaultMemPool(&pool, 0), "cudaDeviceGetDefaultMemPool");
    std::uint64_t keep = std::uint64_t{1} << 34;
    require(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
    require(cublas_.create(&handle_), "cublasCreate");
    require(cublas_.set_math_mode(handle_, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");
  }

  Device device() const override { return Device::kCuda; }
  void* allocate(std::size_t bytes) override {
    void* data = nullptr;
    require(cudaMallocAsync(&data, bytes, nullptr), "cudaMallocAsync");
    require(cudaStreamSynchronize(nullptr), "cudaMallocAsync");  // other streams use it at once
    return data;
  }
  void release(void* data, std::size_t) override {
    require(cudaDeviceSynchronize(), "work before a release");
    require(cudaFreeAsync(data, nullptr), "cudaFreeAsync");
  }
  void upload(void* to, const void* from, std::size_t bytes) override {
    require(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice), "upload");
    require(cudaStreamSynchronize(nullptr), "upload");  // a pageable copy may return before it has arrived
  }
  void download(void* to, const void* from, std::size_t bytes) override {
    require(cudaDeviceSynchronize(), "work before a download");
    require(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost), "download");
  }

  void* make_stream() override {
    cudaStream_t stream = nullptr;
    require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    return stream;
  }
  void release_stream(void* stream) override {
    require(cudaStreamDestroy(static_cast<cudaStream_t>(stream)), "cudaStreamDestroy");
  }

  std::vector<float> multiply(DType type, const std::vector<float>& a, const std::vector<float>& b, std::int64_t m,
                              std::int64_t n, std::int64_t k) override {
    std::vector<float> c(static_cast<std::size_t>(m * n));
    if (c.empty()) return c;
    const Operand da(*this, type, a), db(*this, type, b), dc(*this, DType::kFloat32, c);
    const cudaDataType_t in = type == DType::kBFloat16  ? CUDA_R_16BF
                              : type == DType::kFloat16 ? CUDA_R_16F
                                                        : CUDA_R_32F;
    const float one = 1, zero = 0;
    // Column-major: c^T [n, m] = b [n, k] a^T [k, m].
    require(cublas_.gemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, static_cast<int>(n), static_cast<int>(m),
                         static_cast<int>(k), &one, db.data, in, static_cast<int>(k), da.data, in, static_cast<int>(k),
                         &zero, dc.data, CUDA_R_32F, static_cast<int>(n), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
            "cublasGemmEx");
    download(c.data(), dc.data, c.size() * sizeof(float));
    return c;
  }

 private:
  /// A host matrix of values that `type` holds exactly, on the device in that type.
  struct Operand {
    Operand(CudaArena& arena, DType type, const std::vector<float>& values) : arena_(arena) {
      bytes_ = values.size() * size_of(type);
      data = arena.allocate(bytes_);
      if (type == DType::kFloat32) {
        arena.upload(data, values.data(), bytes_);
        return;
      }
      std::vector<std::uint16_t> half(values.size());
      for (std::size_t i = 0; i < half.size(); ++i)
        half[i] = type == DType::kBFloat16 ? float_to_bf16(values[i]) : float_to_fp16(values[i]);
      arena.upload(data, half.data(), bytes_);
    }
    Operand(const Operand&) = delete;
    Operand& operator=(const Operand&) = delete;
    ~Operand() { arena_.release(data, bytes_); }
    void* data;

   private:
    CudaArena& arena_;
    std::size_t bytes_;
  };

  Cublas cublas_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace

Arena& cuda_arena() {
  static auto* arena = new CudaArena;  // never destroyed: the driver may be gone by then
  return *arena;
}

}  // namespace lmhead::testing
