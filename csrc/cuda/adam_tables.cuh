// The code maps of common/adam.h as the CUDA kernels look them up, in shared memory.
//
// A magnitude x in [0, 1] finds its code by one look-up and one addition: the 16 upper bits of the float32 number x
// name a bucket of 2^-7 of its power of two, narrow enough to hold one threshold at most. The bucket's word plus the
// bits of x has the code in byte 2: the lower 16 bits carry into it where x has reached the threshold.
#pragma once
#include "../common/adam.h"
#include "platform.cuh"

namespace onetrip {

// The bits of a float32 number in [2^-126, 2), where a compiler must know them.
constexpr uint32_t bits_of(float x) {
  uint32_t exponent = 127;
  double mantissa = x;
  for (; mantissa < 1.0; mantissa *= 2) --exponent;
  return exponent << 23 | static_cast<uint32_t>((mantissa - 1.0) * (1 << 23));
}
constexpr uint32_t kBucketOfOne = bits_of(1.0f) >> 16;

// extra: of make_code_map. zero_code: the code of magnitude 0.
template <int kMagnitudes, int extra, uint32_t zero_code>
struct CodeBuckets {
  static constexpr CodeMap<kMagnitudes> map = make_code_map<kMagnitudes>(extra);
  static constexpr uint32_t kFirst = bits_of(map.threshold[1]) >> 16;  // what lies below has the code of 0
  static constexpr int kCount = kBucketOfOne - kFirst + 1;

  // 0 where some bucket holds two thresholds.
  static constexpr bool fill(uint32_t* word) {
    int q = 0;  // the last magnitude whose threshold lies below the bucket
    for (int i = 0; i < kCount; ++i) {
      const uint32_t bucket = kFirst + i;
      int n_inside = 0;
      uint32_t threshold = 0x10000;  // none
      while (q + n_inside + 1 < kMagnitudes && bits_of(map.threshold[q + n_inside + 1]) >> 16 == bucket) {
        threshold = bits_of(map.threshold[q + ++n_inside]) & 0xFFFFu;
      }
      if (n_inside > 1) return false;
      word[i] = ((zero_code + q) << 16) + (0x10000 - threshold) - (bucket << 16);
      q += n_inside;
    }
    return true;
  }
};
using SignedBuckets = CodeBuckets<kSignedMagnitudes, 0, kSignedZeroCode>;
using UnsignedBuckets = CodeBuckets<kUnsignedMagnitudes, 1, 0>;

struct alignas(16) AdamTables {
  float signed_value[256], unsigned_value[256];  // by code
  uint32_t signed_bucket[SignedBuckets::kCount], unsigned_bucket[UnsignedBuckets::kCount];
  bool complete;
};

constexpr AdamTables make_adam_tables() {
  AdamTables tables{};
  for (int code = 0; code < 256; ++code) {
    const int q = code - kSignedZeroCode;
    tables.signed_value[code] = q < 0 ? -SignedBuckets::map.value[-q] : SignedBuckets::map.value[q];
    tables.unsigned_value[code] = UnsignedBuckets::map.value[code];
  }
  tables.complete = SignedBuckets::fill(tables.signed_bucket) && UnsignedBuckets::fill(tables.unsigned_bucket);
  return tables;
}
__device__ constexpr AdamTables kAdamTables = make_adam_tables();
static_assert(kAdamTables.complete, "a bucket holds two thresholds");

// Copies the tables into the shared memory of a block of kThreads threads, all of which take part.
template <int kThreads>
__device__ __forceinline__ const AdamTables* shared_adam_tables() {
  ONETRIP_SHARED(AdamTables, tables, 1);
  constexpr int kWords = sizeof(AdamTables) / sizeof(uint4);
  for (int i = static_cast<int>(threadIdx.x); i < kWords; i += kThreads) {
    reinterpret_cast<uint4*>(tables)[i] = reinterpret_cast<const uint4*>(&kAdamTables)[i];
  }
  __syncthreads();
  return tables;
}

// Words of AdamTables before each table, and for the buckets those of number kFirst.
constexpr int kSignedValues = 0, kUnsignedValues = 256;
constexpr int kSignedWords = 512 - static_cast<int>(SignedBuckets::kFirst);
constexpr int kUnsignedWords = 512 + SignedBuckets::kCount - static_cast<int>(UnsignedBuckets::kFirst);

// A word with the code of x / scale in byte 2, x * inverse in units of the scale; NaN gets the code of 0.
// kOrdinary: |x| * inverse lies in a bucket.
template <bool kOrdinary>
__device__ __forceinline__ uint32_t signed_code(const SharedWords& tables, float x, float inverse) {
  const float normalized = __fmul_rn(fabsf(x), inverse);
  const float least = __uint_as_float(SignedBuckets::kFirst << 16);  // of its bucket, so of the code of 0
  const uint32_t bits = __float_as_uint(kOrdinary ? normalized : fmaxf(normalized, least));
  int word = static_cast<int>(tables.at_upper_half<kSignedWords>(bits) + bits);
  // Code 127 + q of a magnitude becomes 127 - q; that of q = 128 would be -1.
  constexpr int kMirror = (2 * kSignedZeroCode + 1) << 16;
  if (x < 0.0f) word = kMirror - 1 - word;
  return word < 0 ? 0u : static_cast<uint32_t>(word);
}

// The same for x >= 0: x > 0 gets at least code 1.
template <bool kOrdinary>
__device__ __forceinline__ uint32_t unsigned_code(const SharedWords& tables, float x, float inverse) {
  constexpr float threshold = UnsignedBuckets::map.threshold[1];
  const float least = x > 0.0f ? threshold : __uint_as_float(UnsignedBuckets::kFirst << 16);
  const float normalized = __fmul_rn(x, inverse);
  const uint32_t bits = __float_as_uint(kOrdinary ? normalized : fmaxf(normalized, least));
  return tables.at_upper_half<kUnsignedWords>(bits) + bits;
}

// Byte kByte of each of four words.
template <int kByte>
__device__ __forceinline__ uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t kBytes = (4 + kByte) << 4 | kByte;  // of two words
  return __byte_perm(__byte_perm(a, b, kBytes), __byte_perm(c, d, kBytes), 0x5410);
}

}  // namespace onetrip
