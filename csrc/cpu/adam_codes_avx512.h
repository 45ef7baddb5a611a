// The 8-bit code maps of Adam under AVX-512: see adam_codes.h, which includes it.
#pragma once
#include "adam_codes.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// The larger one of a, not negative, and |b|; where b is NaN, either.
ONETRIP_INLINE F larger_magnitude(F a, F b) {
  constexpr int kLargerMagnitude = 0xB;  // its sign cleared
  return (F)_mm512_range_ps((__m512)a, (__m512)b, kLargerMagnitude);
}
// v, or the limit with its sign. Without kKeepsNaN v is no NaN.
template <bool kKeepsNaN>
ONETRIP_INLINE F clamp_magnitude(F v, F limit) {
  constexpr int kSmallerMagnitude = 0x2;  // with the sign of the first
  if constexpr (kKeepsNaN) return smaller_number(limit, larger_number(-limit, v));
  return (F)_mm512_range_ps((__m512)v, (__m512)limit, kSmallerMagnitude);
}

// The scales of a block whose lanes have these largest magnitudes, those of m in the lower half of the registers and
// those of the root in the upper one; NaN is the largest.
ONETRIP_INLINE void make_scales(U m_magnitudes, U root_magnitudes, Scale& m_scale, Scale& root_scale) {
  constexpr int kLowHalves = 0x44, kHighHalves = 0xEE, kOtherQuarters = 0xB1;
  const __m512i m = (__m512i)m_magnitudes, root = (__m512i)root_magnitudes;
  __m512i largest =
      _mm512_max_epu32(_mm512_shuffle_i64x2(m, root, kLowHalves), _mm512_shuffle_i64x2(m, root, kHighHalves));
  largest = _mm512_max_epu32(largest, _mm512_shuffle_i64x2(largest, largest, kOtherQuarters));
  largest = _mm512_max_epu32(largest, _mm512_shuffle_epi32(largest, _MM_PERM_BADC));
  largest = _mm512_max_epu32(largest, _mm512_shuffle_epi32(largest, _MM_PERM_CDAB));
  const __m512 values = _mm512_castsi512_ps(_mm512_and_si512(largest, _mm512_set1_epi32(0x7FFFFFFF)));
  // Not less, or NaN.
  const __mmask16 counts = _mm512_cmp_ps_mask(values, _mm512_set1_ps(kSmallestAdamScale), _CMP_NLT_UQ);
  const __m512 inverses = _mm512_maskz_div_ps(counts, _mm512_set1_ps(1.0f), values);
  const __m512 scales = _mm512_maskz_mov_ps(counts, values);
  const __mmask16 is_finite = _mm512_cmp_ps_mask(values, _mm512_set1_ps(3.40282347e38f), _CMP_LE_OQ);
  constexpr int kFirstQuarter = 0x00, kLastQuarter = 0xFF;
  m_scale = {_mm512_cvtss_f32(scales), (is_finite & 1) != 0,
             (F)_mm512_shuffle_f32x4(inverses, inverses, kFirstQuarter)};
  root_scale = {_mm_cvtss_f32(_mm512_extractf32x4_ps(scales, 3)), (is_finite & 0x8000) != 0,
                (F)_mm512_shuffle_f32x4(inverses, inverses, kLastQuarter)};
}

ONETRIP_INLINE __m512i words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }

#if defined(__AVX512VBMI__)
constexpr int kGroup = 4;

// A table of 32-bit entries as their four bytes, of which one instruction finds 64 among 128.
template <int kEntries>
struct ByteTable {
  alignas(64) uint8_t plane[4][kEntries];
  explicit ByteTable(const float* entries) {
    for (int i = 0; i < kEntries; ++i) {
      uint32_t bits;
      memcpy(&bits, entries + i, sizeof bits);
      for (int k = 0; k < 4; ++k) plane[k][i] = static_cast<uint8_t>(bits >> (8 * k));
    }
  }
};
struct Tables {
  ByteTable<128> signed_values{kSignedMap.value};
  ByteTable<256> unsigned_values{kUnsignedMap.value};
};

