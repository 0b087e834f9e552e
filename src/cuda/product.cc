#include "cuda/product.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "core/return_if_error.h"
#include "cuda/cublas_lt.h"
#include "cuda/launch.h"

namespace lmhead::cuda {
namespace {

/// Varying batch sizes must not grow the cache without bound.
constexpr std::size_t kMaxCachedAlgorithms = 4096;

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16: return CUDA_R_16BF;
    case DType::kFloat16: return CUDA_R_16F;
    default: return CUDA_R_32F;
  }
}

/// Largest power of two, at most 256, that divides the address and the byte stride.
std::uint32_t alignment(const void* data, std::int64_t row_stride, DType dtype) {
  const auto bits = reinterpret_cast<std::uintptr_t>(data) |
                    static_cast<std::uintptr_t>(row_stride) * static_cast<std::uintptr_t>(size_of(dtype)) | 256u;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

Status to_status(const CublasLt& lt, cublasStatus_t error, const char* what) {
  if (error == CUBLAS_STATUS_SUCCESS) return {};
  return {error == CUBLAS_STATUS_ALLOC_FAILED ? StatusCode::kOutOfMemory : StatusCode::kInternal,
          std::string(what) + ": " + lt.cublasLtGetStatusString(error)};
}

/// Handles are leased for one call, so that threads neither share one nor leave one behind when they
/// end. Never destroyed: at exit the driver may be gone before static destructors run.
class HandlePool {
 public:
  class Lease {
   public:
    Lease(HandlePool* pool, int device, cublasLtHandle_t handle) : pool_(pool), device_(device), handle_(handle) {}
    Lease(Lease&& other) noexcept : pool_(other.pool_), device_(other.device_), handle_(other.handle_) {
      other.pool_ = nullptr;
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      if (pool_ != nullptr) pool_->give_back(device_, handle_);
    }
    cublasLtHandle_t get() const { return handle_; }

   private:
    HandlePool* pool_;
    int device_;
    cublasLtHandle_t handle_;
  };

  Result<Lease> acquire(const CublasLt& lt, int device) {
    {
      const std::lock_guard lock(mutex_);
      std::vector<cublasLtHandle_t>& free = free_[device];
      if (!free.empty()) {
        const cublasLtHandle_t handle = free.back();
        free.pop_back();
        return Lease(this, device, handle);
      }
    }
    cublasLtHandle_t handle = nullptr;
    LMHEAD_RETURN_IF_ERROR(to_status(lt, lt.cublasLtCreate(&handle), "cublasLtCreate"));
    return Lease(this, device, handle);
  }

 private:
  void give_back(int device, cublasLtHandle_t handle) {
    const std::lock_guard lock(mutex_);
    free_[device].push_back(handle);
  }

  std::mutex mutex_;
  std::map<int, std::vector<cublasLtHandle_t>> free_;
};

HandlePool& handles() {
  static auto* pool = new HandlePool;
  return *pool;
}

/// Everything that the choice of an algorithm may depend on.
using AlgorithmKey = std::array<std::int64_t, 17>;

class AlgorithmCache {
 public:
  bool find(const AlgorithmKey& key, cublasLtMatmulAlgo_t* algorithm) {
    const std::lock_guard lock(mutex_);
    const auto it = known_.find(key);
    if (it == known_.end()) return false;
    *algorithm = it->second;
    return true;
  }
  void insert(const AlgorithmKey& key, const cublasLtMatmulAlgo_t& algorithm) {
    const std::lock_guard lock(mutex_);
    if (known_.size() >= kMaxCachedAlgorithms) known_.clear();
    known_.emplace(key, algorithm);
  }

 private:
  std::mutex mutex_;
  std::map<AlgorithmKey, cublasLtMatmulAlgo_t> known_;
};

AlgorithmCache& algorithms() {
  static auto* cache = new AlgorithmCache;
  return *cache;
}

/// Owns the descriptors of one product; they are plain host structures.
struct Descriptors {
  const CublasLt& lt;
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, out = nullptr;
  cublasLtMatmulPreference_t preference = nullptr;
  explicit Descriptors(const CublasLt& library) : lt(library) {}
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() {
    if (preference != nullptr) lt.cublasLtMatmulPreferenceDestroy(preference);
    for (cublasLtMatrixLayout_t layout : {a, b, out}) {
      if (layout != nullptr) lt.cublasLtMatrixLayoutDestroy(layout);
    }
    if (operation != nullptr) lt.cublasLtMatmulDescDestroy(operation);
  }
};

template <class T>
Status set_operation(const Descriptors& d, cublasLtMatmulDescAttributes_t attribute, T value) {
  return to_status(d.lt, d.lt.cublasLtMatmulDescSetAttribute(d.operation, attribute, &value, sizeof value),
                   "cublasLtMatmulDescSetAttribute");
}
template <class T>
Status set_preference(const Descriptors& d, cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  return to_status(d.lt, d.lt.cublasLtMatmulPreferenceSetAttribute(d.preference, attribute, &value, sizeof value),
                   "cublasLtMatmulPreferenceSetAttribute");
}
Status make_layout(const Descriptors& d, cublasLtMatrixLayout_t* layout, DType dtype, std::int64_t rows,
                   std::int64_t cols, std::int64_t leading) {
  return to_status(d.lt,
                   d.lt.cublasLtMatrixLayoutCreate(layout, data_type(dtype), static_cast<std::uint64_t>(rows),
                                                   static_cast<std::uint64_t>(cols), leading),
                   "cublasLtMatrixLayoutCreate");
}

/// A single row may come with any stride, also 0 or one that cuBLASLt cannot step by.
std::int64_t leading(std::int64_t rows, std::int64_t width, std::int64_t stride) {
  return rows == 1 && stride > std::numeric_limits<std::int32_t>::max() ? width : std::max(stride, width);
}

/// Parts in which a sum of k fp32 products is formed. One accumulator errs by about sqrt(k) roundings, s parts and
/// their sum by sqrt(k / s) and sqrt(s), least where both are equal. A power of two near sqrt(k).
std::uint32_t sum_parts(std::int64_t k) {
  if (k < 32) return 1;
  return std::uint32_t{1} << (std::bit_width(static_cast<std::uint64_t>(k)) - 1) / 2;
}

/// Splits the sum of an fp32 product into parts, as many of sum_parts as the workspace holds. cuBLASLt by itself
/// splits for speed only and differently for each layout, and a product in fp32 has no later rounding to hide behind.
void split_sum(cublasLtHandle_t handle, const Product& p, const Descriptors& d, cublasLtMatmulAlgo_t* algorithm) {
  std::int32_t own = 0;  // -1: the kernel's own affair
  std::size_t written = 0;
  if (d.lt.cublasLtMatmulAlgoConfigGetAttribute(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &own, sizeof own,
                                                &written) != CUBLAS_STATUS_SUCCESS)
    return;
  const std::uint32_t wanted = sum_parts(p.k);
  const bool too_many = own > static_cast<std::int32_t>(2 * wanted);
  for (std::uint32_t parts = wanted; parts > 1 && (too_many || static_cast<std::int32_t>(parts) > own); parts /= 2) {
    cublasLtMatmulAlgo_t trial = *algorithm;
    const std::uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulHeuristicResult_t result{};
    if (d.lt.cublasLtMatmulAlgoConfigSetAttribute(&trial, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts) ==
            CUBLAS_STATUS_SUCCESS &&
        d.lt.cublasLtMatmulAlgoConfigSetAttribute(&trial, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme,
                                                  sizeof scheme) == CUBLAS_STATUS_SUCCESS &&
        d.lt.cublasLtMatmulAlgoCheck(handle, d.operation, d.a, d.b, d.out, d.out, &trial, &result) ==
            CUBLAS_STATUS_SUCCESS &&
        result.workspaceSize <= p.workspace_bytes) {
      *algorithm = trial;
      return;
    }
  }
}

Status choose_algorithm(cublasLtHandle_t handle, const Product& p, const Descriptors& d,
                        const std::array<std::uint32_t, 3>& align, cublasLtMatmulAlgo_t* algorithm) {
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status = d.lt.cublasLtMatmulAlgoGetHeuristic(handle, d.operation, d.a, d.b, d.out, d.out,
                                                                    d.preference, 1, &result, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0)
    return {StatusCode::kInternal, "cuBLASLt: no algorithm for a " + std::to_string(p.m) + " x " + std::to_string(p.n) +
                                       " x " + std::to_string(p.k) + " product of " + to_string(p.in) + " into " +
                                       to_string(p.out_type) + " with alignments " + std::to_string(align[0]) + ", " +
                                       std::to_string(align[1]) + ", " + std::to_string(align[2]) + " bytes (" +
                                       d.lt.cublasLtGetStatusString(status) + ")"};
  *algorithm = result.algo;
  if (p.sum_in_parts && p.in == DType::kFloat32 && !p.allow_tf32) split_sum(handle, p, d, algorithm);
  return {};
}

}  // namespace

