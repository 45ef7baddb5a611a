// float32 numbers in two parts: the 16-bit number nearest to each, and a residual in units of 2^-16 or 2^-8 of its last
// place. python_pkg/onetrip/reference/rounding.py has the formulas.
#pragma once
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

typedef int32_t S __attribute__((vector_size(sizeof(U))));
typedef int16_t Signed16 __attribute__((vector_size(kWidth * 2)));
typedef int8_t Signed8 __attribute__((vector_size(kWidth)));

// exponent: all its bits.
ONETRIP_INLINE U is_finite(U bits, uint32_t exponent) { return (U)((bits & exponent) != splat_bits(exponent)); }
ONETRIP_INLINE U is_nan(F v) { return (U)(v != v); }

// bits: of the residual, 8 or 16.
ONETRIP_INLINE F join(H weight, S residual, int bits, BFloat16) {
  const U upper = __builtin_convertvector(weight, U) << 16, joined = upper + ((U)residual << (16 - bits));
  return (F)select((U)((S)(joined ^ upper) < 0), upper, joined);
}
ONETRIP_INLINE void split(F v, int bits, H& weight, S& residual, BFloat16) {
  const S lower = (S)((U)v << 16) >> 16;
  const U upper = select(is_nan(v), splat_bits(0x7FC0u), ((U)v - (U)lower) >> 16);
  weight = __builtin_convertvector(upper, H);
  const S rest = bits == 16 ? lower : (lower + 128) >> 8;
  residual = (S)((U)rest & is_finite(upper, 0x7F80u));
}

// The exponent of float16 numbers, as the smallest normal ones have it where they are smaller: their last place is
// 2^(exponent - 25).
ONETRIP_INLINE U exponent_of(U weight) {
  const U exponent = (weight >> 10) & 31u;
  return select((U)(exponent == splat_bits(0)), splat_bits(1), exponent);
}
ONETRIP_INLINE F power_of_2(U exponent) { return (F)((exponent + 127u) << 23); }

ONETRIP_INLINE F join(H weight, S residual, int bits, Float16) {
  const F unit = power_of_2(exponent_of(__builtin_convertvector(weight, U)) - (25u + bits));
  return widen(weight, Float16{}) + __builtin_convertvector(residual, F) * unit;
}
ONETRIP_INLINE void split(F v, int bits, H& weight, S& residual, Float16) {
  weight = narrow(v, Float16{});
  const U upper = __builtin_convertvector(weight, U);
  const F units = (v - widen(weight, Float16{})) * power_of_2((25u + bits) - exponent_of(upper));
  const F magic = splat(0x1.8p23f);  // the sum is rounded to a whole number, in the lower bits
  residual = (S)(((U)(units + magic) - (U)magic) & is_finite(upper, 0x7C00u));
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
