// The 8-bit code maps of Adam, kGroup vectors at a time: values of codes, and codes of values.
//
// Within a decade the magnitudes of a map are evenly spaced, so that the number of the one below x is a line in x, and
// over all decades it is the least of their lines, which grow less steep from each to the next. That gives the code of
// x or the one before; which of the two, the exact threshold between them says.
#pragma once
#include "../common/adam.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

typedef int32_t I __attribute__((vector_size(kWidth * 4)));

constexpr auto kSignedMap = make_code_map<kSignedMagnitudes>(0);
constexpr auto kUnsignedMap = make_code_map<kUnsignedMagnitudes>(1);
constexpr int kDecades = 7;

// The number of decade i's line at x. Where the decades meet it is up to 0.2 too large.
constexpr double number_below(int i, int extra, double x) {
  double decade = 1e-6;
  for (int k = 0; k < i; ++k) decade *= 10;
  const int n_steps = 1 << (i + extra), first = 1 + (((1 << i) - 1) << extra);
  return first + n_steps * (x / decade - 0.1) / 0.9;
}

// A block's scale, and what its values are multiplied with to be quantised.
struct Scale {
  float value;
  bool is_finite;  // where not, every value gets the code of 0
  F inverse;
  explicit Scale(float largest) : value(largest < kSmallestAdamScale ? 0.0f : largest) {
    is_finite = value <= 3.40282347e38f;
    inverse = splat(value == 0.0f ? 0.0f : 1.0f / value);
  }
};

#if defined(__AVX512F__)
constexpr int kGroup = 2;

