// One step of Adam over tables of parameters; reference/adam.py has the formulas, and these are its bits at every
// level.
//
// A block of 128 elements is taken through two passes. The first reads codes, gradient and parameter, writes the
// parameter, and leaves m and sqrt(v) in 1 KiB of stack, with their largest magnitudes; the second writes their codes.
// Memory sees every array once: p read and written, g read, 2 bytes of codes and 1/16 of scales read and written, 16.1
// bytes an element in float32. Every element, and every block, is computed by itself: no bit depends on the threads.
//
// Codes. Within a decade the magnitudes of a map are evenly spaced, so the number of the one below x is a line in x,
// and over all decades it is the least of their lines, which grow less steep from each to the next. That gives the code
// of x or the one before; which of the two, the exact threshold between them says.
#include "../common/adam.h"

#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

constexpr int kBlock = static_cast<int>(kAdamBlock), kDecades = 7;
typedef int32_t I __attribute__((vector_size(kWidth * 4)));

constexpr auto kSignedMap = make_code_map<kSignedMagnitudes>(0);
constexpr auto kUnsignedMap = make_code_map<kUnsignedMagnitudes>(1);

// number(x) = slope * x + offset, by decade. In exact arithmetic anything from 0.2 to 0.75 may be taken off to have the
// code or the one before, the middles between decades and those next to 0 and 1 included; half of the rest serves
// rounding, which stays below 1e-4.
struct Lines {
  float slope[kDecades], offset[kDecades];
};
constexpr Lines make_lines(int extra) {
  Lines lines{};
  double decade = 1e-6;
  for (int i = 0; i < kDecades; ++i) {
    const int n_steps = 1 << (i + extra), first = 1 + (((1 << i) - 1) << extra);
    lines.slope[i] = static_cast<float>(n_steps / (0.9 * decade));
    lines.offset[i] = static_cast<float>(first - n_steps / 9.0 - 0.475);
    decade *= 10;
  }
  return lines;
}
constexpr Lines kSignedLines = make_lines(0), kUnsignedLines = make_lines(1);

// The code's magnitude of x in [0, 1], or the one before.
ONETRIP_INLINE I guess(F x, const Lines& lines) {
  F number = mul_add(x, splat(lines.slope[0]), splat(lines.offset[0]));
#pragma GCC unroll 8
  for (int i = 1; i < kDecades; ++i)
    number = smaller_number(mul_add(x, splat(lines.slope[i]), splat(lines.offset[i])), number);
  return __builtin_convertvector(number, I);
}

// Tables are looked up for kGroup vectors at a time.
#if defined(__AVX512F__)
constexpr int kGroup = 2;

