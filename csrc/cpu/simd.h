// One vector of kWidth float32 lanes, and what the row kernels do with it: 16 lanes under AVX-512, 8 under AVX2, 4
// elsewhere.
//
// GCC / Clang vector extensions carry the arithmetic; intrinsics stand only where the compilers do not find the
// instruction. Included once for each level, inside namespace onetrip::ONETRIP_LEVEL and an anonymous namespace:
// nothing compiled for AVX-512 may have a name that the linker could give to the baseline. For the same reason nothing
// of std:: is used but types.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC's own AVX-512 headers: gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wuninitialized"        // in inlined templates GCC 12 calls it this
#endif
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../launch.h"

// Tests that compile without optimisation leave it to the compiler.
#ifndef ONETRIP_INLINE
#define ONETRIP_INLINE inline __attribute__((always_inline))
#endif

namespace onetrip::ONETRIP_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float F __attribute__((vector_size(kWidth * 4)));     // values
typedef uint32_t U __attribute__((vector_size(kWidth * 4)));  // their bits
typedef uint64_t L __attribute__((vector_size(kWidth * 4)));  // kWidth / 2 lanes, for 32 x 32 -> 64 bit products
typedef uint16_t H __attribute__((vector_size(kWidth * 2)));  // bits of half-precision values

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
template <class T>
constexpr bool kIsFloat32 = false;
template <>
constexpr bool kIsFloat32<float> = true;
template <class T>
constexpr bool kIsBFloat16 = false;
template <>
constexpr bool kIsBFloat16<BFloat16> = true;

// Which lanes of a vector exist: all of them, or the first n where the row ends inside it (absent lanes load as 0).
struct All {};
struct First {
  int n;
};
ONETRIP_INLINE int count(All) { return kWidth; }
ONETRIP_INLINE int count(First lanes) { return lanes.n; }

ONETRIP_INLINE F splat(float value) { return F{} + value; }
ONETRIP_INLINE U splat_bits(uint32_t value) { return U{} + value; }
// a where mask is all ones, b where it is 0.
ONETRIP_INLINE U select(U mask, U a, U b) { return (a & mask) | (b & ~mask); }

// a where the sign bit of x is set, else b.
ONETRIP_INLINE F select_by_sign(F x, F a, F b) {
#if defined(__AVX512DQ__)
  return (F)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)x), (__m512)b, (__m512)a);
#elif defined(__AVX2__)
  return (F)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)x);
#else
  return (F)select(0 - ((U)x >> 31), (U)a, (U)b);
#endif
}

// a * b + c, rounded once where the level has the instruction. The build forbids contraction elsewhere
// (-ffp-contract=off), so that z = residual + (x + bias) * scale has the same bits at every level.
ONETRIP_INLINE F mul_add(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// All lanes joined: halves with each other until four lanes are left, a fixed order.
template <class Join>
ONETRIP_INLINE float fold_lanes(F v, Join join) {
  typedef float F4 __attribute__((vector_size(16)));
  F4 part[kWidth / 4];
  memcpy(part, &v, sizeof v);
  for (int half = kWidth / 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) part[i] = join(part[i], part[i + half]);
  return join(join(part[0][0], part[0][2]), join(part[0][1], part[0][3]));
}
ONETRIP_INLINE float sum_lanes(F v) {
  return fold_lanes(v, [](auto a, auto b) { return a + b; });
}
ONETRIP_INLINE float largest_lane(F v) {
  return fold_lanes(v, [](auto a, auto b) { return a > b ? a : b; });
}

// The sums of two vectors at once.
struct LaneSums {
  float a, b;
};
ONETRIP_INLINE LaneSums sum_lanes(F a, F b) {
#if defined(__AVX512F__)
  constexpr int kLowHalves = 0x44, kHighHalves = 0xEE, kOtherQuarters = 0xB1, kOtherPairs = 0x4E, kNeighbours = 0xB1;
  const __m512 halves = _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, kLowHalves),
                                      _mm512_shuffle_f32x4((__m512)a, (__m512)b, kHighHalves));
  __m512 sums = _mm512_add_ps(halves, _mm512_shuffle_f32x4(halves, halves, kOtherQuarters));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, kOtherPairs));
  sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, kNeighbours));
  return {_mm512_cvtss_f32(sums), _mm_cvtss_f32(_mm512_extractf32x4_ps(sums, 2))};
#else
  return {sum_lanes(a), sum_lanes(b)};
#endif
}