// A table of 32-bit entries as their lower and upper halves, of which one instruction finds 32 among 64.
template <int kEntries>
struct Table {
  alignas(64) uint16_t low[kEntries], high[kEntries];
  // subtracted: from every upper half.
  Table(const float* entries, int n, int subtracted) {
    for (int i = 0; i < kEntries; ++i) {
      uint32_t bits = 0x7F800000u;
      if (i < n) memcpy(&bits, entries + i, sizeof bits);
      low[i] = static_cast<uint16_t>(bits);
      high[i] = static_cast<uint16_t>((bits >> 16) - subtracted);
    }
  }
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
ONETRIP_INLINE __m512i words(int value) { return _mm512_set1_epi16(static_cast<short>(value)); }
ONETRIP_INLINE __mmask32 test_bit(__m512i v, int bit) { return _mm512_test_epi16_mask(v, words(1 << bit)); }

// x in [0, 1] as a word: the upper half of its bits, exponent and 7 bits of mantissa, less that of 2^-31; below, 0.
constexpr int kLeastUpper = (127 - 31) << 7;

// Two lines an octave of x, of which the lesser counts, in units of 2^-8: rise * mantissa + start. Cutting off the
// mantissa takes up to 0.56 off the number and kBehind the 0.2 where decades meet, together less than 1.
struct OctaveLines {
  alignas(64) uint16_t rise[2][32], start[2][32];
};
constexpr OctaveLines make_octave_lines(int extra) {
  constexpr double kBehind = 0.22;
  OctaveLines lines{};
  double low = 1.0 / (1u << 31);
  for (int octave = 0; octave < 32; ++octave, low *= 2) {
    int i = 0;
    for (double decade = 1e-6; i + 1 < kDecades && decade <= low; decade *= 10) ++i;  // the decade low lies in
    for (int k = 0; k < 2; ++k) {
      const int line = i + k < kDecades ? i + k : i;
      const double start = number_below(line, extra, low) - kBehind;
      lines.rise[k][octave] = static_cast<uint16_t>((number_below(line, extra, 2 * low) - kBehind - start) * 256 + 0.5);
      lines.start[k][octave] = static_cast<uint16_t>(start * 256 + 0.5);
    }
  }
  return lines;
}
constexpr OctaveLines kSignedLines = make_octave_lines(0), kUnsignedLines = make_octave_lines(1);

// The code's magnitude of x as a word, or the one before.
ONETRIP_INLINE __m512i guess(__m512i x, const OctaveLines& lines) {
  const __m512i octave = _mm512_srli_epi16(x, 7), mantissa = _mm512_slli_epi16(x, 9);
  const auto number = [&](int k) __attribute__((always_inline)) {
    const __m512i rise = _mm512_permutexvar_epi16(octave, _mm512_load_si512(lines.rise[k]));
    const __m512i start = _mm512_permutexvar_epi16(octave, _mm512_load_si512(lines.start[k]));
    return _mm512_add_epi16(_mm512_mulhi_epu16(rise, mantissa), start);
  };
  return _mm512_srli_epi16(_mm512_min_epu16(number(0), number(1)), 8);
}

struct Tables {
  Table<128> signed_values{kSignedMap.value, 128, 0}, signed_thresholds{kSignedMap.threshold + 1, 128, kLeastUpper};
  Table<256> unsigned_values{kUnsignedMap.value, 256, 0};
  Table<256> unsigned_thresholds{kUnsignedMap.threshold + 1, 255, kLeastUpper};
};

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

// The halves of a group of values / scale.
struct Halves {
  __m512i low, high;
  Halves(const F* values, const Scale& scale) {
    alignas(64) static constexpr uint16_t kLow[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                      32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    const __m512i order = _mm512_load_si512(kLow);
    const __m512i first = (__m512i)(values[0] * scale.inverse), second = (__m512i)(values[1] * scale.inverse);
    low = _mm512_permutex2var_epi16(first, order, second);
    high = _mm512_permutex2var_epi16(first, _mm512_add_epi16(order, words(1)), second);
  }
};
// x: the word of values whose lower halves are low.
ONETRIP_INLINE __m512i next_where(__m512i number, __m512i x, __m512i low, __m512i threshold_low,
                                  __m512i threshold_high) {
  const __mmask32 is_even = _mm512_cmpeq_epi16_mask(x, threshold_high);
  const __mmask32 reaches =
      _mm512_cmpgt_epu16_mask(x, threshold_high) | _mm512_mask_cmpge_epu16_mask(is_even, low, threshold_low);
  return _mm512_mask_add_epi16(number, reaches, number, words(1));
}
ONETRIP_INLINE __m512i word_of(__m512i high, const Scale& scale) {
  return _mm512_subs_epu16(_mm512_and_si512(high, words(scale.is_finite ? 0x7FFF : 0)), words(kLeastUpper));
}
ONETRIP_INLINE void store_codes(uint8_t* codes, __m512i numbers) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_cvtepi16_epi8(numbers));
}

ONETRIP_INLINE void store_signed(const Tables& tables, const F* values, const Scale& scale, uint8_t* codes) {
  const Table<128>& table = tables.signed_thresholds;
  const Halves halves(values, scale);
  const __m512i x = word_of(halves.high, scale), below = guess(x, kSignedLines), zero = words(kSignedZeroCode);
  const __mmask32 bit6 = test_bit(below, 6), is_negative = _mm512_movepi16_mask(halves.high);
  const __m512i number = next_where(below, x, halves.low, find(table.low, below, bit6), find(table.high, below, bit6));
  // Magnitude 128 has no negative: 127 - 128 is 0 here.
  store_codes(codes, _mm512_mask_subs_epu16(_mm512_add_epi16(zero, number), is_negative, zero, number));
}
ONETRIP_INLINE void store_unsigned(const Tables& tables, const F* values, const Scale& scale, uint8_t* codes) {
  const Table<256>& table = tables.unsigned_thresholds;
  const Halves halves(values, scale);
  const __m512i x = word_of(halves.high, scale), below = guess(x, kUnsignedLines);
  const __mmask32 bit6 = test_bit(below, 6), bit7 = test_bit(below, 7);
  const __m512i number =
      next_where(below, x, halves.low, find(table.low, below, bit6, bit7), find(table.high, below, bit6, bit7));
  const __mmask32 is_positive = _mm512_kunpackw(_mm512_cmp_ps_mask((__m512)values[1], _mm512_setzero_ps(), _CMP_GT_OQ),
                                                _mm512_cmp_ps_mask((__m512)values[0], _mm512_setzero_ps(), _CMP_GT_OQ));
  store_codes(codes, _mm512_mask_max_epu16(number, is_positive, number, words(1)));
}
#else
constexpr int kGroup = 1;
struct Tables {};