// The byte of a plane at each index, of which the low 7 bits count.
ONETRIP_INLINE __m512i find(const uint8_t* plane, __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(plane), index, _mm512_load_si512(plane + 64));
}
// Unpacking works within 128 bits, so bytes come in the order that makes of it the order of elements.
ONETRIP_INLINE __m512i load_codes(const uint8_t* codes) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes));
}
ONETRIP_INLINE void unpack(const __m512i* bytes, F* values) {
  const __m512i low_words[2] = {_mm512_unpacklo_epi8(bytes[0], bytes[1]), _mm512_unpackhi_epi8(bytes[0], bytes[1])};
  const __m512i high_words[2] = {_mm512_unpacklo_epi8(bytes[2], bytes[3]), _mm512_unpackhi_epi8(bytes[2], bytes[3])};
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    values[2 * i] = (F)_mm512_unpacklo_epi16(low_words[i], high_words[i]);
    values[2 * i + 1] = (F)_mm512_unpackhi_epi16(low_words[i], high_words[i]);
  }
}
ONETRIP_INLINE void signed_values(const Tables& tables, const uint8_t* codes, F* values) {
  const __m512i number = _mm512_sub_epi8(load_codes(codes), _mm512_set1_epi8(kSignedZeroCode));  // 128 is -128
  const __m512i magnitude = _mm512_abs_epi8(number), sign_bits = _mm512_set1_epi8(-128);
  const __mmask64 is_one = _mm512_cmpeq_epi8_mask(number, sign_bits);
  __m512i bytes[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) bytes[k] = find(tables.signed_values.plane[k], magnitude);
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  bytes[3] = _mm512_ternarylogic_epi32(bytes[3], number, sign_bits, kOrAnd);
  bytes[2] = _mm512_mask_mov_epi8(bytes[2], is_one, sign_bits);  // 1 is 0x3F800000, and magnitude 0, found for it, 0
  bytes[3] = _mm512_mask_mov_epi8(bytes[3], is_one, _mm512_set1_epi8(0x3F));
  unpack(bytes, values);
}
ONETRIP_INLINE void unsigned_values(const Tables& tables, const uint8_t* codes, F* values) {
  const __m512i number = load_codes(codes);
  const __mmask64 bit7 = _mm512_movepi8_mask(number);
  __m512i bytes[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    const uint8_t* plane = tables.unsigned_values.plane[k];
    bytes[k] = _mm512_mask_blend_epi8(bit7, find(plane, number), find(plane + 128, number));
  }
  unpack(bytes, values);
}
#else
constexpr int kGroup = 2;

// A table of 32-bit entries as their lower and upper halves, of which one instruction finds 32 among 64.
template <int kEntries>
struct Table {
  alignas(64) uint16_t low[kEntries], high[kEntries];
  explicit Table(const float* entries) {
    for (int i = 0; i < kEntries; ++i) {
      uint32_t bits;
      memcpy(&bits, entries + i, sizeof bits);
      low[i] = static_cast<uint16_t>(bits);
      high[i] = static_cast<uint16_t>(bits >> 16);
    }
  }
};
struct Tables {
  Table<128> signed_values{kSignedMap.value};
  Table<256> unsigned_values{kUnsignedMap.value};
};

ONETRIP_INLINE __m512i find(const uint16_t* plane, __m512i index) {
  return _mm512_permutex2var_epi16(_mm512_load_si512(plane), index, _mm512_load_si512(plane + 32));
}
ONETRIP_INLINE __m512i find(const uint16_t* plane, __m512i index, __mmask32 bit6) {
  return _mm512_mask_blend_epi16(bit6, find(plane, index), find(plane + 64, index));
}
ONETRIP_INLINE __m512i find(const uint16_t* plane, __m512i index, __mmask32 bit6, __mmask32 bit7) {
  return _mm512_mask_blend_epi16(bit7, find(plane, index, bit6), find(plane + 128, index, bit6));
}
ONETRIP_INLINE __mmask32 test_bit(__m512i v, int bit) { return _mm512_test_epi16_mask(v, words(1 << bit)); }

// Unpacking works within 128 bits, so words come in the order that makes of it the order of elements.
ONETRIP_INLINE __m512i load_codes(const uint8_t* codes) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  return _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(bytes, order));
}
ONETRIP_INLINE void unpack(__m512i low, __m512i high, F* values) {
  values[0] = (F)_mm512_unpacklo_epi16(low, high);
  values[1] = (F)_mm512_unpackhi_epi16(low, high);
}
ONETRIP_INLINE void signed_values(const Tables& tables, const uint8_t* codes, F* values) {
  const Table<128>& table = tables.signed_values;
  const __m512i number = _mm512_sub_epi16(load_codes(codes), words(kSignedZeroCode));
  const __m512i magnitude = _mm512_abs_epi16(number);
  const __mmask32 bit6 = test_bit(magnitude, 6), is_one = test_bit(magnitude, 7);
  const __m512i high = _mm512_mask_mov_epi16(find(table.high, magnitude, bit6), is_one, words(0x3F80));
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  const __m512i with_sign = _mm512_ternarylogic_epi32(high, number, words(0x8000), kOrAnd);
  unpack(find(table.low, magnitude, bit6), with_sign, values);
}
ONETRIP_INLINE void unsigned_values(const Tables& tables, const uint8_t* codes, F* values) {
  const Table<256>& table = tables.unsigned_values;
  const __m512i number = load_codes(codes);
  const __mmask32 bit6 = test_bit(number, 6), bit7 = test_bit(number, 7);
  unpack(find(table.low, number, bit6, bit7), find(table.high, number, bit6, bit7), values);
}
#endif