// v, with `value` in the lanes that do not exist.
ONETRIP_INLINE F fill_lanes(F v, All, float) { return v; }
ONETRIP_INLINE F fill_lanes(F v, First lanes, float value) {
  U index;
  for (int i = 0; i < kWidth; ++i) index[i] = i;
  return (F)select((U)(index < splat_bits(lanes.n)), (U)v, (U)splat(value));
}
template <class Lanes>
ONETRIP_INLINE F keep_lanes(F v, Lanes lanes) {
  return fill_lanes(v, lanes, 0.0f);
}

// The larger one; b where either is NaN.
ONETRIP_INLINE F larger_number(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (F)_mm_max_ps((__m128)a, (__m128)b);
#else
  return (F)select((U)(a > b), (U)a, (U)b);
#endif
}

// The smaller one; b where either is NaN.
ONETRIP_INLINE F smaller_number(F a, F b) {
#if defined(__AVX512F__)
  return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (F)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
  return (F)_mm_min_ps((__m128)a, (__m128)b);
#else
  return (F)select((U)(a < b), (U)a, (U)b);
#endif
}

// Rounded correctly.
ONETRIP_INLINE F square_root(F v) {
#if defined(__AVX512F__)
  return (F)_mm512_sqrt_ps((__m512)v);
#elif defined(__AVX2__)
  return (F)_mm256_sqrt_ps((__m256)v);
#elif defined(__SSE2__)
  return (F)_mm_sqrt_ps((__m128)v);
#elif defined(__aarch64__)
  return (F)vsqrtq_f32((float32x4_t)v);
#else
  for (int i = 0; i < kWidth; ++i) v[i] = __builtin_sqrtf(v[i]);
  return v;
#endif
}

// e^x of x <= 0, within 1 unit in the last place; below 2^-126 to 0 (exactly 0 for -Inf), NaN stays NaN. The levels
// with a fused multiply-add agree bit for bit.
//
// x = n ln 2 + r, |r| <= ln 2 / 2, in two parts of ln 2 of which n times the first is exact (Cody & Waite 1980). The
// polynomial 1 + r + r^2 (...) is minimax in the relative error: 0.05 * 2^-24 before rounding.
ONETRIP_INLINE F exp_nonpositive(F x) {
  // At -88 n is -127, and 2^n comes out as 0. Adding 1.5 * 2^23 rounds to an integer, in the low bits.
  x = larger_number(splat(-88.0f), x);
  const F magic = splat(0x1.8p23f + 127.0f);
  const F shifted = mul_add(x, splat(0x1.715476p0f), magic);
  const F n = shifted - magic;
  F r = mul_add(n, splat(-0x1.62e4p-1f), x);
  r = mul_add(n, splat(-0x1.7f7d1cp-20f), r);
  F e = mul_add(r, splat(0x1.6a2434p-10f), splat(0x1.1239e2p-7f));
  e = mul_add(e, r, splat(0x1.5558f2p-5f));
  e = mul_add(e, r, splat(0x1.555492p-3f));
  e = mul_add(e, r, splat(0x1.fffffcp-2f));
  e = mul_add(e, r, splat(1.0f));
  e = mul_add(e, r, splat(1.0f));
  return e * (F)((U)shifted << 23);
}

ONETRIP_INLINE F widen(F v, float) { return v; }
ONETRIP_INLINE F narrow(F v, float) { return v; }
ONETRIP_INLINE F widen(H bits, BFloat16) {
#if defined(__AVX512F__)  // of the other form GCC 12 makes six instructions
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#else
  return (F)(__builtin_convertvector(bits, U) << 16);
#endif
}

// Round to nearest even, in the upper 16 bits; NaN stays NaN (its payload may not survive there, so a bit is set).
ONETRIP_INLINE U upper_bits(F v) {
  const U bits = (U)v;
  return v == v ? bits + 0x7FFFu + ((bits >> 16) & 1u) : bits | 0x400000u;
}
ONETRIP_INLINE H narrow(F v, BFloat16) { return __builtin_convertvector(upper_bits(v) >> 16, H); }

ONETRIP_INLINE F widen(H bits, Float16) {
#if defined(__AVX512F__)
  return (F)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__AVX2__)
  return (F)_mm256_cvtph_ps((__m128i)bits);
#elif defined(__aarch64__)
  return (F)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)bits));
#else
  // Exponent and mantissa move to their float32 place; the bias is corrected by a multiplication, which normalises
  // subnormals.
  const U wide = __builtin_convertvector(bits, U);
  const U sign = (wide & 0x8000u) << 16;
  const U magnitude = (wide & 0x7FFFu) << 13;
  const U finite = (U)((F)magnitude * splat(0x1p112f));
  const U special = (U)(magnitude >= splat_bits(0x7C00u << 13));  // Inf and NaN keep an exponent of ones
  return (F)(select(special, magnitude | 0x7F800000u, finite) | sign);