// Anything from 0.2 to 0.75 may be taken off the number to have the code or the one before, next to 0 and 1 included;
// rounding takes less than 1e-4.
struct Lines {
  float slope[kDecades], offset[kDecades];
};
constexpr Lines make_lines(int extra) {
  Lines lines{};
  for (int i = 0; i < kDecades; ++i) {
    const double at_0 = number_below(i, extra, 0.0);
    lines.slope[i] = static_cast<float>(number_below(i, extra, 1.0) - at_0);
    lines.offset[i] = static_cast<float>(at_0 - 0.475);
  }
  return lines;
}
constexpr Lines kSignedLines = make_lines(0), kUnsignedLines = make_lines(1);

ONETRIP_INLINE F look_up(const float* table, I index) {
#if defined(__AVX2__)
  return (F)_mm256_i32gather_ps(table, (__m256i)index, 4);
#else
  F values;
  for (int i = 0; i < kWidth; ++i) values[i] = table[index[i]];
  return values;
#endif
}
ONETRIP_INLINE I load_codes(const uint8_t* codes) {
  Bytes bytes;
  memcpy(&bytes, codes, sizeof bytes);
  return __builtin_convertvector(bytes, I);
}
ONETRIP_INLINE void signed_values(const Tables&, const uint8_t* codes, F* values) {
  const I number = load_codes(codes) - kSignedZeroCode, sign = number >> 31;
  const F magnitude = look_up(kSignedMap.value, (number ^ sign) - sign);
  *values = (F)((U)magnitude | ((U)number & 0x80000000u));
}
ONETRIP_INLINE void unsigned_values(const Tables&, const uint8_t* codes, F* values) {
  *values = look_up(kUnsignedMap.value, load_codes(codes));
}

ONETRIP_INLINE I magnitude_number(F value, const Scale& scale, const Lines& lines, const float* thresholds) {
  const F x = larger_number((F)((U)(value * scale.inverse) & 0x7FFFFFFFu), F{});  // NaN gets code 0
  F number = mul_add(x, splat(lines.slope[0]), splat(lines.offset[0]));
#pragma GCC unroll 8
  for (int i = 1; i < kDecades; ++i)
    number = smaller_number(mul_add(x, splat(lines.slope[i]), splat(lines.offset[i])), number);
  const I below = __builtin_convertvector(number, I);
  return below - (I)(x >= look_up(thresholds + 1, below));
}
ONETRIP_INLINE void store_codes(uint8_t* codes, I numbers) {
  const Bytes bytes = __builtin_convertvector(numbers, Bytes);
  memcpy(codes, &bytes, sizeof bytes);
}
ONETRIP_INLINE void store_signed(const Tables&, const F* values, const Scale& scale, uint8_t* codes) {
  const I number = magnitude_number(*values, scale, kSignedLines, kSignedMap.threshold), sign = (I)*values >> 31;
  const I code = kSignedZeroCode + ((number ^ sign) - sign);
  store_codes(codes, code & ~(code >> 31));  // magnitude 128 has no negative
}
ONETRIP_INLINE void store_unsigned(const Tables&, const F* values, const Scale& scale, uint8_t* codes) {
  const I number = magnitude_number(*values, scale, kUnsignedLines, kUnsignedMap.threshold);
  store_codes(codes, number - (I)((number == 0) & (*values > 0.0f)));
}
#endif

}  // namespace
}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