// A range of x, [2^(2k - 1), 2^(2k + 1)), has lines of its own; the one threshold between decades in it comes from a
// table, exactly.
struct QuickLines {
  alignas(64) uint32_t to_next[16];  // added to the bits of x: from its range's threshold on they are of the next range
  alignas(64) float slope[16], factor[16];
};
template <int kMagnitudes>
constexpr QuickLines make_quick_lines(const CodeMap<kMagnitudes>& map, int extra, double units) {
  // Where x changes lines; in front of the first, and from the last on, numbers are one.
  double change[kDecades + 1] = {};
  for (int i = 0; i < kDecades; ++i) change[i] = map.threshold[1 + (((1 << i) - 1) << extra)];
  if (extra) change[0] = 1.0 / (1 << 22);  // not code 0: less than the second threshold
  change[kDecades] = map.threshold[kMagnitudes - 1];
  QuickLines lines{};
  double begin = kLeastQuick;
  for (int range = 1; range <= 16; ++range, begin *= 4) {
    int n_passed = 0;
    for (const double x : change) {
      n_passed += x <= begin;
      if (begin < x && x < 4 * begin) {
        const double bits = x < 2 * begin ? x / begin - 1 : x / (2 * begin);
        lines.to_next[range & 15] = (1u << 24) - static_cast<uint32_t>(bits * (1 << 23));
      }
    }
    const int i = n_passed - 1;
    const QuickLine line = 0 <= i && i < kDecades ? quick_line(i, extra, units)
                                                  : quick_constant(i < 0 ? extra : kMagnitudes - 1, extra, units);
    lines.slope[range & 15] = line.slope;
    lines.factor[range & 15] = line.factor;
  }
  return lines;
}
constexpr QuickLines kSignedQuickLines = make_quick_lines(kSignedMap, 0, kSignedUnits);
constexpr QuickLines kUnsignedQuickLines = make_quick_lines(kUnsignedMap, 1, kUnsignedUnits);

// function(i) of the vectors of a block. A step of the computation at a time is done for all of them: instructions next
// to each other then do not wait for each other, of which a processor holds too few to find the next vector's by
// itself.
template <class Function>
ONETRIP_INLINE void each(Function function) {
#pragma GCC unroll 8
  for (int i = 0; i < kVectors; ++i) function(i);
}
#define ONETRIP_EACH(expression) each([&](int i) __attribute__((always_inline)) { expression; })

// From the bits of x, from kLeastQuick to 1 (2^-22 more where the inverse scale is subnormal), to those of 2^23 +
// number * units + kDoubt. offset: 2^23 - extra * units + kDoubt.
ONETRIP_INLINE void to_quick_numbers(__m512i* x, const QuickLines& lines, float offset) {
  const __m512i nearly_2 = _mm512_castps_si512(_mm512_set1_ps(kNearly2));
  __m512i range[kVectors];
  const auto found = [&](const float* table, int i) __attribute__((always_inline)) {
    return _mm512_permutexvar_ps(range[i], _mm512_load_ps(table));
  };
  const auto line = [](__m512i x, __m512 slope, float start) __attribute__((always_inline)) {
    return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(x), slope, _mm512_set1_ps(start)));
  };
  ONETRIP_EACH(range[i] = _mm512_srli_epi32(x[i], 24));
  ONETRIP_EACH(range[i] = _mm512_permutexvar_epi32(range[i], _mm512_load_si512(lines.to_next)));
  ONETRIP_EACH(range[i] = _mm512_srli_epi32(_mm512_add_epi32(x[i], range[i]), 24));
  ONETRIP_EACH(x[i] = line(x[i], found(lines.slope, i), kQuickStart));
  ONETRIP_EACH(x[i] = _mm512_min_epu32(x[i], nearly_2));  // of positive numbers, as integers: more units can do that
  ONETRIP_EACH(x[i] = line(x[i], found(lines.factor, i), offset));
}
ONETRIP_INLINE __m512i upper_words(__m512i a, __m512i b) {
  alignas(64) static constexpr uint16_t kHigh[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                     33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(a, _mm512_load_si512(kHigh), b);
}
// The third byte of each lane of 4 vectors.
ONETRIP_INLINE __m512i third_bytes(const __m512i* x) {
  const __m512i low = upper_words(x[0], x[1]), high = upper_words(x[2], x[3]);
#if defined(__AVX512VBMI__)
  // The even ones of 128 bytes.
  const __m512i even =
      _mm512_setr_epi64(0x0E0C0A0806040200, 0x1E1C1A1816141210, 0x2E2C2A2826242220, 0x3E3C3A3836343230,
                        0x4E4C4A4846444240, 0x5E5C5A5856545250, 0x6E6C6A6866646260, 0x7E7C7A7876747270);
  return _mm512_permutex2var_epi8(low, even, high);
#else
  // Packing works within 128 bits.
  const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), byte = words(0xFF);
  return _mm512_permutexvar_epi64(order,
                                  _mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte)));
