// The dropout mask of common/philox.h, kWidth / 2 groups of eight elements at a time.
//
// Each 32 x 32 -> 64 bit product fills one 64-bit lane, so a vector of groups costs 2 multiplications, 2 shifts and 2
// three-way XORs a round: some 40 instructions for 4 * kWidth elements. Their 16 bits each are drawn into a small
// buffer that stays in L1 and are read back by the row kernels, which therefore need not care where in a group a row
// begins.
#pragma once
#include "../common/philox.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

constexpr int kLongWidth = kWidth / 2;
// Vectors of groups in flight: a round is a chain of about 6 cycles. Zen 4, cycles for 32 words at AVX-512: 52 with 1,
// 47 with 2, 44 with 3, 38 with 4, where the multiplier and the shifter are nearly always busy. Four vectors a chain:
// the other levels have registers for 2.
constexpr int kPhiloxChains = kWidth == 16 ? 4 : 2;
constexpr int kPhiloxBatch = kPhiloxChains * kLongWidth * kPhiloxElements;

// The low halves of the lanes, multiplied; the high halves of a may hold anything.
ONETRIP_INLINE L multiply_low(L a, uint32_t b) {
#if defined(__AVX512F__)
  return (L)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (L)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (L)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#elif defined(__aarch64__)
  return (L)vmull_u32(vmovn_u64((uint64x2_t)a), vdup_n_u32(b));
#else
  return (a & 0xFFFFFFFFu) * static_cast<uint64_t>(b);
#endif
}

ONETRIP_INLINE L xor3(L a, L b, L c) {
#if defined(__AVX512F__)
  return (L)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// The low halves of a's lanes, each with that of the same lane of b above it.
ONETRIP_INLINE L join_low(L a, L b) {
#if defined(__AVX512F__)
  return (L)_mm512_mask_shuffle_epi32((__m512i)a, 0xAAAA, (__m512i)b, _MM_PERM_CCAA);
#elif defined(__AVX2__)
  return (L)_mm256_blend_epi32((__m256i)a, _mm256_shuffle_epi32((__m256i)b, 0xA0), 0xAA);
#else
  return (a & 0xFFFFFFFFu) | (b << 32);
#endif
}

// 16 bytes for each group: word j of group i from lane i of w[j].
ONETRIP_INLINE void store_groups(uint16_t* to, const L w[4]) {
  [[maybe_unused]] constexpr int kHalf = kLongWidth / 2 * kPhiloxElements;
  const L first = join_low(w[0], w[1]), second = join_low(w[2], w[3]);
#if defined(__AVX512F__)
  const __m512i low = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), high = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)first, low, (__m512i)second));
  _mm512_storeu_si512(to + kHalf, _mm512_permutex2var_epi64((__m512i)first, high, (__m512i)second));
#elif defined(__AVX2__)
  const __m256i even = _mm256_unpacklo_epi64((__m256i)first, (__m256i)second);  // groups 0 and 2
  const __m256i odd = _mm256_unpackhi_epi64((__m256i)first, (__m256i)second);   // groups 1 and 3
  _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((__m256i*)(to + kHalf), _mm256_permute2x128_si256(even, odd, 0x31));
#else
  for (int i = 0; i < kLongWidth; ++i) {
    const uint64_t pair[2] = {first[i], second[i]};
    memcpy(to + kPhiloxElements * i, pair, sizeof pair);
  }
#endif
}

// An array to be fetched while bits are drawn, an element for each 16: drawing alone leaves the memory idle.
struct Fetch {
  const char* from;  // null: nothing
  int64_t size;      // bytes of an element
};

