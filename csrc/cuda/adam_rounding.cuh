// How Adam keeps the part of an update that a 16-bit parameter cannot hold (AdamRounding of launch.h). The arithmetic
// is that of python_pkg/onetrip/reference/rounding.py.
//
// A master weight is a parameter and its residual. A thread has 8 of each, two in a word; residuals of 8 bits are the
// upper bytes of 16 bits, so that all are in units of 2^-16 of the parameter's last place.
#pragma once
#include "../common/philox.h"
#include "adam_tables.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

constexpr int kPairs = kChunkColumns / 2;
constexpr uint32_t kLowerHalves = 0x5410, kUpperHalves = 0x7632;  // of two words: __byte_perm

// Where residuals lie, or the index of the first random bits. Nothing where parameters are rounded to nearest.
template <bool kOtherRounding>
struct RestPlace {
  __device__ __forceinline__ RestPlace(const AdamTensor&, int64_t, AdamRounding) {}
  __device__ __forceinline__ void hold() {}
  __device__ __forceinline__ void advance() {}
};
template <>
struct RestPlace<true> {
  AdamRounding rounding;
  uint64_t place;  // an address, or the index
  uint64_t key;    // of the random bits

  __device__ __forceinline__ RestPlace(const AdamTensor& tensor, int64_t first, AdamRounding how)
      : rounding(how), place(static_cast<uint64_t>(tensor.residual)), key(static_cast<uint64_t>(tensor.key)) {
    place += static_cast<uint64_t>(first) * step();
  }
  // In registers of the warp, whose place this is.
  __device__ __forceinline__ void hold() { place = uniform(place), key = uniform(key); }
  // To the same place of the next chunk.
  __device__ __forceinline__ void advance() { place += kAdamChunk * step(); }
  // global_pointer() of platform.cuh is not enough: what it assumes is lost.
  template <typename T>
  __device__ __forceinline__ T* address() const {
    return static_cast<T*>(__cvta_global_to_generic(place));
  }
  // So many elements after it.
  __device__ __forceinline__ RestPlace after(int elements) const {
    RestPlace other = *this;
    other.place += static_cast<uint64_t>(elements) * step();
    return other;
  }

 private:
  __device__ __forceinline__ unsigned step() const { return rounding == AdamRounding::kResidual16 ? 2 : 1; }
  __device__ __forceinline__ static uint64_t uniform(uint64_t value) {
    return static_cast<uint64_t>(uniform_register(static_cast<uint32_t>(value >> 32))) << 32 |
           uniform_register(static_cast<uint32_t>(value));
  }
};

// The place of a thread. kOfWarp: given is that of its warp.
template <bool kOfWarp, bool kApart>
__device__ __forceinline__ RestPlace<true> place_of_thread(const RestPlace<true>& rest) {
  return kOfWarp ? rest.after(first_column<kApart>(static_cast<int>(threadIdx.x % kWarpThreads))) : rest;
}

// Whether residuals can be read and written 8 at once.
__device__ __forceinline__ bool residuals_aligned(const AdamTensor& tensor, AdamRounding rounding) {
  if (rounding == AdamRounding::kStochastic) return true;
  const uint32_t bytes = rounding == AdamRounding::kResidual16 ? 16 : 8;
  return (static_cast<uint32_t>(tensor.residual) & (bytes - 1)) == 0;
}

// The words of 8 residuals as they lie in memory; those of 8 bits take the first two.
template <bool kApart>
__device__ __forceinline__ void load_residuals(uint32_t (&words)[kPairs], const RestPlace<true>& rest,
                                               bool vector_access, int valid) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) words[i] = 0;  // left unset, they would hold registers through the loop around
  if (rest.rounding == AdamRounding::kResidual16) {
    load_words<2, kChunkColumns, false, kApart>(words, rest.template address<uint16_t>(), vector_access, valid);
  } else if (rest.rounding == AdamRounding::kResidual8) {
    uint32_t bytes[kPairs / 2];
    load_words<1, kChunkColumns, false, kApart>(bytes, rest.template address<uint8_t>(), vector_access, valid);
    words[0] = bytes[0], words[1] = bytes[1];
  }
}

