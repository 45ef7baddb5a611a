// The few spellings that differ between nvcc, NVRTC (device code only) and the CPU simulator of tools/gpusim, which
// compiles these same files as plain C++. Kernels use these macros instead of the raw syntax, and nothing else is
// conditional in them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// What only later GPUs have: asynchronous copies (sm_80), clusters of blocks (sm_90, and of compilers CUDA 12.1).
// Elsewhere a kernel that needs them is empty.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
#define ONETRIP_COPY_ASYNC 1
#else
#define ONETRIP_COPY_ASYNC 0
#endif
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ < 1201
#define ONETRIP_CLUSTERS 0
#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define ONETRIP_CLUSTERS 1
#else
#define ONETRIP_CLUSTERS 0
#endif

namespace onetrip {

// Whether what is uniform in a warp, such as the keys of Philox, takes no registers from its threads: sm_75 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
constexpr bool kUniformRegisters = false;
#else
constexpr bool kUniformRegisters = true;
#endif

// Whether there is a register of the warp, too, for what only the program knows to be the same in all lanes
// (uniform_register): sm_80 and later.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr bool kWarpRegisters = false;
#else
constexpr bool kWarpRegisters = true;
#endif

}  // namespace onetrip

#if defined(ONETRIP_CUDASIM)

#include "cudasim.h"

#else

// A static array in shared memory, 16-byte aligned.
#define ONETRIP_SHARED(type, name, count) __shared__ __align__(16) type name[count]
// The dynamic shared memory of the launch.
#define ONETRIP_DYNAMIC_SHARED(type, name)                      \
  extern __shared__ __align__(16) unsigned char name##_bytes[]; \
  type* name = reinterpret_cast<type*>(name##_bytes)
// Launches and returns the error code of the launch. kernel: a name without commas, such as a function pointer.
#define ONETRIP_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__), cudaGetLastError())
// The same, in clusters of cluster_blocks blocks along x: for a kernel of which clusters_at_once() is not 0.
#define ONETRIP_LAUNCH_CLUSTERS(kernel, cluster_blocks, grid, block, shared_bytes, stream, ...) \
  ::onetrip::cleared(cudaLaunchKernelEx(                                                        \
      ::onetrip::ClusterLaunch(cluster_blocks, grid, block, shared_bytes, stream).address(), kernel, __VA_ARGS__))
// The same. early, which needs starts_early(): the kernel may start before the one before it in the stream has ended.
#define ONETRIP_LAUNCH_EARLY(kernel, early, grid, block, shared_bytes, stream, ...)                                 \
  ::onetrip::cleared(cudaLaunchKernelEx(::onetrip::EarlyLaunch(early, grid, block, shared_bytes, stream).address(), \
                                        kernel, __VA_ARGS__))

namespace onetrip {

// Programmatic dependent launch. The next kernel of the stream may start, if it was launched so, once all blocks have
// called this or have ended.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Waits until what the kernel before wrote is there. __ldg must not read it: it was written while this kernel ran.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Waits for `threads` threads (whole warps) that name the same barrier. Barrier 0 is __syncthreads; 1 to 15 are free.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* mine) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(mine));
}

#if ONETRIP_COPY_ASYNC

// Copies 8 or 16 bytes from global to shared memory past the registers; 16 past L1 as well. They have arrived, for this
// thread, once it has committed them to a group and waited until at most kPending later groups are on their way.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  static_assert(kBytes == 8 || kBytes == 16, "copies are of 8 bytes (cp.async.ca) or 16 (cp.async.cg)");
  const auto to = shared_address(shared);
  const auto from = __cvta_generic_to_global(global);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
  }
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

#if ONETRIP_CLUSTERS

// The blocks of a cluster run at the same time and reach each other's shared memory.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// A barrier of all threads of the cluster, in two halves, at which a thread vouches for nothing that it wrote and waits
// for none of it.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
// Where `mine` lies in this block's shared memory, but in that of block `rank` of the cluster, which must have begun (a
// barrier of the cluster has been passed) and must not have ended.
__device__ __forceinline__ uint32_t remote_address(const void* mine, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(mine)), "r"(rank));
  return address;
}

