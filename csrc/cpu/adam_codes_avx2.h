// The 8-bit code maps of Adam under AVX2: see adam_codes.h, which includes it. What is looked up has eight entries, of
// which one instruction finds eight.
#pragma once
#include "adam_codes.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// The scales of a block whose lanes have these largest magnitudes; NaN is the largest.
ONETRIP_INLINE void make_scales(U m_magnitudes, U root_magnitudes, Scale& m_scale, Scale& root_scale) {
  constexpr int kLowHalves = 0x20, kHighHalves = 0x31, kOtherPairs = 0x4E, kNeighbours = 0xB1;
  const __m256i m = (__m256i)m_magnitudes, root = (__m256i)root_magnitudes;
  __m256i largest =
      _mm256_max_epu32(_mm256_permute2x128_si256(m, root, kLowHalves), _mm256_permute2x128_si256(m, root, kHighHalves));
  largest = _mm256_max_epu32(largest, _mm256_shuffle_epi32(largest, kOtherPairs));
  largest = _mm256_max_epu32(largest, _mm256_shuffle_epi32(largest, kNeighbours));
  const __m256 values = _mm256_castsi256_ps(_mm256_and_si256(largest, _mm256_set1_epi32(0x7FFFFFFF)));
  // Not less, or NaN.
  const __m256 counts = _mm256_cmp_ps(values, _mm256_set1_ps(kSmallestAdamScale), _CMP_NLT_UQ);
  const __m256 inverses = _mm256_and_ps(counts, _mm256_div_ps(_mm256_set1_ps(1.0f), values));
  const __m256 scales = _mm256_and_ps(counts, values);
  const float m_value = _mm256_cvtss_f32(scales), root_value = _mm_cvtss_f32(_mm256_extractf128_ps(scales, 1));
  m_scale = {m_value, is_finite(m_value), (F)_mm256_permute2f128_ps(inverses, inverses, 0x00)};
  root_scale = {root_value, is_finite(root_value), (F)_mm256_permute2f128_ps(inverses, inverses, 0x11)};
}

// Values are computed: step j of a decade of n_steps is (2 n_steps + 18 j + 9) / (20 n_steps) of it, an exact fraction,
// and a product with a factor of two parts rounds that as the map does.
//
// n is the code's number and a little more, so that its exponent is the decade, and the numbers of 0 and 1 share the
// one exponent, of its low three bits, that is left.
struct ValueLines {
  alignas(32) float offset[8], factor[8], rest[8];
};
constexpr float kStep = 18.0f;
constexpr float kMoreSigned = 0.5f, kMoreUnsigned = 1.0f;
constexpr ValueLines make_value_lines(int extra, int largest, float more) {
  ValueLines lines{};
  double decade = 1e-6;
  for (int i = 0; i <= kDecades; ++i, decade *= 10) {
    const int n_steps = 1 << (i + extra), slot = (i + 7 + extra) & 7;
    const bool is_decade = i < kDecades;
    const double factor = is_decade ? decade / (20 * n_steps) : 1 / (kStep * largest);
    lines.offset[slot] = is_decade ? 9 * extra - 16 * n_steps : -kStep * more;
    lines.factor[slot] = static_cast<float>(factor);
    lines.rest[slot] = static_cast<float>(factor - lines.factor[slot]);
  }
  return lines;
}
constexpr ValueLines kSignedValueLines = make_value_lines(0, 128, kMoreSigned);
constexpr ValueLines kUnsignedValueLines = make_value_lines(1, 255, kMoreUnsigned);