// The bits of groups [group, group + n_groups) that share the high half of the group index. Writes whole batches.
inline void draw(uint16_t* bits, uint64_t seed, uint64_t offset, uint64_t group, int64_t n_groups, Fetch fetch) {
  const uint32_t key_a = static_cast<uint32_t>(seed), key_b = static_cast<uint32_t>(seed >> 32);
  const uint32_t group_high = static_cast<uint32_t>(group >> 32);
  // The first round's product of the offset, and the second round's product of what it gave, are the same for every
  // group.
  const uint64_t a1 = static_cast<uint64_t>(kPhiloxMultiplierA) * static_cast<uint32_t>(offset);
  const uint32_t mixed = static_cast<uint32_t>(a1 >> 32) ^ group_high ^ key_b;
  const uint64_t b2 = static_cast<uint64_t>(kPhiloxMultiplierB) * mixed;
  const L mask1 = L{} + ((offset >> 32) ^ key_a);
  const L mask2 = L{} + ((b2 >> 32) ^ (key_a + kPhiloxKeyStepA));
  const L mask3 = L{} + (static_cast<uint32_t>(a1) ^ (key_b + kPhiloxKeyStepB));
  const L low_b2 = L{} + (b2 & 0xFFFFFFFFu);
  L index;
  for (int i = 0; i < kLongWidth; ++i) index[i] = i;
  index += static_cast<uint32_t>(group);
  for (int64_t done = 0; done < n_groups; done += kPhiloxChains * kLongWidth) {
    for (int64_t i = 0; fetch.from && i < kPhiloxBatch * fetch.size; i += 64) {
      __builtin_prefetch(fetch.from + kPhiloxElements * done * fetch.size + i, 0, 2);
    }
    L c[kPhiloxChains][4];
    for (int chain = 0; chain < kPhiloxChains; ++chain) {
      const L b1 = multiply_low(index, kPhiloxMultiplierB);
      const L a2 = multiply_low((b1 >> 32) ^ mask1, kPhiloxMultiplierA);
      c[chain][0] = b1 ^ mask2;
      c[chain][1] = low_b2;
      c[chain][2] = (a2 >> 32) ^ mask3;
      c[chain][3] = a2;
      index += kLongWidth;
    }
    uint32_t k0 = key_a + 2 * kPhiloxKeyStepA, k1 = key_b + 2 * kPhiloxKeyStepB;
#pragma GCC unroll 8
    for (int round = 2; round < kPhiloxRounds; ++round) {
#pragma GCC unroll 8
      for (int chain = 0; chain < kPhiloxChains; ++chain) {
        L* w = c[chain];
        const L a = multiply_low(w[0], kPhiloxMultiplierA), b = multiply_low(w[2], kPhiloxMultiplierB);
        w[0] = xor3(b >> 32, w[1], L{} + k0);
        w[2] = xor3(a >> 32, w[3], L{} + k1);
        w[1] = b;
        w[3] = a;
      }
      k0 += kPhiloxKeyStepA;
      k1 += kPhiloxKeyStepB;
    }
    for (int chain = 0; chain < kPhiloxChains; ++chain, bits += kLongWidth * kPhiloxElements)
      store_groups(bits, c[chain]);
  }
}

// The bits of elements [first, first + n), drawn in whole groups. Returns where those of the first one are.
inline const uint16_t* draw_elements(uint16_t* bits, uint64_t seed, uint64_t offset, uint64_t first, int64_t n,
                                     Fetch fetch) {
  const uint64_t group = first / kPhiloxElements;
  const int64_t skip = first % kPhiloxElements, n_groups = (skip + n + kPhiloxElements - 1) / kPhiloxElements;
  const int64_t before_carry = (uint64_t{1} << 32) - (group & 0xFFFFFFFFu);
  if (n_groups > before_carry) {
    draw(bits, seed, offset, group, before_carry, fetch);
    draw(bits + kPhiloxElements * before_carry, seed, offset, group + before_carry, n_groups - before_carry, {});
  } else {
    draw(bits, seed, offset, group, n_groups, fetch);
  }
  return bits + skip;
}

// Which elements of a vector are kept.
#if defined(__AVX512F__)
typedef __mmask16 Kept;
#else
typedef U Kept;  // all ones, or 0
#endif