// Stores that are waited for by their bytes, without a barrier of the cluster, which would first wait for everything
// that the threads have stored to global memory. A barrier of a block's goes from phase to phase: the phase is over
// once one thread of the block has said how many bytes are to come, and these have been stored, from wherever, naming
// it.

// By one thread, before the first barrier of the cluster.
__device__ __forceinline__ void byte_barrier_init(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void byte_barrier_expect(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
// Waits for the end of a phase, the current or the last one. parity: 0 of the first phase, then 1 and 0 in turn. It
// acquires for the block, whose own shared memory was stored into; for the cluster it would empty the L1 cache as well.
__device__ __forceinline__ void byte_barrier_wait(uint64_t* barrier, int parity) {
  int over;
  do {
    asm volatile(
        "{\n"
        ".reg .pred over;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\n"
        "selp.b32 %0, 1, 0, over;\n"
        "}"
        : "=r"(over)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (over == 0);
}
__device__ __forceinline__ void store_remote(float* mine, int rank, float value, uint64_t* barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(remote_address(mine, rank)),
      "f"(value), "r"(remote_address(barrier, rank))
      : "memory");
}
__device__ __forceinline__ void store_remote(float2* mine, int rank, float2 value, uint64_t* barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                   remote_address(mine, rank)),
               "f"(value.x), "f"(value.y), "r"(remote_address(barrier, rank))
               : "memory");
}

#endif

// 2^x to 2 ulp in one instruction; results below 2^-126 become 0, where exp2f would take four more to keep them.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Square root, quotient and reciprocal to the nearest, by the same operations as __fsqrt_rn, __fdiv_rn and __frcp_rn
// but without their branches for operands at the ends of the range, so that several run side by side. Right for
// 2^-100 <= x and x = 0 (kZero; else it gives NaN), for a = 0 and 2^-100 <= |a| where 2^-100 <= b <= 2^20, and for
// 2^-100 <= x <= 2^100. What is not finite gives NaN.
template <bool kZero>
__device__ __forceinline__ float quick_sqrt(float x) {
  float root, inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(kZero ? fmaxf(x, 7.888609052e-31f) : x));
  asm("{\n\t.reg .f32 half, rest;\n\t"
      "mul.rn.ftz.f32 half, %2, 0f3F000000;\n\t"
      "mul.rn.ftz.f32 %0, %1, %2;\n\t"
      "neg.f32 rest, %0;\n\t"
      "fma.rn.f32 rest, rest, %0, %1;\n\t"
      "fma.rn.f32 %0, rest, half, %0;\n\t}"
      : "=&f"(root)
      : "f"(x), "f"(inverse));
  return root;
}
__device__ __forceinline__ float quick_reciprocal(float x) {
  float inverse;
  asm("{\n\t.reg .f32 rest;\n\t"
      "rcp.approx.ftz.f32 %0, %1;\n\t"
      "neg.f32 rest, %1;\n\t"
      "fma.rn.f32 rest, rest, %0, 0f3F800000;\n\t"
      "fma.rn.f32 %0, %0, rest, %0;\n\t}"
      : "=&f"(inverse)
      : "f"(x));
  return inverse;
}
__device__ __forceinline__ float quick_divide(float a, float b) {
  const float inverse = quick_reciprocal(b);
  float quotient;
  asm("{\n\t.reg .f32 rest;\n\t"
      "fma.rn.f32 %0, %1, %3, 0f00000000;\n\t"
      "neg.f32 rest, %2;\n\t"
      "fma.rn.f32 rest, rest, %0, %1;\n\t"
      "fma.rn.f32 %0, %3, rest, %0;\n\t}"
      : "=&f"(quotient)
      : "f"(a), "f"(b), "f"(inverse));
  return quotient;
}