// 2^e where the last place of a float16 number is 2^(e - 10); e is -14 of subnormal numbers.
__device__ __forceinline__ float power_of(float weight) {
  return __uint_as_float(__float_as_uint(fminf(fmaxf(fabsf(weight), 6.103515625e-05f), 65504.0f)) & 0x7F800000u);
}

template <bool kExact>
__device__ __forceinline__ float2 join_pair(uint32_t weights, uint32_t residuals, __half) {
  const float2 weight = unpack_pair(weights, __half{});
  const auto joined = [&](float w, uint32_t selector) {  // 2^-3 + (residual + 2^15) * 2^-26
    const float offset = __uint_as_float(__byte_perm(residuals ^ 0x80008000u, 0x3E00, selector));
    return __fadd_rn(w, __fmul_rn(__fadd_rn(offset, -0.12548828125f), power_of(w)));
  };
  return make_float2(joined(weight.x, 0x5410), joined(weight.y, 0x5432));
}

// kExact: a residual that would change the sign counts as 0; else it makes a NaN.
template <bool kExact>
__device__ __forceinline__ float2 join_pair(uint32_t weights, uint32_t residuals, __nv_bfloat16) {
  const auto joined = [&](uint32_t upper, uint32_t selector) {
    const uint32_t bits = __byte_perm(residuals ^ 0x80008000u, weights, selector) - 0x8000u;
    return __uint_as_float(kExact && static_cast<int>(bits ^ upper) < 0 ? upper : bits);
  };
  return make_float2(joined(weights << 16, kLowerHalves), joined(weights & 0xFFFF0000u, kUpperHalves));
}

// The master weights; of stochastic rounding the weights themselves.
template <bool kExact, typename P>
__device__ __forceinline__ void join(const Chunk<P, kChunkColumns>& weights, const uint32_t (&words)[kPairs],
                                     AdamRounding rounding, float (&value)[kChunkColumns]) {
  if (rounding == AdamRounding::kStochastic) return unpack(weights, value);
  uint32_t residuals[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) residuals[i] = words[i];
  if (rounding == AdamRounding::kResidual8) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) residuals[i] = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const float2 pair = join_pair<kExact>(weights.word[i], residuals[i], P{});
    value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
  }
}

constexpr uint32_t kInfinityBits = 0x7F800000u, kTooLargeBits = 0x7F7F8000u;  // the least that rounds to infinity

// Whether each rounds to a finite bfloat16. Bits are rounded as integers, which is wrong for NaN.
__device__ __forceinline__ bool all_finite(const float (&value)[kChunkColumns]) {
  bool finite = true;
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) finite = finite && fabsf(value[j]) < __uint_as_float(kTooLargeBits);
  return finite;
}

// Values that do not become infinities, or NaNs whose bits may be rounded.
__device__ __forceinline__ void settle_infinite(float (&value)[kChunkColumns], AdamRounding rounding) {
  const uint32_t least = rounding == AdamRounding::kStochastic ? kInfinityBits : kTooLargeBits;
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) {
    const uint32_t bits = __float_as_uint(value[j]), magnitude = bits & 0x7FFFFFFFu;
    const uint32_t settled = magnitude > kInfinityBits ? 0x7FC00000u : (bits & 0x80000000u) | kInfinityBits;
    if (magnitude >= least) value[j] = __uint_as_float(settled);
  }
}

// Random bits of a chunk's 8 elements. Neighbours whose halves are apart share two groups of 8: each draws one, and
// gives the other its half; all lanes of the warp must come here.
template <bool kApart>
__device__ __forceinline__ PhiloxBlock random_of_chunk(const RestPlace<true>& rest, float step) {
  const auto offset = static_cast<uint64_t>(step);
  const uint64_t group = rest.place / kPhiloxElements;
  if constexpr (!kApart) return philox(rest.key, offset, group);
  const bool is_second = threadIdx.x % 2 != 0;
  PhiloxBlock block = philox(rest.key, offset, group + (is_second ? kHalfStep<true> / kPhiloxElements : 0));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, is_second ? block.word[i] : block.word[i + 2], 1);
    (is_second ? block.word[i] : block.word[i + 2]) = other;
  }
  return block;
}