// A table of 32-bit entries as their lower and upper halves, of which one instruction finds 32 among 64.
template <int kEntries>
struct Table {
  alignas(64) uint16_t low[kEntries], high[kEntries];
  explicit Table(const float* entries, int n) {
    for (int i = 0; i < kEntries; ++i) {
      uint32_t bits = 0;
      if (i < n) memcpy(&bits, entries + i, sizeof bits);
      low[i] = static_cast<uint16_t>(bits);
      high[i] = static_cast<uint16_t>(bits >> 16);
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
ONETRIP_INLINE __mmask32 test_bit(__m512i words, int bit) {
  return _mm512_test_epi16_mask(words, _mm512_set1_epi16(static_cast<short>(1 << bit)));
}
// Unpacking and packing work within 128 bits: in `words` 8 dwords lie as 0, 4, 1, 5, 2, 6, 3, 7 of bytes would.
ONETRIP_INLINE void unpack(__m512i low, __m512i high, F* values) {
  values[0] = (F)_mm512_unpacklo_epi16(low, high);
  values[1] = (F)_mm512_unpackhi_epi16(low, high);
}
ONETRIP_INLINE __m512i pack(const I* numbers) { return _mm512_packus_epi32((__m512i)numbers[0], (__m512i)numbers[1]); }
ONETRIP_INLINE __m512i load_codes(const uint8_t* codes) {
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  return _mm512_cvtepu8_epi16(_mm256_permutevar8x32_epi32(bytes, order));
}
// Numbers below 0 are stored as 0.
ONETRIP_INLINE void store_codes(uint8_t* codes, const I* numbers) {
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i bytes = _mm512_cvtepi16_epi8(pack(numbers));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
}

struct Tables {
  Table<128> signed_values{kSignedMap.value, 128}, signed_thresholds{kSignedMap.threshold + 1, 128};
  Table<256> unsigned_values{kUnsignedMap.value, 256}, unsigned_thresholds{kUnsignedMap.threshold + 1, 255};
};

ONETRIP_INLINE void signed_values(const Tables& tables, const uint8_t* codes, F* values) {
  const __m512i number = _mm512_sub_epi16(load_codes(codes), _mm512_set1_epi16(kSignedZeroCode));
  const __m512i magnitude = _mm512_abs_epi16(number);
  const __mmask32 bit6 = test_bit(magnitude, 6), is_one = test_bit(magnitude, 7);
  const __m512i low = find(tables.signed_values.low, magnitude, bit6);
  __m512i high = find(tables.signed_values.high, magnitude, bit6);
  high = _mm512_mask_mov_epi16(high, is_one, _mm512_set1_epi16(0x3F80));
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  unpack(low, _mm512_ternarylogic_epi32(high, number, _mm512_set1_epi16(-0x8000), kOrAnd), values);
}
ONETRIP_INLINE void unsigned_values(const Tables& tables, const uint8_t* codes, F* values) {
  const __m512i number = load_codes(codes);
  const __mmask32 bit6 = test_bit(number, 6), bit7 = test_bit(number, 7);
  unpack(find(tables.unsigned_values.low, number, bit6, bit7), find(tables.unsigned_values.high, number, bit6, bit7),
         values);
}
// Thresholds of the magnitudes that follow.
ONETRIP_INLINE void signed_thresholds(const Tables& tables, const I* magnitudes, F* values) {
  const __m512i number = pack(magnitudes);
  const __mmask32 bit6 = test_bit(number, 6);
  unpack(find(tables.signed_thresholds.low, number, bit6), find(tables.signed_thresholds.high, number, bit6), values);
}
ONETRIP_INLINE void unsigned_thresholds(const Tables& tables, const I* magnitudes, F* values) {
  const __m512i number = pack(magnitudes);
  const __mmask32 bit6 = test_bit(number, 6), bit7 = test_bit(number, 7);
  unpack(find(tables.unsigned_thresholds.low, number, bit6, bit7),
         find(tables.unsigned_thresholds.high, number, bit6, bit7), values);
}

ONETRIP_INLINE I next_where(I number, F x, F threshold) {
  const __mmask16 reaches = _mm512_cmp_ps_mask((__m512)x, (__m512)threshold, _CMP_GE_OQ);
  return (I)_mm512_mask_add_epi32((__m512i)number, reaches, (__m512i)number, _mm512_set1_epi32(1));
}
// 127 + magnitude, 127 - magnitude where the sign bit of v is set.
ONETRIP_INLINE I signed_code(I magnitude, F v) {
  const __m512i zero = _mm512_set1_epi32(kSignedZeroCode);
  return (I)_mm512_mask_sub_epi32(_mm512_add_epi32(zero, (__m512i)magnitude), _mm512_movepi32_mask((__m512i)v), zero,
                                  (__m512i)magnitude);
}
ONETRIP_INLINE I at_least_one_where_positive(I magnitude, F v) {
  const __mmask16 is_positive = _mm512_cmp_ps_mask((__m512)v, _mm512_setzero_ps(), _CMP_GT_OQ);
  return (I)_mm512_mask_max_epi32((__m512i)magnitude, is_positive, (__m512i)magnitude, _mm512_set1_epi32(1));
}
#else
constexpr int kGroup = 1;
struct Tables {};

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
// Numbers below 0 are stored as 0.
ONETRIP_INLINE void store_codes(uint8_t* codes, const I* numbers) {
  const Bytes bytes = __builtin_convertvector(*numbers & ~(*numbers >> 31), Bytes);
  memcpy(codes, &bytes, sizeof bytes);
}

ONETRIP_INLINE void signed_values(const Tables&, const uint8_t* codes, F* values) {
  const I number = load_codes(codes) - kSignedZeroCode, sign = number >> 31;
  const F magnitude = look_up(kSignedMap.value, (number ^ sign) - sign);
  *values = (F)((U)magnitude | ((U)number & 0x80000000u));
}
ONETRIP_INLINE void unsigned_values(const Tables&, const uint8_t* codes, F* values) {
  *values = look_up(kUnsignedMap.value, load_codes(codes));
}
// Thresholds of the magnitudes that follow.
ONETRIP_INLINE void signed_thresholds(const Tables&, const I* magnitudes, F* values) {
  *values = look_up(kSignedMap.threshold + 1, *magnitudes);
}
ONETRIP_INLINE void unsigned_thresholds(const Tables&, const I* magnitudes, F* values) {
  *values = look_up(kUnsignedMap.threshold + 1, *magnitudes);
}

ONETRIP_INLINE I next_where(I number, F x, F threshold) { return number - (I)(x >= threshold); }
// 127 + magnitude, 127 - magnitude where the sign bit of v is set.
ONETRIP_INLINE I signed_code(I magnitude, F v) {
  const I sign = (I)v >> 31;
  return kSignedZeroCode + ((magnitude ^ sign) - sign);
}
ONETRIP_INLINE I at_least_one_where_positive(I magnitude, F v) {
  return magnitude - (I)((magnitude == 0) & (v > 0.0f));
}
#endif

constexpr int kGroups = kBlock / (kGroup * kWidth);

ONETRIP_INLINE U magnitude_bits(F v) { return (U)v & 0x7FFFFFFFu; }
// Of bits: NaN is larger than Inf, and that than any number.
ONETRIP_INLINE U larger_bits(U a, U b) { return a > b ? a : b; }
ONETRIP_INLINE float largest_lane_bits(U bits) {
  uint32_t largest = 0;
#if defined(__AVX512F__)
  largest = _mm512_reduce_max_epu32((__m512i)bits);
#else
  for (int i = 0; i < kWidth; ++i) largest = bits[i] > largest ? bits[i] : largest;
#endif
  float value;
  memcpy(&value, &largest, sizeof value);
  return value;
}

// What quantising multiplies with, 1 / scale; too small a scale becomes 0.
ONETRIP_INLINE F inverse_of(float& scale) {
  if (scale < kSmallestAdamScale) scale = 0.0f;
  return splat(scale == 0.0f ? 0.0f : 1.0f / scale);
}

// Magnitudes of a group of values / scale.
template <class Thresholds>
ONETRIP_INLINE void quantize(const F* values, F inverse, const Lines& lines, Thresholds thresholds, I* magnitudes) {
  F x[kGroup], threshold[kGroup];
  for (int i = 0; i < kGroup; ++i) {
    x[i] = larger_number((F)magnitude_bits(values[i] * inverse), F{});  // NaN gets code 0
    magnitudes[i] = guess(x[i], lines);
  }
  thresholds(magnitudes, threshold);
  for (int i = 0; i < kGroup; ++i) magnitudes[i] = next_where(magnitudes[i], x[i], threshold[i]);
}

// AdamScalars, in every lane.
struct Numbers {
  F grad_factor, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction1, inv_sqrt_bias_correction2,
      eps, lr, largest_update;
  bool has_l2;
  explicit Numbers(const AdamScalars& s)
      : grad_factor(splat(s.grad_factor)),
        l2(splat(s.l2)),
        decay(splat(s.decay)),
        one_minus_beta1(splat(s.one_minus_beta1)),
        beta2(splat(s.beta2)),
        one_minus_beta2(splat(s.one_minus_beta2)),
        inv_bias_correction1(splat(s.inv_bias_correction1)),
        inv_sqrt_bias_correction2(splat(s.inv_sqrt_bias_correction2)),
        eps(splat(s.eps)),
        lr(splat(s.lr)),
        largest_update(splat(s.largest_update)),
        has_l2(s.l2 != 0.0f) {}
};

// The moments of a vector one step on, and its new parameter.
struct Updated {
  F m, v, root, p;
};
template <bool kClamps>
ONETRIP_INLINE Updated update(F p, F grad, F m, F v, const Numbers& by) {
  F g = grad * by.grad_factor;
  if (by.has_l2) g = g + p * by.l2;
  m = m + (g - m) * by.one_minus_beta1;
  v = v * by.beta2 + (g * by.one_minus_beta2) * g;
  const F root = square_root(v);
  F u = (m * by.inv_bias_correction1) / (root * by.inv_sqrt_bias_correction2 + by.eps);
  if constexpr (kClamps) u = smaller_number(by.largest_update, larger_number(-by.largest_update, u));  // NaN stays
  return {m, v, root, p * by.decay - u * by.lr};
}

// What a block of 8-bit states is read from and written to.
template <class P, class G>
struct Block {
  P* param;
  const G* grad;
  uint8_t *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
};

// n: elements that exist, of kBlock that can be read and written.
template <class P, class G>
ONETRIP_INLINE void step_block(const Block<P, G>& block, int n, const Numbers& by, const Tables& tables) {
  F m[kBlock / kWidth], root[kBlock / kWidth];
  U largest_m = {}, largest_root = {};
  const F m_scale = splat(*block.exp_avg_scale), root_scale = splat(*block.exp_avg_sq_scale);
  for (int group = 0; group < kGroups; ++group) {
    const int first = group * kGroup;
    signed_values(tables, block.exp_avg + first * kWidth, m + first);
    unsigned_values(tables, block.exp_avg_sq + first * kWidth, root + first);
    for (int i = first; i < first + kGroup; ++i) {
      P* param = block.param + i * kWidth;
      const F old_root = root[i] * root_scale;
      const Updated updated = update<true>(load(param, All{}), load(block.grad + i * kWidth, All{}), m[i] * m_scale,
                                           old_root * old_root, by);
      store_rounded(param, updated.p, All{});
      m[i] = updated.m;
      root[i] = updated.root;
    }
  }
  if (n < kBlock) {
    memset(reinterpret_cast<float*>(m) + n, 0, (kBlock - n) * sizeof(float));
    memset(reinterpret_cast<float*>(root) + n, 0, (kBlock - n) * sizeof(float));
  }
  for (int i = 0; i < kBlock / kWidth; ++i) {
    largest_m = larger_bits(magnitude_bits(m[i]), largest_m);
    largest_root = larger_bits(magnitude_bits(root[i]), largest_root);
  }
  float new_m_scale = largest_lane_bits(largest_m), new_root_scale = largest_lane_bits(largest_root);
  const F m_inverse = inverse_of(new_m_scale), root_inverse = inverse_of(new_root_scale);
  *block.exp_avg_scale = new_m_scale;
  *block.exp_avg_sq_scale = new_root_scale;
  for (int group = 0; group < kGroups; ++group) {
    const int first = group * kGroup;
    I codes[kGroup];
    const auto of_signed = [&](const I* numbers, F* values) { signed_thresholds(tables, numbers, values); };
    quantize(m + first, m_inverse, kSignedLines, of_signed, codes);
    for (int i = 0; i < kGroup; ++i) codes[i] = signed_code(codes[i], m[first + i]);
    store_codes(block.exp_avg + first * kWidth, codes);
    const auto of_unsigned = [&](const I* numbers, F* values) { unsigned_thresholds(tables, numbers, values); };
    quantize(root + first, root_inverse, kUnsignedLines, of_unsigned, codes);
    for (int i = 0; i < kGroup; ++i) codes[i] = at_least_one_where_positive(codes[i], root[first + i]);
    store_codes(block.exp_avg_sq + first * kWidth, codes);
  }
}

// The last block of a parameter, in arrays of its whole size.
template <class P, class G>
__attribute__((noinline)) void step_part_of_block(const Block<P, G>& block, int n, const Numbers& by,
                                                  const Tables& tables) {
  P param[kBlock] = {};
  G grad[kBlock] = {};
  uint8_t exp_avg[kBlock] = {}, exp_avg_sq[kBlock] = {};
  memcpy(param, block.param, n * sizeof(P));
  memcpy(grad, block.grad, n * sizeof(G));
  memcpy(exp_avg, block.exp_avg, n);
  memcpy(exp_avg_sq, block.exp_avg_sq, n);
  step_block<P, G>({param, grad, exp_avg, exp_avg_sq, block.exp_avg_scale, block.exp_avg_sq_scale}, n, by, tables);
  memcpy(block.param, param, n * sizeof(P));
  memcpy(block.exp_avg, exp_avg, n);
  memcpy(block.exp_avg_sq, exp_avg_sq, n);
}

template <class T>
ONETRIP_INLINE T* address(int64_t base, int64_t index) {
  return reinterpret_cast<T*>(base) + index;
}

template <class P, class G>
void step_8bit_chunks(const AdamStep& args, const AdamChunk* chunks, int64_t n_chunks, const Tables& tables) {
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const Numbers by(args.scalars[tensor.counter]);
    const int64_t end = smaller(chunk->first + kAdamChunk, tensor.numel);
    for (int64_t first = chunk->first; first < end; first += kBlock) {
      const Block<P, G> block = {address<P>(tensor.param, first),
                                 address<const G>(tensor.grad, first),
                                 address<uint8_t>(tensor.exp_avg, first),
                                 address<uint8_t>(tensor.exp_avg_sq, first),
                                 address<float>(tensor.exp_avg_scale, first / kBlock),
                                 address<float>(tensor.exp_avg_sq_scale, first / kBlock)};
      if (end - first < kBlock) {
        step_part_of_block(block, static_cast<int>(end - first), by, tables);
      } else {
        step_block(block, kBlock, by, tables);
      }
    }
  }
}

template <class P, class G>
void step_32bit_chunks(const AdamStep& args, const AdamChunk* chunks, int64_t n_chunks, const Tables&) {
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const Numbers by(args.scalars[tensor.counter]);
    P* param = address<P>(tensor.param, 0);
    const G* grad = address<const G>(tensor.grad, 0);
    float *exp_avg = address<float>(tensor.exp_avg, 0), *exp_avg_sq = address<float>(tensor.exp_avg_sq, 0);
    for_columns<2>(chunk->first, smaller(chunk->first + kAdamChunk, tensor.numel), [&](int64_t c, auto lanes, int) {
      const Updated updated = update<false>(load(param + c, lanes), load(grad + c, lanes), load(exp_avg + c, lanes),
                                            load(exp_avg_sq + c, lanes), by);
      store_rounded(param + c, updated.p, lanes);
      store(exp_avg + c, updated.m, lanes);
      store(exp_avg_sq + c, updated.v, lanes);
    });
  }
}

}  // namespace

int adam_step(const AdamStep& args) {
  constexpr int64_t kMostChunks = 16;  // of a task: 1 MiB of float32 with 8-bit states
  const Tables tables;
  for (const AdamKind* kind = args.kinds; kind < args.kinds + args.n_kinds; ++kind) {
    const auto step_chunks = with_type(kind->param_dtype, [&](auto param) {
      return with_type(kind->grad_dtype, [&](auto grad) {
        using P = decltype(param);
        using G = decltype(grad);
        return kind->is_8bit ? &step_8bit_chunks<P, G> : &step_32bit_chunks<P, G>;
      });
    });
    const AdamChunk* chunks = args.chunks + kind->first_chunk;
    const int64_t per_task = clamp(kind->n_chunks / (8 * thread_count()), 1, kMostChunks);
    const int64_t n_tasks = (kind->n_chunks + per_task - 1) / per_task;
    const int error = run_tasks(n_tasks, kind->n_chunks * kAdamChunk, 16, [&](int64_t task, float*) {
      const int64_t first = task * per_task;
      step_chunks(args, chunks + first, smaller(per_task, kind->n_chunks - first), tables);
    });
    if (error) return error;
  }
  return 0;
}

}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