// Two neighbours in shared memory, 16-byte aligned, read anew each time: they do not stay in registers.
__device__ __forceinline__ void read_again(uint64_t& first, uint64_t& second, const volatile uint64_t* from) {
  asm volatile("ld.volatile.shared.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "r"(shared_address(const_cast<const uint64_t*>(from))));
}

// kept ? value : 0, without a copy of a zero to be overwritten, or not, by what compilers then make conditional.
__device__ __forceinline__ float value_or_zero(float value, bool kept) {
  float result;
  asm("{\n\t.reg .pred kept;\n\tsetp.ne.u32 kept, %2, 0;\n\tselp.f32 %0, %1, 0f00000000, kept;\n\t}"
      : "=f"(result)
      : "f"(value), "r"(static_cast<uint32_t>(kept)));
  return result;
}

// value, its magnitude no larger than largest >= 0; a NaN stays.
__device__ __forceinline__ float clamp_magnitude(float value, float largest) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
  float result;
  asm("min.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(result) : "f"(value), "f"(largest));
  return result;
#else
  return fabsf(value) > largest ? copysignf(largest, value) : value;
#endif
}

// An element of an array in global memory: of an address that was read as a number, compilers cannot tell.
template <typename T, typename Index>
__device__ __forceinline__ T* global_pointer(int64_t address, Index index) {
  T* const pointer = reinterpret_cast<T*>(address) + index;
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// A pointer into global memory goes on by kElements elements, in place. unit: kAdvanceUnit, of which the compiler must
// not know the value: it would keep several such addresses instead.
constexpr uint32_t kAdvanceUnit = 128;
template <int kElements, typename T>
__device__ __forceinline__ void advance_by(T*& pointer, uint32_t unit) {
  constexpr int kUnits = kElements * static_cast<int>(sizeof(T)) / static_cast<int>(kAdvanceUnit);
  asm("mad.wide.u32 %0, %1, %2, %0;" : "+l"(pointer) : "r"(unit), "n"(kUnits));
  __builtin_assume(__isGlobal(pointer));
}

// Where an array of words in shared memory begins: the value of an address in 32 bits, and the word kFirst words and
// some bytes after it.
using SharedBase = uint32_t;
__device__ __forceinline__ SharedBase shared_base(const void* words) {
  auto base = shared_address(words);
  asm volatile("" : "+r"(base));  // no look-up before this
  return base;
}
template <int kFirst>
__device__ __forceinline__ uint32_t shared_word(SharedBase base, uint32_t bytes) {
  uint32_t word;
  asm("ld.shared.u32 %0, [%1+%2];" : "=r"(word) : "r"(base + bytes), "n"(4 * kFirst));
  return word;
}

}  // namespace onetrip

#endif

namespace onetrip {

// Forces the compiler to recompute what depends on this value, which saves registers: an unpacked chunk (twice the
// registers) does not stay unpacked until its last use, and loop-invariant values are not kept across a loop.
template <typename Word>
__device__ __forceinline__ void compiler_barrier([[maybe_unused]] Word& value) {
  static_assert(sizeof value == 4, "a register");
#ifndef ONETRIP_CUDASIM
  asm volatile("" : "+r"(value));
#endif
}

// A value that all lanes of a warp share, in a uniform register where the GPU has them (kWarpRegisters).
__device__ __forceinline__ uint32_t uniform_register(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return value;
#else
  return __reduce_or_sync(0xFFFFFFFFu, value);
#endif
}
// The same for a struct in memory, of whole 16 bytes.
template <typename T>
__device__ __forceinline__ T uniform_register(const T* from) {
  union {
    uint4 quads[sizeof(T) / 16];
    T result;
  };
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T) / 16); ++i) {
    const uint4 quad = reinterpret_cast<const uint4*>(from)[i];
    quads[i] = make_uint4(uniform_register(quad.x), uniform_register(quad.y), uniform_register(quad.z),
                          uniform_register(quad.w));
  }
  return result;
}

// A table of words in shared memory. One dot product chooses the bits that are the index and scales them.
class SharedWords {
 public:
  __device__ __forceinline__ explicit SharedWords(const void* words) : base_(shared_base(words)) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      scale_[j] = uniform_register(4u << 8 * j);  // made again for each use, were it a constant
  }
  // Word kFirst + byte j of index.
  template <int kFirst>
  __device__ __forceinline__ uint32_t at_byte(uint32_t index, int j) const {
    return shared_word<kFirst>(base_, __dp4a(index, scale_[j], 0u));
  }
  // Word kFirst + the upper half of index.
  template <int kFirst>
  __device__ __forceinline__ uint32_t at_upper_half(uint32_t index) const {
    return shared_word<kFirst>(base_, __dp2a_lo(index, scale_[1], 0u));
  }

 private:
  SharedBase base_;
  uint32_t scale_[4];
};

}  // namespace onetrip
