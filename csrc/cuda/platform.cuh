// The few spellings that differ between nvcc, NVRTC (device code only) and the CPU simulator of tests/cudasim, which
// compiles these same files as plain C++. Kernels use these macros instead of the raw syntax, and nothing else is
// conditional in them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

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

namespace onetrip {

// Waits for `threads` threads (whole warps) that name the same barrier. Barrier 0 is __syncthreads; 1 to 15 are free.
__device__ __forceinline__ void named_barrier(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// 2^x to 2 ulp in one instruction; results below 2^-126 become 0, where exp2f would take four more to keep them.
__device__ __forceinline__ float exp2_flushed(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// An element of an array in global memory: of an address that was read as a number, compilers cannot tell.
template <typename T>
__device__ __forceinline__ T* global_pointer(int64_t address, int64_t index) {
  T* const pointer = reinterpret_cast<T*>(address) + index;
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

}  // namespace onetrip

#endif

namespace onetrip {

// Makes the compiler forget that it knows these values. Without it, a chunk once unpacked stays unpacked (twice the
// registers) until its last use, and what a loop does not change is computed before it and held in registers.
__device__ __forceinline__ void forget([[maybe_unused]] uint32_t& value) {
#ifndef ONETRIP_CUDASIM
  asm volatile("" : "+r"(value));
#endif
}
__device__ __forceinline__ void forget([[maybe_unused]] int& value) {
#ifndef ONETRIP_CUDASIM
  asm volatile("" : "+r"(value));
#endif
}

// An index of a table, computed first and then scaled into its address: two instructions, where compilers shift to the
// scaled value at once, mask it and add the base.
__device__ __forceinline__ uint32_t table_index(uint32_t index) {
#ifndef ONETRIP_CUDASIM
  asm("" : "+r"(index));
#endif
  return index;
}

}  // namespace onetrip
