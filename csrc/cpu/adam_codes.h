// The 8-bit code maps of Adam: values of the codes of kGroup vectors, and the codes of a block's values.
//
// Within a decade the magnitudes of a map are evenly spaced, so that the number of the one below x is a line in x, and
// over all decades it is the least of their lines, which grow less steep from each to the next. That gives the code of
// x or the one before; which of the two, the exact threshold between them says.
#pragma once
#include "../common/adam.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

typedef int32_t I __attribute__((vector_size(kWidth * 4)));

constexpr auto kSignedMap = make_code_map<kSignedMagnitudes>(0);
constexpr auto kUnsignedMap = make_code_map<kUnsignedMagnitudes>(1);
constexpr int kDecades = 7;
constexpr int kBlock = static_cast<int>(kAdamBlock), kVectors = kBlock / kWidth;

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
};

inline bool is_finite(float value) { return -3.40282347e38f <= value && value <= 3.40282347e38f; }

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

// numbers up to 255
ONETRIP_INLINE void store_codes(I numbers, uint8_t* codes) {
  const Bytes bytes = __builtin_convertvector(numbers, Bytes);
  memcpy(codes, &bytes, sizeof bytes);
}
ONETRIP_INLINE F look_up(const float* table, const uint8_t* index) {
  F entries;
  for (int i = 0; i < kWidth; ++i) entries[i] = table[index[i]];
  return entries;
}
ONETRIP_INLINE I magnitude_number(F value, const Scale& scale, const Lines& lines, const float* thresholds) {
  const F x = larger_number((F)((U)(value * scale.inverse) & 0x7FFFFFFFu), F{});  // NaN gets code 0
  F number = mul_add(x, splat(lines.slope[0]), splat(lines.offset[0]));
#pragma GCC unroll 8
  for (int i = 1; i < kDecades; ++i)
    number = smaller_number(mul_add(x, splat(lines.slope[i]), splat(lines.offset[i])), number);
  const I below = __builtin_convertvector(number, I);
  uint8_t index[kWidth];
  store_codes(below, index);
  return below - (I)(x >= look_up(thresholds + 1, index));
}
__attribute__((noinline)) void store_signed_exactly(const F* values, const Scale& scale, uint8_t* codes) {
  for (int i = 0; i < kVectors; ++i) {
    const I number = magnitude_number(values[i], scale, kSignedLines, kSignedMap.threshold), sign = (I)values[i] >> 31;
    const I code = kSignedZeroCode + ((number ^ sign) - sign);
    store_codes(code & ~(code >> 31), codes + i * kWidth);  // magnitude 128 has no negative
  }
}
__attribute__((noinline)) void store_unsigned_exactly(const F* values, const Scale& scale, uint8_t* codes) {
  for (int i = 0; i < kVectors; ++i) {
    const I number = magnitude_number(values[i], scale, kUnsignedLines, kUnsignedMap.threshold);
    store_codes(number - (I)((number == 0) & (values[i] > 0.0f)), codes + i * kWidth);
  }
}

// AVX2 and AVX-512 take whole blocks with fewer instructions, where no x lies right beside a threshold and the scale is
// finite. In decade i the number of x is the integer part of
//
//   2^(i + extra) * min((10^(6 - i) x + 0.8) / 0.9, nearly 2) - extra
//
// in fixed point, its error less than kDoubt units: of all float32 x in [0, 1], 3,900 (signed, 16 bits behind the
// point) and 9,200 (unsigned, 15 bits) lie that close to a threshold, and no other gets a wrong code; 1,200 and 2,800
// would without kDoubt. 2^23 is added, and the bits of the sum are the fixed-point number.
struct QuickLine {
  float slope, factor;  // number = factor * min(slope * x + kQuickStart, kNearly2)
};
constexpr float kLeastQuick = 1.0f / (1 << 29), kQuickStart = static_cast<float>(8.0 / 9.0);
constexpr float kNearly2 = 2.0f - 1.0f / (1 << 11), kFixedPoint = 1 << 23;
constexpr int kDoubt = 1;
constexpr float kSignedUnits = 1 << 16, kUnsignedUnits = 1 << 15;
constexpr QuickLine quick_line(int decade, int extra, double units) {
  double power = 1e6;
  for (int k = 0; k < decade; ++k) power /= 10;
  return {static_cast<float>(power / 0.9), static_cast<float>(units * (1 << (decade + extra)))};
}
// Where x has one number, it lies in the middle between its thresholds.
constexpr QuickLine quick_constant(int number, int extra, double units) {
  return {0.0f, static_cast<float>(units * ((number + 0.5 + extra) / kQuickStart))};
}

#if !defined(__AVX512F__)
constexpr int kGroup = 1;

// The larger one of a, not negative, and |b|; where b is NaN, either.
ONETRIP_INLINE F larger_magnitude(F a, F b) { return larger_number(a, (F)((U)b & 0x7FFFFFFFu)); }
// v, or the limit with its sign. Without kKeepsNaN v is no NaN.
template <bool kKeepsNaN>
ONETRIP_INLINE F clamp_magnitude(F v, F limit) {
  return smaller_number(limit, larger_number(-limit, v));
}

struct Tables {};

#if !defined(__AVX2__)
// The scale of a block whose lanes have these largest magnitudes; NaN is the largest.
ONETRIP_INLINE Scale make_scale(U magnitudes) {
  uint32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits = magnitudes[i] > bits ? magnitudes[i] : bits;
  bits &= 0x7FFFFFFFu;
  float value;
  memcpy(&value, &bits, sizeof value);
  if (value < kSmallestAdamScale) value = 0.0f;
  return {value, value <= 3.40282347e38f, splat(value == 0.0f ? 0.0f : 1.0f / value)};
}
ONETRIP_INLINE void make_scales(U m_magnitudes, U root_magnitudes, Scale& m_scale, Scale& root_scale) {
  m_scale = make_scale(m_magnitudes);
  root_scale = make_scale(root_magnitudes);
}

struct SignedValues {
  float value[256];  // of each code
};
constexpr SignedValues make_signed_values() {
  SignedValues v{};
  for (int code = 0; code < 256; ++code)
    v.value[code] =
        code < kSignedZeroCode ? -kSignedMap.value[kSignedZeroCode - code] : kSignedMap.value[code - kSignedZeroCode];
  return v;
}
constexpr SignedValues kSignedValues = make_signed_values();
ONETRIP_INLINE void signed_values(const Tables&, const uint8_t* codes, F* values) {
  *values = look_up(kSignedValues.value, codes);
}
ONETRIP_INLINE void unsigned_values(const Tables&, const uint8_t* codes, F* values) {
  *values = look_up(kUnsignedMap.value, codes);
}

ONETRIP_INLINE void store_signed(const F* values, const Scale& scale, uint8_t* codes) {
  store_signed_exactly(values, scale, codes);
}
ONETRIP_INLINE void store_unsigned(const F* values, const Scale& scale, uint8_t* codes) {
  store_unsigned_exactly(values, scale, codes);
}
#endif
#endif

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL

#if defined(__AVX512F__)
#include "adam_codes_avx512.h"
#elif defined(__AVX2__)
#include "adam_codes_avx2.h"
#endif