// Byte kByte of each of 8 words.
template <int kByte>
__device__ __forceinline__ void pack_residuals(uint32_t (&words)[2], const uint32_t (&bits)[kChunkColumns]) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    words[i] = pack_bytes<kByte>(bits[4 * i], bits[4 * i + 1], bits[4 * i + 2], bits[4 * i + 3]);
}

template <bool kApart>
__device__ __forceinline__ void store_residuals(const RestPlace<true>& rest, const uint32_t (&words)[2],
                                                bool vector_access, int valid) {
  store_words<1, kChunkColumns, kApart>(rest.template address<uint8_t>(), words, vector_access, valid);
}

// The lower halves of 8 words.
template <bool kApart>
__device__ __forceinline__ void store_residuals(const RestPlace<true>& rest, const uint32_t (&bits)[kChunkColumns],
                                                bool vector_access, int valid) {
  uint32_t words[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) words[i] = __byte_perm(bits[2 * i], bits[2 * i + 1], kLowerHalves);
  store_words<2, kChunkColumns, kApart>(rest.template address<uint16_t>(), words, vector_access, valid);
}

// Stores master weights in two parts. step: of random bits.
template <bool kApart>
__device__ __forceinline__ void store_masters(__half* param, const RestPlace<true>& rest, float,
                                              const float (&value)[kChunkColumns], bool vector_access, int valid) {
  Chunk<__half, kChunkColumns> weights;
  float weight[kChunkColumns];
  pack(weights, value);
  store_chunk<kApart>(param, 0, weights, vector_access, valid);
  unpack(weights, weight);
  const bool is_8bit = rest.rounding == AdamRounding::kResidual8;
  // 1.5 * 2^23 more, a number has its nearest integer in its lower bits; 1.5 * 2^31 more, its nearest multiple of 256.
  const float large = is_8bit ? 3221225472.0f : 12582912.0f, most = large + (is_8bit ? 32512.0f : 32767.0f);
  uint32_t bits[kChunkColumns];
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) {
    const float scale = __uint_as_float(0x8C000000u - __float_as_uint(power_of(weight[j])));  // 2^(26 - e)
    const float residual = __fmul_rn(__fadd_rn(value[j], -weight[j]), scale);
    bits[j] = __float_as_uint(fminf(__fadd_rn(residual, large), most));
    if (!(fabsf(weight[j]) <= 65504.0f)) bits[j] = 0;
  }
  if (is_8bit) {
    uint32_t words[2];
    pack_residuals<0>(words, bits);
    store_residuals<kApart>(rest, words, vector_access, valid);
  } else {
    store_residuals<kApart>(rest, bits, vector_access, valid);
  }
}

// The same, or rounds stochastically. Values are finite or settled.
template <bool kApart>
__device__ __forceinline__ void store_masters(__nv_bfloat16* param, const RestPlace<true>& rest, float step,
                                              const float (&value)[kChunkColumns], bool vector_access, int valid) {
  uint32_t bits[kChunkColumns], sum[kChunkColumns];
  const bool is_stochastic = rest.rounding == AdamRounding::kStochastic;
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) bits[j] = __float_as_uint(value[j]), sum[j] = bits[j] + 0x8000u;
  if (is_stochastic) {
    const PhiloxBlock random = random_of_chunk<kApart>(rest, step);
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) {
      sum[j] = bits[j] + (j % 2 == 0 ? random.word[j / 2] & 0xFFFFu : random.word[j / 2] >> 16);
    }
  }
  Chunk<__nv_bfloat16, kChunkColumns> weights;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) weights.word[i] = __byte_perm(sum[2 * i], sum[2 * i + 1], kUpperHalves);
  store_chunk<kApart>(param, 0, weights, vector_access, valid);
  if (rest.rounding == AdamRounding::kResidual16) {
    store_residuals<kApart>(rest, bits, vector_access, valid);
  } else if (!is_stochastic) {
    uint32_t words[2];
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) bits[j] = min((sum[j] & 0xFFFFu) + 0x80u, 0xFFFFu);
    pack_residuals<1>(words, bits);
    words[0] ^= 0x80808080u, words[1] ^= 0x80808080u;
    store_residuals<kApart>(rest, words, vector_access, valid);
  }
}

}  // namespace onetrip