// Random bits of a block of rows, or of some columns of it.
class DropoutMask {
 public:
  static constexpr int kMaxRows = 16;
  static constexpr int64_t kColumns = 1024;  // of a row at a time where a block of rows does not fit as a whole
  static constexpr int64_t kWholeRows = 4096;
  static constexpr int64_t kRowElements = kColumns + kPhiloxElements + kPhiloxBatch;
  static constexpr int kMaxSplitRows = 4;  // rows of a block that is drawn column by column
  static constexpr int64_t kElements = kMaxSplitRows * kRowElements;
  static_assert(kWholeRows + kPhiloxElements + kPhiloxBatch <= kElements, "a block of whole rows fits too");
  static constexpr int64_t kFloats = kElements * sizeof(uint16_t) / sizeof(float);  // of the buffer

  explicit DropoutMask(const Dropout& dropout, float* buffer)
      : buffer_(reinterpret_cast<uint16_t*>(buffer)),
        seed_(dropout.state ? static_cast<uint64_t>(dropout.state[0]) : dropout.seed),
        offset_(dropout.state ? static_cast<uint64_t>(dropout.state[1]) : dropout.offset),
        last_dropped_(static_cast<uint16_t>(dropout.threshold - 1)),
        scale_(dropout.scale) {}

  // Draws for columns [begin, end) of n_rows rows from first_row: whole rows of a block of at most kWholeRows elements,
  // or at most kColumns columns. `fetch` begins beside column `begin` of a single row.
  void fill(int64_t first_row, int n_rows, int64_t begin, int64_t end, int64_t n_cols, Fetch fetch = {}) {
    if (end - begin == n_cols && n_rows * n_cols <= kWholeRows) {
      const uint16_t* first =
          draw_elements(buffer_, seed_, offset_, static_cast<uint64_t>(first_row) * n_cols, n_rows * n_cols, fetch);
      for (int k = 0; k < n_rows; ++k) row_[k] = first + k * n_cols;
    } else {
      for (int k = 0; k < n_rows; ++k)
        row_[k] = draw_elements(buffer_ + k * kRowElements, seed_, offset_,
                                static_cast<uint64_t>(first_row + k) * n_cols + begin, end - begin, fetch);
    }
  }

  // 16 bits for each element of the block's row k, from its first drawn column on. Whole vectors can be read.
  const uint16_t* row(int k) const { return row_[k]; }

  ONETRIP_INLINE Kept kept(const uint16_t* bits) const {
#if defined(__AVX512F__)
    return _mm256_cmpgt_epu16_mask((__m256i)load_bits(bits, All{}), _mm256_set1_epi16(last_dropped_));
#else
    typedef int32_t Signed __attribute__((vector_size(sizeof(U))));  // compared by one instruction; unsigned by three
    return (U)((Signed) __builtin_convertvector(load_bits(bits, All{}), U) > (Signed)splat_bits(last_dropped_));
#endif
  }

  // v * scale where the element is kept; 0, whatever v is, where it is dropped.
  ONETRIP_INLINE F apply(F v, Kept kept) const {
#if defined(__AVX512F__)
    return (F)_mm512_maskz_mul_ps(kept, (__m512)v, _mm512_set1_ps(scale_));
#else
    return (F)((U)(v * scale_) & kept);
#endif
  }

  // v >= 0, its sign bit set where the element is dropped.
  ONETRIP_INLINE F mark(F v, Kept kept) const {
#if defined(__AVX512F__)
    const __m512i bits = (__m512i)v;
    return (F)_mm512_mask_or_epi32(bits, _knot_mask16(kept), bits, _mm512_set1_epi32(INT32_MIN));
#else
    return (F)((U)v | (~kept & 0x80000000u));
#endif
  }

 private:
  uint16_t* buffer_;
  const uint16_t* row_[kMaxRows];
  uint64_t seed_, offset_;
  uint16_t last_dropped_;  // threshold - 1: a threshold of 2^16 drops every element
  float scale_;
};

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