#endif
}

ONETRIP_INLINE H narrow(F v, Float16) {
#if defined(__AVX512F__)
  return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (H)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return (H)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v));
#else
  const U sign = (U)v & 0x80000000u;
  const U magnitude = (U)v ^ sign;
  // Below 2^-14 the sum with 0.5 puts the subnormal's units in the last place of a float32: the adder rounds to nearest
  // even.
  const U subnormal = (U)((F)magnitude + splat(0.5f)) - 0x3F000000u;
  const U normal = (magnitude - ((127u - 15u) << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  const U is_nan = (U)(magnitude > splat_bits(0x7F800000u));
  const U special = select(is_nan, splat_bits(0x7E00u), splat_bits(0x7C00u));
  const U is_small = (U)(magnitude < splat_bits((127u - 14u) << 23));
  const U is_large =
      (U)(magnitude >= splat_bits((127u + 16u) << 23));  // from 2^16; 65520 to 2^16 carry into Inf by themselves
  return __builtin_convertvector(select(is_large, special, select(is_small, subnormal, normal)) | (sign >> 16), H);
#endif
}

ONETRIP_INLINE F load(const float* from, All) {
  F v;
  memcpy(&v, from, sizeof v);
  return v;
}
ONETRIP_INLINE void store(float* to, F v, All) { memcpy(to, &v, sizeof v); }
ONETRIP_INLINE H load_bits(const void* from, All) {
  H v;
  memcpy(&v, from, sizeof v);
  return v;
}
ONETRIP_INLINE void store(void* to, H v, All) { memcpy(to, &v, sizeof v); }

#if defined(__AVX512F__)
ONETRIP_INLINE F load(const float* from, First lanes) {
  return (F)_mm512_maskz_loadu_ps((__mmask16)((1u << lanes.n) - 1), from);
}
ONETRIP_INLINE void store(float* to, F v, First lanes) {
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << lanes.n) - 1), (__m512)v);
}
ONETRIP_INLINE H load_bits(const void* from, First lanes) {
  return (H)_mm256_maskz_loadu_epi16((__mmask16)((1u << lanes.n) - 1), from);
}
ONETRIP_INLINE void store(void* to, H v, First lanes) {
  _mm256_mask_storeu_epi16(to, (__mmask16)((1u << lanes.n) - 1), (__m256i)v);
}
#else
ONETRIP_INLINE F load(const float* from, First lanes) {
  F v = {};
  for (int i = 0; i < lanes.n; ++i) v[i] = from[i];
  return v;
}
ONETRIP_INLINE void store(float* to, F v, First lanes) {
  for (int i = 0; i < lanes.n; ++i) to[i] = v[i];
}
ONETRIP_INLINE H load_bits(const void* from, First lanes) {
  H v = {};
  for (int i = 0; i < lanes.n; ++i) v[i] = static_cast<const uint16_t*>(from)[i];
  return v;
}
ONETRIP_INLINE void store(void* to, H v, First lanes) {
  for (int i = 0; i < lanes.n; ++i) static_cast<uint16_t*>(to)[i] = v[i];
}
#endif

// All ones where the byte is not 0.
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
template <class Lanes>
ONETRIP_INLINE U test_bytes(const void* from, Lanes lanes) {
  Bytes bytes = {};
  memcpy(&bytes, from, count(lanes));
  return (U)(__builtin_convertvector(bytes, U) != splat_bits(0));
}

template <class T, class Lanes>
ONETRIP_INLINE F load(const T* from, Lanes lanes) {
  return widen(load_bits(from, lanes), T{});
}

// Past the cache: the line is not read before it is written. The address must be a multiple of 64 bytes plus whole
// vectors, and stream_fence() must follow before another thread reads.
ONETRIP_INLINE void stream(float* to, F v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)v);
#elif defined(__SSE2__)
  _mm_stream_ps(to, (__m128)v);
#else
  store(to, v, All{});