#endif
}
// Whether a fraction, in the lower words, is less than its doubt.
ONETRIP_INLINE bool is_in_doubt(const __m512i* x, int doubt) {
  __m512i least = x[0];
  ONETRIP_EACH(least = _mm512_min_epu16(least, x[i]));
  return (_mm512_cmplt_epu16_mask(least, words(doubt)) & 0x55555555u) != 0;
}

// Returns whether all codes are certain.
ONETRIP_INLINE bool store_signed_quickly(const F* values, const Scale& scale, uint8_t* codes) {
  __m512i x[kVectors];
  ONETRIP_EACH(x[i] = (__m512i)larger_magnitude(splat(kLeastQuick), values[i] * scale.inverse));
  to_quick_numbers(x, kSignedQuickLines, kFixedPoint + kDoubt);
  const bool is_certain = !is_in_doubt(x, 2 * kDoubt);
  // The number is the third byte. 128 makes the sum 2^24 or more, whose unit is 2: 0x4B80 is its upper half all the
  // same, and as 128.5 alone comes here, its fraction, now a quarter, is in no doubt.
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  const __m512i sign = _mm512_set1_epi32(static_cast<int>(0x80000000u)), zero = _mm512_set1_epi8(kSignedZeroCode);
  ONETRIP_EACH(x[i] = _mm512_ternarylogic_epi32(x[i], (__m512i)values[i], sign, kOrAnd));
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i += 4) {
    const __m512i number = third_bytes(x + i);
    const auto signs = [&](int j) { return _mm512_movepi16_mask(upper_words(x[i + j], x[i + j + 1])); };
    // Magnitude 128 has no negative: 127 - 128 is 0 here.
    _mm512_storeu_si512(codes + i * kWidth, _mm512_mask_subs_epu8(_mm512_add_epi8(zero, number),
                                                                  _mm512_kunpackd(signs(2), signs(0)), zero, number));
  }
  return is_certain;
}
ONETRIP_INLINE bool store_unsigned_quickly(const F* values, const Scale& scale, uint8_t* codes) {
  __m512i x[kVectors];
  ONETRIP_EACH(x[i] = _mm512_max_epu32((__m512i)(values[i] * scale.inverse), (__m512i)splat(kLeastQuick)));
  to_quick_numbers(x, kUnsignedQuickLines, kFixedPoint - kUnsignedUnits + kDoubt);
  // Twice the bits have the number as their third byte. That of 0 is 0, and its fraction a half.
  const auto is_positive = [&](int i) { return _mm512_test_epi32_mask((__m512i)values[i], (__m512i)values[i]); };
  ONETRIP_EACH(x[i] = _mm512_mask_add_epi32(_mm512_set1_epi32(1 << 15), is_positive(i), x[i], x[i]));
  const bool is_certain = !is_in_doubt(x, 4 * kDoubt);
#pragma GCC unroll 2
  for (int i = 0; i < kVectors; i += 4) _mm512_storeu_si512(codes + i * kWidth, third_bytes(x + i));
  return is_certain;
}
#undef ONETRIP_EACH

ONETRIP_INLINE void store_signed(const F* values, const Scale& scale, uint8_t* codes) {
  if (!scale.is_finite || !store_signed_quickly(values, scale, codes)) store_signed_exactly(values, scale, codes);
}
ONETRIP_INLINE void store_unsigned(const F* values, const Scale& scale, uint8_t* codes) {
  if (!scale.is_finite || !store_unsigned_quickly(values, scale, codes)) store_unsigned_exactly(values, scale, codes);
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
