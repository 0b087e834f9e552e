// bf16 products by oneDNN (AMX or AVX512-BF16), as one-thread matmul primitives kept by shape.
//
// Bits (2.6.3): oneDNN picks its blocking from the shape. On AMX, with depths of at most kAmxDepth, accumulated
// by append_sum, an element of C has the same bits for every m >= 2 and n > kNarrow. Not so deeper products,
// m = 1, and m n <= 256. On AVX512-BF16 bits do not depend on m at any depth, and parts cost a quarter of the
// rate. Its fp32 products depend on m in more ways, and it has no fp16 ones: those run in the own loop.
#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <oneapi/dnnl/dnnl.hpp>

#include "cpu/gemm.h"

namespace lmhead {
namespace {

constexpr std::int64_t kAmxDepth = 1024;
/// Products this deep read a transposed A at three quarters of the rate; it is transposed here first.
constexpr std::int64_t kShallow = 512;
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

/// Depth of one product; a deeper one runs in parts.
std::int64_t depth() {
  static const bool amx = [] {
    constexpr auto kAmx = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_amx);
    return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & kAmx) == kAmx;
  }();
  return amx ? kAmxDepth : std::numeric_limits<std::int64_t>::max();
}

bool same(const GemmShape& a, const GemmShape& b) {
  return a.m == b.m && a.n == b.n && a.k == b.k && a.trans_a == b.trans_a && a.trans_b == b.trans_b && a.lda == b.lda &&
         a.ldb == b.ldb && a.ldc == b.ldc && a.accumulate == b.accumulate && a.narrow_output == b.narrow_output;
}
struct Same {
  bool operator()(const GemmShape& a, const GemmShape& b) const { return same(a, b); }
};
struct Hash {
  std::size_t operator()(const GemmShape& s) const {
    std::size_t h = static_cast<std::size_t>(s.trans_a) | static_cast<std::size_t>(s.trans_b) << 1 |
                    static_cast<std::size_t>(s.accumulate) << 2 | static_cast<std::size_t>(s.narrow_output) << 3;
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
  kernel.c = memory::desc({s.m, s.n}, s.narrow_output ? memory::data_type::bf16 : memory::data_type::f32, {s.ldc, 1});
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

/// out [cols, rows] = in [rows, cols] transposed, in blocks of 8 x 8.
void transpose(const std::uint16_t* in, std::int64_t stride, std::int64_t rows, std::int64_t cols, std::uint16_t* out) {
  typedef std::uint16_t Eight __attribute__((vector_size(16)));
  const auto interleave = [](Eight a, Eight b, Eight& low, Eight& high) {
    low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
    high = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  };
  const std::int64_t whole_rows = rows / 8 * 8, whole_cols = cols / 8 * 8;
  for (std::int64_t i = 0; i < whole_rows; i += 8)
    for (std::int64_t j = 0; j < whole_cols; j += 8) {
      // Three rounds of interleaving row k with row k + 4 transpose 8 x 8.
      Eight a[8], b[8];
      for (int k = 0; k < 8; ++k) std::memcpy(&a[k], in + (i + k) * stride + j, sizeof a[k]);
      for (std::int64_t k = 0; k < 4; ++k) interleave(a[k], a[k + 4], b[2 * k], b[2 * k + 1]);
      for (std::int64_t k = 0; k < 4; ++k) interleave(b[k], b[k + 4], a[2 * k], a[2 * k + 1]);
      for (std::int64_t k = 0; k < 4; ++k) interleave(a[k], a[k + 4], b[2 * k], b[2 * k + 1]);
      for (int k = 0; k < 8; ++k) std::memcpy(out + (j + k) * rows + i, &b[k], sizeof b[k]);
    }
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = i < whole_rows ? whole_cols : 0; j < cols; ++j) out[j * rows + i] = in[i * stride + j];
}

bool transposes(const GemmShape& s) { return s.trans_a && s.k <= kShallow; }
std::size_t transposed_bytes(const GemmShape& s) {
  return transposes(s) ? static_cast<std::size_t>((s.m * s.k * 2 + 63) / 64 * 64) : 0;
}

/// Deep products in one part copy A and B or not, by stride; so do all whose bytes pass 32 bits.
bool stride_changes_bits(std::int64_t k, std::int64_t stride) {
  return stride != k && (stride > std::numeric_limits<std::int32_t>::max() / 2 || (k > kAmxDepth && k <= depth()));
}

bool narrow_output(const GemmShape& s) { return !s.accumulate && s.k <= depth(); }

void multiply(const GemmShape& shape, const void* a, const void* b, void* c, void* scratch, std::size_t scratch_bytes) {
  multiply_adds().fetch_add(shape.m * shape.n * shape.k, std::memory_order_relaxed);
  const auto* pa = static_cast<const std::uint16_t*>(a);
  const auto* pb = static_cast<const std::uint16_t*>(b);
  GemmShape part = shape;
  if (transposes(shape) && transposed_bytes(shape) <= scratch_bytes) {
    transpose(pa, shape.lda, shape.k, shape.m, static_cast<std::uint16_t*>(scratch));
    pa = static_cast<const std::uint16_t*>(scratch);
    part.trans_a = false;
    part.lda = shape.k;
    scratch = static_cast<std::byte*>(scratch) + transposed_bytes(shape);
    scratch_bytes -= transposed_bytes(shape);
  }
  for (std::int64_t p = 0; p < shape.k; p += part.k) {
    part.k = std::min(depth(), shape.k - p);
    part.accumulate = shape.accumulate || p > 0;
    const std::shared_ptr<const Kernel> kernel = kernel_for(part);
    // The estimate in scratch_bytes covers the shapes of the backend; an odd one brings its own.
    std::vector<std::byte> own(kernel->scratch.get_size() > scratch_bytes ? kernel->scratch.get_size() : 0);
    const auto memory = [](const dnnl::memory::desc& description, const void* data) {
      return dnnl::memory(description, engine(), const_cast<void*>(data));  // inputs are only read
    };
    dnnl::stream stream(engine());
    kernel->multiply.execute(stream,
                             {{DNNL_ARG_SRC, memory(kernel->a, pa + (part.trans_a ? p * part.lda : p))},
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
    for (const std::int64_t k : {std::min(depth(), largest.k), largest.k % depth()}) {
      if (k <= less || largest.m <= less || largest.n <= less) continue;
      part.k = k - less;
      part.m = largest.m - less;
      part.n = largest.n - less;
      part.trans_a = largest.trans_a && !transposes(part);
      part.lda = part.trans_a || !largest.trans_a ? largest.lda : part.k;
      const bool narrow = largest.narrow_output && narrow_output(part);
      for (const bool output : {false, narrow}) {
        part.narrow_output = output;
        bytes = std::max(bytes, kernel_for(part)->scratch.get_size());
      }
    }
  GemmShape shallow = largest;  // fewer rows than planned for make a deep product shallow
  shallow.k = std::min(kShallow, largest.k);
  return bytes + transposed_bytes(shallow);
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
    .narrow_output = narrow_output,
    .stride_changes_bits = stride_changes_bits,
    .scratch_bytes = scratch_bytes,
    .multiply = multiply,
    .describe = describe,
};

}  // namespace lmhead