ONETRIP_INLINE __m256 found(const float* table, __m256i index) {
  return _mm256_permutevar8x32_ps(_mm256_load_ps(table), index);
}
ONETRIP_INLINE __m256 value_of(__m256 n, const ValueLines& lines) {
  const __m256i exponent = _mm256_srli_epi32(_mm256_castps_si256(n), 23);
  const __m256 steps = _mm256_fmadd_ps(n, _mm256_set1_ps(kStep), found(lines.offset, exponent));
  return _mm256_fmadd_ps(steps, found(lines.factor, exponent), _mm256_mul_ps(steps, found(lines.rest, exponent)));
}
ONETRIP_INLINE __m256 numbers_from(const uint8_t* codes, int zero) {
  const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(wide, _mm256_set1_epi32(zero)));
}
ONETRIP_INLINE void signed_values(const Tables&, const uint8_t* codes, F* values) {
  const __m256 sign = _mm256_set1_ps(-0.0f), number = numbers_from(codes, kSignedZeroCode);
  const __m256 n = _mm256_add_ps(_mm256_andnot_ps(sign, number), _mm256_set1_ps(kMoreSigned));
  *values = (F)_mm256_or_ps(value_of(n, kSignedValueLines), _mm256_and_ps(sign, number));
}
ONETRIP_INLINE void unsigned_values(const Tables&, const uint8_t* codes, F* values) {
  *values = (F)value_of(numbers_from(codes, -static_cast<int>(kMoreUnsigned)), kUnsignedValueLines);
}

// Where x changes lines a range of x, [2^(2k - 1), 2^(2k + 1)), says but for one threshold, which is compared with.
struct QuickLines {
  alignas(32) uint8_t line[16];  // that the range begins with
  alignas(32) uint32_t last[8];  // the bits of the last x of each line
  alignas(32) float slope[8], factor[8];
};
template <int kMagnitudes>
constexpr QuickLines make_quick_lines(const CodeMap<kMagnitudes>& map, int extra, double units) {
  QuickLines lines{};
  double next[8] = {};  // the least x of the next line
  for (int i = 0; i < kDecades; ++i) {
    const QuickLine line = quick_line(i, extra, units);
    lines.slope[i] = line.slope;
    lines.factor[i] = line.factor;
    next[i] = map.threshold[i + 1 < kDecades ? 1 + (((2 << i) - 1) << extra) : kMagnitudes - 1];
  }
  const QuickLine last = quick_constant(kMagnitudes - 1, extra, units);
  lines.slope[kDecades] = last.slope;
  lines.factor[kDecades] = last.factor;
  next[kDecades] = 2;
  if (!extra) {  // numbers 0 and 1 on one line, which is 0.9 at 0 and 1 at the threshold
    lines.slope[0] = kQuickStart / 9 / map.threshold[1];
    lines.factor[0] = static_cast<float>(units * 0.9 / kQuickStart);
  }
  for (int i = 0; i <= kDecades; ++i) {
    double power = 1;
    uint32_t exponent = 127;
    for (; power > next[i]; power /= 2) --exponent;
    for (; 2 * power <= next[i]; power *= 2) ++exponent;
    lines.last[i] = (exponent << 23) + static_cast<uint32_t>((next[i] / power - 1) * (1 << 23)) - 1;
  }
  double begin = kLeastQuick;
  for (int range = 1; range < 16; ++range, begin *= 4) {
    while (next[lines.line[range]] <= begin) ++lines.line[range];
  }
  return lines;
}
constexpr QuickLines kSignedQuickLines = make_quick_lines(kSignedMap, 0, kSignedUnits);
constexpr QuickLines kUnsignedQuickLines = make_quick_lines(kUnsignedMap, 1, kUnsignedUnits);

