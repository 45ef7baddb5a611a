// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the one source of dropout masks.
//
// Element e (the contiguous logical index row * n_cols + col, 64 bit) takes word e % 4 of
//   philox(key = seed, counter = {offset low, offset high, e/4 low, e/4 high}).
// So a mask is a function of (seed, offset, e) alone: nothing is stored, and every backend and block size draws the
// same bits.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define ONETRIP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define ONETRIP_HOST_DEVICE inline
#endif

namespace onetrip {

struct PhiloxBlock {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMultiplierA = 0xD2511F53u, kPhiloxMultiplierB = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStepA = 0x9E3779B9u, kPhiloxKeyStepB = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

#if defined(__CUDA_ARCH__)
struct PhiloxProduct {
  uint32_t low, high;
};

__device__ __forceinline__ PhiloxProduct philox_product(uint32_t a, uint32_t b) {
  PhiloxProduct result;
  asm("{\n\t.reg .b64 product;\n\tmul.wide.u32 product, %2, %3;\n\tmov.b64 {%0, %1}, product;\n\t}"
      : "=r"(result.low), "=r"(result.high)
      : "r"(a), "r"(b));
  return result;
}
#endif

// kInPlace: nvcc adds 0 to the upper half of a product that is shifted down, a third of all instructions; here it
// leaves the halves where they are. (Kernels of row_norm spill with it.)
template <bool kInPlace = false>
ONETRIP_HOST_DEVICE PhiloxBlock philox(uint64_t seed, uint64_t offset, uint64_t group) {
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = static_cast<uint32_t>(group), c3 = static_cast<uint32_t>(group >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    // One 32 x 32 -> 64 bit product; compilers make it a single wide multiply (IMAD.WIDE on NVIDIA).
#if defined(__CUDA_ARCH__)
    if constexpr (kInPlace) {
      const PhiloxProduct a = philox_product(kPhiloxMultiplierA, c0), b = philox_product(kPhiloxMultiplierB, c2);
      c0 = b.high ^ c1 ^ k0;
      c2 = a.high ^ c3 ^ k1;
      c1 = b.low;
      c3 = a.low;
      k0 += kPhiloxKeyStepA;
      k1 += kPhiloxKeyStepB;
      continue;
    }
#endif
    const uint64_t a = static_cast<uint64_t>(kPhiloxMultiplierA) * c0;
    const uint64_t b = static_cast<uint64_t>(kPhiloxMultiplierB) * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += kPhiloxKeyStepA;
    k1 += kPhiloxKeyStepB;
  }
  return PhiloxBlock{{c0, c1, c2, c3}};
}

}  // namespace onetrip
