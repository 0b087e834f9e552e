// The Hopper instructions that the sm90 kernels use, one thin wrapper each: mbarrier, the tensor memory
// accelerator (TMA), wgmma, stmatrix, setmaxnreg. PTX ISA 8.0, sm_90a.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace lmhead::cuda::sm90 {

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarrier -----------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
/// Makes the initialised barriers visible to the TMA unit; a __syncthreads() must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra DONE_%=;\n"
      "bra WAIT_%=;\nDONE_%=:\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// ---- tensor memory accelerator --------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
/// One box of a 2-D tensor into shared memory; its bytes count towards `barrier`.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, std::uint64_t* barrier, int col, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(col), "r"(row)
      : "memory");
}
__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int col, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(col), "r"(row)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Waits until at most kPending store groups of this thread still read shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until all stores of this thread are in global memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
/// Orders shared-memory writes of this thread before later TMA reads of them.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers, fast math -----------------------------------------------------------------------

template <int kRegisters>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
/// 2^x to 2 ulp, subnormal results flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// max(x, y), NaN if either is.
__device__ __forceinline__ float max_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
template <class T>
__device__ __forceinline__ std::uint32_t pack2(float low, float high) {
  std::uint32_t r;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}
__device__ __forceinline__ void stmatrix_x4(std::uint32_t address, std::uint32_t a, std::uint32_t b, std::uint32_t c,
                                            std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// ---- wgmma ----------------------------------------------------------------------------------------
// Lane l of warp w holds, for column group j: d[4j], d[4j+1] = row 16w + l/4, columns 8j + 2(l%4) and
// the next; d[4j+2], d[4j+3] the same columns of row 16w + l/4 + 8.

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Shared-memory descriptor of a 128-byte-swizzled operand, `depth` k values a stage.
/// k-major: rows of 128 bytes (64 k), 1024 bytes to the next 8 rows. mn-major (kTranspose): 64 m or n
/// values a row, one row a k value, depth * 128 bytes to the next 64 values.
template <int kTranspose, int kDepth>
__device__ __forceinline__ std::uint64_t operand_descriptor(const void* p) {
  std::uint64_t d = (shared_address(p) & 0x3FFFFu) >> 4;
  d |= std::uint64_t{kTranspose ? (kDepth * 128) >> 4 : 1} << 16;
  d |= std::uint64_t{1024 >> 4} << 32;
  return d | std::uint64_t{1} << 62;
}
/// Descriptor steps to the next 16 k values.
template <int kTranspose>
inline constexpr std::uint64_t kDescriptorStep = kTranspose ? (16 * 128) >> 4 : (16 * 2) >> 4;

/// D[64, 256] (+)= A[64, 16] B[16, 256]; accumulator fragments in d[0..127].
#define LMHEAD_WGMMA_N256(TYPE)                                                                                      \
  asm volatile(                                                                                                      \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE                                                   \
      " {"                                                                                                           \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                             \
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                             \
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                             \
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                 \
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"               \
      "}, %128, %129, p, 1, 1, %131, %132;\n}\n"                                                                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),  \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),       \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),      \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),      \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),      \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),      \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),      \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),      \
        "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),      \
        "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),      \
        "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),      \
        "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),      \
        "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]), \
        "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),            \
        "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),            \
        "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),            \
        "+f"(d[126]), "+f"(d[127])                                                                                   \
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB))

/// D[64, 64] (+)= A[64, 16] B[16, 64]; accumulator fragments in d[0..31].
#define LMHEAD_WGMMA_N64(TYPE)                                                                                      \
  asm volatile(                                                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                   \
      " {"                                                                                                          \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                      \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                              \
      "}, %32, %33, p, 1, 1, %35, %36;\n}\n"                                                                        \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),      \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),     \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                   \
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB))