#endif
}
ONETRIP_INLINE void stream(void* to, H v) {
#if defined(__AVX512F__)
  _mm256_stream_si256(static_cast<__m256i*>(to), (__m256i)v);
#elif defined(__AVX2__)
  _mm_stream_si128(static_cast<__m128i*>(to), (__m128i)v);
#elif defined(__SSE2__)
  long long bits;
  memcpy(&bits, &v, sizeof bits);
  _mm_stream_si64(static_cast<long long*>(to), bits);
#else
  store(to, v, All{});
#endif
}
ONETRIP_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Stores v rounded to T, and returns what was stored. A null pointer only rounds. The end of a row is never streamed.
template <class T>
ONETRIP_INLINE F store_rounded(T* to, F v, All, bool streams = false) {
  const auto bits = narrow(v, T{});
  if (to && streams) {
    stream(to, bits);
  } else if (to) {
    store(to, bits, All{});
  }
  return widen(bits, T{});
}
template <class T>
ONETRIP_INLINE F store_rounded(T* to, F v, First lanes, bool = false) {
  const auto bits = narrow(v, T{});
  if (to) store(to, bits, lanes);
  return widen(bits, T{});
}

// The pointer, of which compilers learn that it is not null: bodies that compute nothing on condition keep constants in
// registers from vector to vector.
template <class T>
ONETRIP_INLINE T* present(T* pointer) {
  if (!pointer) __builtin_unreachable();
  return pointer;
}

template <class T>
ONETRIP_INLINE F round_to(F v) {
  return store_rounded(static_cast<T*>(nullptr), v, All{});
}
// In place, without the way through 16-bit lanes and back.
template <>
ONETRIP_INLINE F round_to<BFloat16>(F v) {
  return (F)(upper_bits(v) & 0xFFFF0000u);
}

// Calls body(column, lanes, i) for every vector of [begin, end); i counts 0 … kUnroll - 1 so that sums run in kUnroll
// chains.
template <int kUnroll, class Body>
ONETRIP_INLINE void for_columns(int64_t begin, int64_t end, Body body) {
  int64_t c = begin;
  for (; c + kUnroll * kWidth <= end; c += kUnroll * kWidth) {
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i) body(c + i * kWidth, All{}, i);
  }
  if constexpr (kUnroll > 1)
    for (; c + kWidth <= end; c += kWidth) body(c, All{}, 0);
  if (c < end) body(c, First{static_cast<int>(end - c)}, 0);
}

// Two vectors of bfloat16 at once: its even columns and its odd ones, which become float32 and bfloat16 again without
// a shuffle.
struct Pair {
  F even, odd;
};
struct Both {};  // all lanes of a pair
ONETRIP_INLINE Pair load(const BFloat16* from, Both) {
  U bits;
  memcpy(&bits, from, sizeof bits);
  return {(F)(bits << 16), (F)(bits & 0xFFFF0000u)};
}
// v was computed from bfloat16 and finite numbers alone: a NaN among them has no low bits that rounding could carry.
ONETRIP_INLINE void store_rounded(BFloat16* to, Pair v, Both, bool streams) {
  const U even = (U)v.even, odd = (U)v.odd;
  const U bits =
      ((even + (0x7FFFu + ((even >> 16) & 1u))) >> 16) | ((odd + (0x7FFFu + ((odd >> 16) & 1u))) & 0xFFFF0000u);
  store_rounded(reinterpret_cast<float*>(to), (F)bits, All{}, streams);
}

// function(a, others...), vector by vector.
template <class Function, class... Others>
ONETRIP_INLINE F map(Function function, F a, Others... others) {
  return function(a, others...);
}
template <class Function, class... Others>
ONETRIP_INLINE Pair map(Function function, Pair a, Others... others) {
  return {function(a.even, others.even...), function(a.odd, others.odd...)};
}

// for_columns over an array of T: bfloat16 comes in pairs as long as kUnroll vectors are left, whose i is that of the
// first one.
template <int kUnroll, class T, class Body>
ONETRIP_INLINE void for_columns_of(int64_t begin, int64_t end, Body body) {
  if constexpr (kIsBFloat16<T>) {
    for (; begin + kUnroll * kWidth <= end; begin += kUnroll * kWidth) {
#pragma GCC unroll 8
      for (int i = 0; i < kUnroll; i += 2) body(begin + i * kWidth, Both{}, i);
    }
  }
  for_columns<kUnroll>(begin, end, body);
}

// Calls body with a value of the C++ type of dtype.
template <class Body>
ONETRIP_INLINE auto with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Float16{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

// The same for a dtype that is T's or float32.
template <class T, class Body>
ONETRIP_INLINE auto with_type_or_float32(DType dtype, Body body) {
  if constexpr (kIsFloat32<T>) {
    return body(float{});
  } else {
    return dtype == DType::kFloat32 ? body(float{}) : body(T{});
  }
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
