// Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", where 7 are the fewest
// that pass BigCrush): the one source of dropout masks.
//
// Element e (the contiguous logical index row * n_cols + col, 64 bit) takes 16 bits of
//   philox(key = seed, counter = {offset low, offset high, e/8 low, e/8 high}):
// of word e % 8 / 2 the lower half where e is even, the upper half where it is odd. So a mask is a function of (seed,
// offset, e) alone: nothing is stored, and every backend and block size draws the same bits.
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
constexpr int kPhiloxRounds = 7;
constexpr int kPhiloxElements = 8;  // of a counter

// The two words of the key in one round, the first one below.
ONETRIP_HOST_DEVICE uint64_t philox_key(uint64_t seed, int round) {
  const uint32_t k0 = static_cast<uint32_t>(seed) + static_cast<uint32_t>(round) * kPhiloxKeyStepA;
  const uint32_t k1 = static_cast<uint32_t>(seed >> 32) + static_cast<uint32_t>(round) * kPhiloxKeyStepB;
  return static_cast<uint64_t>(k1) << 32 | k0;
}

// One wide multiply (IMAD.WIDE on NVIDIA, to which nvcc adds another half of the product, a zero, if it may).
ONETRIP_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return static_cast<uint64_t>(a) * b;
#endif
}

ONETRIP_HOST_DEVICE void philox_round(PhiloxBlock& counter, uint64_t key) {
  const uint64_t a = wide_product(kPhiloxMultiplierA, counter.word[0]);
  const uint64_t b = wide_product(kPhiloxMultiplierB, counter.word[2]);
  counter.word[0] = static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ static_cast<uint32_t>(key);
  counter.word[2] = static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ static_cast<uint32_t>(key >> 32);
  counter.word[1] = static_cast<uint32_t>(b);
  counter.word[3] = static_cast<uint32_t>(a);
}

// The counter of elements 8 * group to 8 * group + 7: after kPhiloxRounds rounds it is their random bits.
ONETRIP_HOST_DEVICE PhiloxBlock philox_counter(uint64_t offset, uint64_t group) {
  return PhiloxBlock{{static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), static_cast<uint32_t>(group),
                      static_cast<uint32_t>(group >> 32)}};
}

ONETRIP_HOST_DEVICE PhiloxBlock philox(uint64_t seed, uint64_t offset, uint64_t group) {
  PhiloxBlock block = philox_counter(offset, group);
  for (int round = 0; round < kPhiloxRounds; ++round) philox_round(block, philox_key(seed, round));
  return block;
}

// The upper 16 bits are those of element i of a group; the lower ones may be anything.
ONETRIP_HOST_DEVICE uint32_t random_bits(const PhiloxBlock& block, int i) {
  return i % 2 != 0 ? block.word[i / 2] : block.word[i / 2] << 16;
}

}  // namespace onetrip