// x from kLeastQuick to 1 (2^-22 more where the inverse scale is subnormal), to the bits of 2^23 + number * units +
// kDoubt. offset: 2^23 - extra * units + kDoubt.
ONETRIP_INLINE __m256i quick_numbers(F x, const QuickLines& lines, float offset) {
  const __m256i bits = (__m256i)x, range = _mm256_srli_epi32(bits, 24);
  const __m256i ranges = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(lines.line)));
  const __m256i first = _mm256_shuffle_epi8(ranges, range);
  const __m256i last =
      _mm256_permutevar8x32_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(lines.last)), first);
  const __m256i line = _mm256_sub_epi32(first, _mm256_cmpgt_epi32(bits, last));
  const __m256 rise = _mm256_fmadd_ps((__m256)x, found(lines.slope, line), _mm256_set1_ps(kQuickStart));
  return _mm256_castps_si256(_mm256_fmadd_ps(_mm256_min_ps(rise, _mm256_set1_ps(kNearly2)), found(lines.factor, line),
                                             _mm256_set1_ps(offset)));
}
// Packing works within 128 bits: dwords 0, 4, 1, 5, ... of what it gives are in order.
ONETRIP_INLINE void store_in_order(__m256i bytes, uint8_t* codes) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
}
// The third byte of each lane of 4 vectors.
ONETRIP_INLINE __m256i third_bytes(const __m256i* x) {
  constexpr int kThird = 0x0E0A0602, kNone = -1;
  const auto of = [&](int i) __attribute__((always_inline)) {
    const __m128i to = _mm_setr_epi32(i == 0 ? kThird : kNone, i == 1 ? kThird : kNone, i == 2 ? kThird : kNone,
                                      i == 3 ? kThird : kNone);
    return _mm256_shuffle_epi8(x[i], _mm256_broadcastsi128_si256(to));
  };
  return _mm256_or_si256(_mm256_or_si256(of(0), of(1)), _mm256_or_si256(of(2), of(3)));
}
// Signs of 4 vectors, as bytes: numbers of the same sign, 0 where a value is +0.
ONETRIP_INLINE __m256i signs(const F* values) {
  const auto words = [&](int i) { return _mm256_packs_epi32((__m256i)values[i], (__m256i)values[i + 1]); };
  return _mm256_packs_epi16(words(0), words(2));
}
// Whether a fraction, in the lower words, is less than its doubt.
ONETRIP_INLINE bool is_in_doubt(__m256i least, int doubt) {
  const __m256i largest = _mm256_set1_epi16(static_cast<short>(doubt - 1));
  return (_mm256_movemask_epi8(_mm256_cmpeq_epi16(_mm256_min_epu16(least, largest), least)) & 0x33333333) != 0;
}

// Returns whether all codes are certain.
ONETRIP_INLINE bool store_signed_quickly(const F* values, const Scale& scale, uint8_t* codes) {
  const __m256i zero = _mm256_set1_epi8(kSignedZeroCode);
  __m256i least = _mm256_set1_epi16(-1);
  for (int first = 0; first < kVectors; first += 4) {
    __m256i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F quotient = values[first + i] * scale.inverse;
      x[i] = quick_numbers(larger_magnitude(splat(kLeastQuick), quotient), kSignedQuickLines, kFixedPoint + kDoubt);
      least = _mm256_min_epu16(least, x[i]);
    }
    // 128 makes the sum 2^24 or more, whose unit is 2: 0x4B80 is its upper half all the same, and as 128.5 alone comes
    // here, its fraction, now a quarter, is in no doubt. It has no negative: 127 - 128 is 0 here.
    const __m256i number = third_bytes(x);
    store_in_order(
        _mm256_blendv_epi8(_mm256_add_epi8(zero, number), _mm256_subs_epu8(zero, number), signs(values + first)),
        codes + first * kWidth);
  }
  return !is_in_doubt(least, 2 * kDoubt);
}
ONETRIP_INLINE bool store_unsigned_quickly(const F* values, const Scale& scale, uint8_t* codes) {
  __m256i least = _mm256_set1_epi16(-1);
  for (int first = 0; first < kVectors; first += 4) {
    __m256i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const F quotient = larger_number(splat(kLeastQuick), values[first + i] * scale.inverse);
      x[i] = quick_numbers(quotient, kUnsignedQuickLines, kFixedPoint - kUnsignedUnits + kDoubt);
      x[i] = _mm256_add_epi32(x[i], x[i]);  // twice the bits have the number as their third byte
      least = _mm256_min_epu16(least, x[i]);
    }
    // What is not 0 gets at least code 1.
    const __m256i is_positive = _mm256_min_epu8(signs(values + first), _mm256_set1_epi8(1));
    store_in_order(_mm256_max_epu8(third_bytes(x), is_positive), codes + first * kWidth);
  }
  return !is_in_doubt(least, 4 * kDoubt);
}
ONETRIP_INLINE void store_signed(const F* values, const Scale& scale, uint8_t* codes) {
  if (!scale.is_finite || !store_signed_quickly(values, scale, codes)) store_signed_exactly(values, scale, codes);
}
ONETRIP_INLINE void store_unsigned(const F* values, const Scale& scale, uint8_t* codes) {
  if (!scale.is_finite || !store_unsigned_quickly(values, scale, codes)) store_unsigned_exactly(values, scale, codes);
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
