// bf16 products by oneDNN (AMX or AVX512-BF16), as one-thread matmul primitives kept by shape.
//
// Bits (2.6.3, AMX and AVX512-BF16): oneDNN picks its blocking from the shape. With depths of at most
// kDepth, accumulated by append_sum, an element of C has the same bits for every m >= 2 and n > kNarrow. Not
// so deeper products, m = 1, and m n <= 256. Its fp32 products depend on m in more ways, and it has no fp16
// ones: those run in the own loop.
#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "cpu/gemm.h"

namespace lmhead {
namespace {

constexpr std::int64_t kDepth = 1024;
/// Kernels kept; each shape costs some milliseconds to build again.
constexpr std::size_t kKept = 512;

const dnnl::engine& engine() {
  static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

bool has_bf16() {
  static const bool found = [] {
    constexpr auto kNeeded = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kNeeded) == kNeeded;
  }();
  return found;
}

bool same(const GemmShape& a, const GemmShape& b) {
  return a.m == b.m && a.n == b.n && a.k == b.k && a.trans_a == b.trans_a && a.trans_b == b.trans_b && a.lda == b.lda &&
         a.ldb == b.ldb && a.ldc == b.ldc && a.accumulate == b.accumulate;
}
struct Same {
  bool operator()(const GemmShape& a, const GemmShape& b) const { return same(a, b); }
};
struct Hash {
  std::size_t operator()(const GemmShape& s) const {
    std::size_t h = static_cast<std::size_t>(s.trans_a) | static_cast<std::size_t>(s.trans_b) << 1 |
                    static_cast<std::size_t>(s.accumulate) << 2;
    for (const std::int64_t v : {s.m, s.n, s.k, s.lda, s.ldb, s.ldc})
      h = (h ^ static_cast<std::size_t>(v)) * 0x9e3779b97f4a7c15u, h ^= h >> 29;
    return h;
  }
};

struct Kernel {
  dnnl::memory::desc a, b, c, scratch;
  dnnl::matmul multiply;
  std::string name;
};

Kernel make_kernel(const GemmShape& s) {
  using dnnl::memory;
  const memory::dims along_a = s.trans_a ? memory::dims{1, s.lda} : memory::dims{s.lda, 1};
  const memory::dims along_b = s.trans_b ? memory::dims{1, s.ldb} : memory::dims{s.ldb, 1};
  Kernel kernel;
  kernel.a = memory::desc({s.m, s.k}, memory::data_type::bf16, along_a);
  kernel.b = memory::desc({s.k, s.n}, memory::data_type::bf16, along_b);
  kernel.c = memory::desc({s.m, s.n}, memory::data_type::f32, {s.ldc, 1});
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (s.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const dnnl::matmul::primitive_desc descriptor(dnnl::matmul::desc(kernel.a, kernel.b, kernel.c), attributes, engine());
  kernel.scratch = descriptor.scratchpad_desc();
  kernel.multiply = dnnl::matmul(descriptor);
  kernel.name = descriptor.impl_info_str();
  return kernel;
}

/// Kernels by shape, for all threads: primitives may run concurrently with separate scratch memory.
std::shared_ptr<const Kernel> kernel_for(const GemmShape& shape) {
  static std::mutex mutex;
  static std::unordered_map<GemmShape, std::shared_ptr<const Kernel>, Hash, Same> kernels;
  const std::lock_guard lock(mutex);
  if (const auto found = kernels.find(shape); found != kernels.end()) return found->second;
  if (kernels.size() >= kKept) kernels.clear();
  return kernels[shape] = std::make_shared<const Kernel>(make_kernel(shape));
}

void multiply(const GemmShape& shape, const void* a, const void* b, float* c, void* scratch,
              std::size_t scratch_bytes) {
  const auto* pa = static_cast<const std::uint16_t*>(a);
  const auto* pb = static_cast<const std::uint16_t*>(b);
  GemmShape part = shape;
  multiply_adds().fetch_add(shape.m * shape.n * shape.k, std::memory_order_relaxed);
  for (std::int64_t p = 0; p < shape.k; p += kDepth) {
    part.k = std::min(kDepth, shape.k - p);
    part.accumulate = shape.accumulate || p > 0;
    const std::shared_ptr<const Kernel> kernel = kernel_for(part);
    // The estimate in scratch_bytes covers the shapes of the backend; an odd one brings its own.
    std::vector<std::byte> own(kernel->scratch.get_size() > scratch_bytes ? kernel->scratch.get_size() : 0);
    const auto memory = [](const dnnl::memory::desc& description, const void* data) {
      return dnnl::memory(description, engine(), const_cast<void*>(data));  // inputs are only read
    };
    dnnl::stream stream(engine());
    kernel->multiply.execute(stream,
                             {{DNNL_ARG_SRC, memory(kernel->a, pa + (shape.trans_a ? p * shape.lda : p))},
                              {DNNL_ARG_WEIGHTS, memory(kernel->b, pb + (shape.trans_b ? p : p * shape.ldb))},
                              {DNNL_ARG_DST, memory(kernel->c, c)},
                              {DNNL_ARG_SCRATCHPAD, memory(kernel->scratch, own.empty() ? scratch : own.data())}});
  }
}

std::size_t scratch_bytes(const GemmShape& largest) {
  const SingleThreaded single;
  GemmShape part = largest;
  std::size_t bytes = 0;
  // Ragged sizes need copies that whole ones do not.
  for (const std::int64_t less : {0, 1})
    for (const std::int64_t k : {std::min(kDepth, largest.k), largest.k % kDepth}) {
      if (k <= less || part.m <= less || part.n <= less) continue;
      part.k = k - less;
      part.m = largest.m - less;
      part.n = largest.n - less;
      bytes = std::max(bytes, kernel_for(part)->scratch.get_size());
    }
  return bytes;
}

std::string describe(DType) {
  const dnnl_version_t* v = dnnl_version();
  const SingleThreaded single;
  const GemmShape tile{.m = 128,
                       .n = 2048,
                       .k = 1024,
                       .a_type = DType::kBFloat16,
                       .b_type = DType::kBFloat16,
                       .trans_a = false,
                       .trans_b = true,
                       .lda = 1024,
                       .ldb = 1024,
                       .ldc = 2048,
                       .accumulate = false};
  return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch) + " " +
         kernel_for(tile)->name;
}

}  // namespace

const GemmLibrary kOneDnnGemm = {
    .supports = [](DType compute) { return compute == DType::kBFloat16 && has_bf16(); },
    .scratch_bytes = scratch_bytes,
    .multiply = multiply,
    .describe = describe,
};

}  // namespace lmhead