std::size_t product_workspace(std::int64_t m, std::int64_t n, DType in) {
  // cuBLASLt splits sums by itself, for speed; small fp32 products, which the vendor's bound splits too, the most.
  const std::size_t parts = in == DType::kFloat32 ? 256 : 8;
  constexpr std::size_t kCounters = 8192;  // beside the sums
  return static_cast<std::size_t>(m * n) * sizeof(float) * parts + kCounters;
}

Status multiply(const Product& p, cudaStream_t stream) {
  Result<const DeviceProperties*> device = current_device();
  if (!device.ok()) return device.status();
  const Result<const CublasLt*> library = cublas_lt();
  if (!library.ok()) return library.status();
  const CublasLt& lt = **library;

  // cuBLASLt is column-major: a row-major [m, n] is its [n, m], so out^T = op(b)^T op(a)^T and b comes
  // first. A row-major matrix read as column-major is already transposed once.
  const cublasOperation_t op_first = p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_second = p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const std::int64_t b_rows = p.transpose_b ? p.k : p.n, b_cols = p.transpose_b ? p.n : p.k;
  const std::int64_t a_rows = p.transpose_a ? p.m : p.k, a_cols = p.transpose_a ? p.k : p.m;
  const std::int64_t ldb = leading(b_cols, b_rows, p.b.row_stride), lda = leading(a_cols, a_rows, p.a.row_stride);
  const std::int64_t ldo = leading(p.m, p.n, p.out_stride);
  const bool tf32 = p.allow_tf32 && p.in == DType::kFloat32;

  Descriptors d(lt);
  LMHEAD_RETURN_IF_ERROR(to_status(
      lt,
      lt.cublasLtMatmulDescCreate(&d.operation, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
      "cublasLtMatmulDescCreate"));
  LMHEAD_RETURN_IF_ERROR(set_operation(d, CUBLASLT_MATMUL_DESC_TRANSA, op_first));
  LMHEAD_RETURN_IF_ERROR(set_operation(d, CUBLASLT_MATMUL_DESC_TRANSB, op_second));
  LMHEAD_RETURN_IF_ERROR(make_layout(d, &d.a, p.in, b_rows, b_cols, ldb));
  LMHEAD_RETURN_IF_ERROR(make_layout(d, &d.b, p.in, a_rows, a_cols, lda));
  LMHEAD_RETURN_IF_ERROR(make_layout(d, &d.out, p.out_type, p.n, p.m, ldo));

  Result<HandlePool::Lease> handle = handles().acquire(lt, (*device)->ordinal);
  if (!handle.ok()) return handle.status();

  const std::array<std::uint32_t, 3> align = {alignment(p.b.data, ldb, p.in), alignment(p.a.data, lda, p.in),
                                              alignment(p.out, ldo, p.out_type)};
  const AlgorithmKey key = {(*device)->ordinal,
                            p.m,
                            p.n,
                            p.k,
                            lda,
                            ldb,
                            ldo,
                            p.transpose_a,
                            p.transpose_b,
                            static_cast<std::int64_t>(p.in) * 16 + static_cast<std::int64_t>(p.out_type),
                            tf32,
                            p.accumulate,
                            p.sum_in_parts,
                            static_cast<std::int64_t>(p.workspace_bytes),
                            align[0],
                            align[1],
                            align[2]};
  cublasLtMatmulAlgo_t algorithm;
  if (!algorithms().find(key, &algorithm)) {
    LMHEAD_RETURN_IF_ERROR(
        to_status(lt, lt.cublasLtMatmulPreferenceCreate(&d.preference), "cublasLtMatmulPreferenceCreate"));
    LMHEAD_RETURN_IF_ERROR(set_preference(d, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.workspace_bytes));
    // Split reductions only through fp32 partial sums added in a fixed order: bits repeat, and nothing is
    // rounded to the output type on the way.
    LMHEAD_RETURN_IF_ERROR(set_preference(
        d, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
    LMHEAD_RETURN_IF_ERROR(set_preference(d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align[0]));
    LMHEAD_RETURN_IF_ERROR(set_preference(d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align[1]));
    LMHEAD_RETURN_IF_ERROR(set_preference(d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align[2]));
    LMHEAD_RETURN_IF_ERROR(set_preference(d, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align[2]));
    LMHEAD_RETURN_IF_ERROR(choose_algorithm(handle->get(), p, d, align, &algorithm));
    algorithms().insert(key, algorithm);
  }

  const float one = 1.0f, beta = p.accumulate ? 1.0f : 0.0f;
  return to_status(lt,
                   lt.cublasLtMatmul(handle->get(), d.operation, &one, p.b.data, d.a, p.a.data, d.b, &beta, p.out,
                                     d.out, p.out, d.out, &algorithm, p.workspace, p.workspace_bytes, stream),
                   "cublasLtMatmul");
}

}  // namespace lmhead::cuda