/// D[64, 128] (+)= A[64, 16] B[16, 128]; accumulator fragments in d[first..first + 63].
#define LMHEAD_WGMMA_N128(TYPE)                                                                                       \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                                    \
      " {"                                                                                                            \
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                        \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                              \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                              \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                                \
      "}, %64, %65, p, 1, 1, %67, %68;\n}\n"                                                                          \
      : "+f"(d[kFirst + 0]), "+f"(d[kFirst + 1]), "+f"(d[kFirst + 2]), "+f"(d[kFirst + 3]), "+f"(d[kFirst + 4]),      \
        "+f"(d[kFirst + 5]), "+f"(d[kFirst + 6]), "+f"(d[kFirst + 7]), "+f"(d[kFirst + 8]), "+f"(d[kFirst + 9]),      \
        "+f"(d[kFirst + 10]), "+f"(d[kFirst + 11]), "+f"(d[kFirst + 12]), "+f"(d[kFirst + 13]), "+f"(d[kFirst + 14]), \
        "+f"(d[kFirst + 15]), "+f"(d[kFirst + 16]), "+f"(d[kFirst + 17]), "+f"(d[kFirst + 18]), "+f"(d[kFirst + 19]), \
        "+f"(d[kFirst + 20]), "+f"(d[kFirst + 21]), "+f"(d[kFirst + 22]), "+f"(d[kFirst + 23]), "+f"(d[kFirst + 24]), \
        "+f"(d[kFirst + 25]), "+f"(d[kFirst + 26]), "+f"(d[kFirst + 27]), "+f"(d[kFirst + 28]), "+f"(d[kFirst + 29]), \
        "+f"(d[kFirst + 30]), "+f"(d[kFirst + 31]), "+f"(d[kFirst + 32]), "+f"(d[kFirst + 33]), "+f"(d[kFirst + 34]), \
        "+f"(d[kFirst + 35]), "+f"(d[kFirst + 36]), "+f"(d[kFirst + 37]), "+f"(d[kFirst + 38]), "+f"(d[kFirst + 39]), \
        "+f"(d[kFirst + 40]), "+f"(d[kFirst + 41]), "+f"(d[kFirst + 42]), "+f"(d[kFirst + 43]), "+f"(d[kFirst + 44]), \
        "+f"(d[kFirst + 45]), "+f"(d[kFirst + 46]), "+f"(d[kFirst + 47]), "+f"(d[kFirst + 48]), "+f"(d[kFirst + 49]), \
        "+f"(d[kFirst + 50]), "+f"(d[kFirst + 51]), "+f"(d[kFirst + 52]), "+f"(d[kFirst + 53]), "+f"(d[kFirst + 54]), \
        "+f"(d[kFirst + 55]), "+f"(d[kFirst + 56]), "+f"(d[kFirst + 57]), "+f"(d[kFirst + 58]), "+f"(d[kFirst + 59]), \
        "+f"(d[kFirst + 60]), "+f"(d[kFirst + 61]), "+f"(d[kFirst + 62]), "+f"(d[kFirst + 63])                        \
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB))

/// kFirst: the first accumulator register, for 128 columns only.
template <class T, int kColumns, int kTransposeA, int kTransposeB, int kFirst = 0>
__device__ __forceinline__ void wgmma(float (&d)[128], std::uint64_t a, std::uint64_t b, int accumulate) {
  static_assert(kColumns == 256 || kColumns == 128 || kColumns == 64);
  constexpr bool kBf16 = std::is_same_v<T, __nv_bfloat16>;
  if constexpr (kColumns == 256 && kBf16) {
    LMHEAD_WGMMA_N256("bf16");
  } else if constexpr (kColumns == 256) {
    LMHEAD_WGMMA_N256("f16");
  } else if constexpr (kColumns == 128 && kBf16) {
    LMHEAD_WGMMA_N128("bf16");
  } else if constexpr (kColumns == 128) {
    LMHEAD_WGMMA_N128("f16");
  } else if constexpr (kBf16) {
    LMHEAD_WGMMA_N64("bf16");
  } else {
    LMHEAD_WGMMA_N64("f16");
  }
}
#undef LMHEAD_WGMMA_N256
#undef LMHEAD_WGMMA_N128
#undef LMHEAD_WGMMA_N64

}  // namespace lmhead::cuda::sm90
