// Chunks of consecutive elements, or of two halves 32 columns apart (kApart): 128-bit accesses where the addresses
// allow (64-bit ones of 16-bit halves), element by element where they do not.
//
// A chunk keeps its elements as they lie in memory (two 16-bit values a register), so that a row waits in half the
// registers and loads can all be in flight before the first conversion. Whether an access is vectorised is a run-time
// choice that never moves an element of a row to another thread: the results are the same bits either way, where the
// same kernel takes the row (clusters take aligned rows only).
#pragma once
#include "../launch.h"
#include "platform.cuh"

namespace onetrip {

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<__half> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr DType value = DType::kBFloat16;
};

__host__ __device__ constexpr int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Columns a chunk: as many as one Philox call serves. A row's chunks go to its threads in turn, so that a warp touches
// consecutive addresses. A thread's 8 columns are consecutive: 16 bytes of a 16-bit type. Those of a float32 row would
// be two accesses of 16 bytes, 32 bytes from lane to lane: half of every sector twice. So where its halves are apart
// (kApart) 8 threads share 64 columns, two lines of 128 bytes: thread j of 8 has 4 columns from 4 j on and 4 from
// 32 + 4 j on. One address serves both. (Chunks of 4 columns for float32 were tried: registers spilled.)
constexpr int kChunkColumns = 8, kHalfColumns = kChunkColumns / 2;
constexpr int kSharingThreads = 8;
template <typename T>
constexpr bool kHalvesApart = sizeof(T) == 4;
template <bool kApart>
constexpr int kHalfStep = kApart ? kSharingThreads * kHalfColumns : kHalfColumns;  // from half to half of a chunk

// The first column of a thread's chunk.
template <bool kApart>
__device__ __forceinline__ int first_column(int thread) {
  if (!kApart) return thread * kChunkColumns;
  const int in_line = thread & (kSharingThreads - 1);
  return (thread - in_line) * kChunkColumns + in_line * kHalfColumns;
}

// Element i of a chunk is so many columns after its first.
template <bool kApart>
__host__ __device__ constexpr int column_of(int i) {
  return i / kHalfColumns * kHalfStep<kApart> + i % kHalfColumns;
}

// Which thread's chunk has a column, and as which element.
struct ChunkPlace {
  unsigned thread, element;
};
template <bool kApart>
__device__ __forceinline__ ChunkPlace place_of_column(unsigned col) {
  constexpr unsigned kThreads = kApart ? kSharingThreads : 1, kStep = kHalfStep<kApart>;
  return {col / (2 * kStep) * kThreads + col % kStep / kHalfColumns,
          col / kStep % 2 * kHalfColumns + col % kHalfColumns};
}

template <typename T, int N>
struct Chunk {
  static constexpr int kWords = N * static_cast<int>(sizeof(T)) / 4;
  uint32_t word[kWords];
};

// How many elements of the chunk from col on belong to the row: always its first ones. With vector access whole
// vectors, the last of which may pass n_cols. Col: int for rows in registers, int64_t for any.
template <bool kApart, typename Col>
__device__ __forceinline__ int valid_columns(Col col, Col n_cols, bool vector_access) {
  const Col left = n_cols - col;
  if constexpr (kApart) {
    constexpr int kStep = kHalfStep<kApart>;
    if (vector_access) return left > kStep ? kChunkColumns : left > 0 ? kHalfColumns : 0;
    const Col first = left >= kHalfColumns ? kHalfColumns : left > 0 ? left : 0;
    const Col second = left - kStep >= kHalfColumns ? kHalfColumns : left > kStep ? left - kStep : 0;
    return static_cast<int>(first + second);
  }
  if (vector_access) return left > 0 ? kChunkColumns : 0;
  return left >= kChunkColumns ? kChunkColumns : left > 0 ? static_cast<int>(left) : 0;
}

// Whether element i of a chunk belongs to the row.
template <bool kApart>
__device__ __forceinline__ bool inside(int i, int valid, bool vector_access) {
  return vector_access ? valid > (kApart ? i / kHalfColumns * kHalfColumns : 0) : i < valid;
}

// The unsigned integer of so many bytes.
template <int kBytes>
struct UintOf {
  using Type = uint32_t;
};
template <>
struct UintOf<2> {
  using Type = uint16_t;
};
template <>
struct UintOf<1> {
  using Type = uint8_t;
};

template <typename T, int N>
__device__ __forceinline__ void compiler_barrier(Chunk<T, N>& chunk) {
#pragma unroll
  for (int i = 0; i < Chunk<T, N>::kWords; ++i) compiler_barrier(chunk.word[i]);
}

// kConstant: nobody writes this memory while the kernel runs, so the load may pass earlier stores (ld.global.nc).
template <bool kConstant, typename T>
__device__ __forceinline__ T load_one(const T* address) {
  return kConstant ? __ldg(address) : *address;
}

// kWords words at once.
template <int kWords>
struct VectorOf {
  using Type = uint4;
};
template <>
struct VectorOf<2> {
  using Type = uint2;
};
template <>
struct VectorOf<1> {
  using Type = uint32_t;
};

// kBytes is the size of one element, 1, 2 or 4. Elements from `valid` on read as zero bits.
template <int kBytes, int N, bool kConstant, bool kApart>
__device__ __forceinline__ void load_words(uint32_t (&word)[N * kBytes / 4], const void* address, bool vector_access,
                                           int valid) {
  using Bits = typename UintOf<kBytes>::Type;
  constexpr int kWords = N * kBytes / 4, kPerWord = 4 / kBytes;
#pragma unroll
  for (int i = 0; i < kWords; ++i) word[i] = 0;
  if (vector_access) {
    if constexpr (kApart) {
      using Vector = typename VectorOf<kWords / 2>::Type;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (valid <= half * kHalfColumns) continue;
        const auto* const from = static_cast<const Bits*>(address) + half * kHalfStep<kApart>;
        const Vector vector = load_one<kConstant>(reinterpret_cast<const Vector*>(from));
        memcpy(&word[half * kWords / 2], &vector, sizeof vector);
      }
    } else if (valid > 0) {
      if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
          const uint4 v = load_one<kConstant>(static_cast<const uint4*>(address) + i / 4);
          word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
        }
      } else {
        static_assert(kWords == 2, "8 bytes");
        const uint2 v = load_one<kConstant>(static_cast<const uint2*>(address));
        word[0] = v.x, word[1] = v.y;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < valid) {
        const Bits* const from = static_cast<const Bits*>(address) + column_of<kApart>(i);
        word[i / kPerWord] |= static_cast<uint32_t>(load_one<kConstant>(from)) << (i % kPerWord * 8 * kBytes);
      }
    }
  }
}

template <int kBytes, int N, bool kApart>
__device__ __forceinline__ void store_words(void* address, const uint32_t (&word)[N * kBytes / 4], bool vector_access,
                                            int valid) {
  using Bits = typename UintOf<kBytes>::Type;
  constexpr int kWords = N * kBytes / 4, kPerWord = 4 / kBytes;
  if (vector_access) {
    if constexpr (kApart) {
      using Vector = typename VectorOf<kWords / 2>::Type;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (valid <= half * kHalfColumns) continue;
        Vector vector;
        memcpy(&vector, &word[half * kWords / 2], sizeof vector);
        *reinterpret_cast<Vector*>(static_cast<Bits*>(address) + half * kHalfStep<kApart>) = vector;
      }
    } else if (valid > 0) {
      if constexpr (kWords % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
          static_cast<uint4*>(address)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
        }
      } else {
        *static_cast<uint2*>(address) = make_uint2(word[0], word[1]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < valid) {
        static_cast<Bits*>(address)[column_of<kApart>(i)] =
            static_cast<Bits>(word[i / kPerWord] >> (i % kPerWord * 8 * kBytes));
      }
    }
  }
}

template <bool kApart, bool kConstant = true, typename T, int N>
__device__ __forceinline__ void load_chunk(Chunk<T, N>& chunk, const void* base, int64_t index, bool vector_access,
                                           int valid) {
  load_words<sizeof(T), N, kConstant, kApart>(chunk.word, static_cast<const T*>(base) + index, vector_access, valid);
}

template <bool kApart, typename T, int N>
__device__ __forceinline__ void store_chunk(void* base, int64_t index, const Chunk<T, N>& chunk, bool vector_access,
                                            int valid) {
  store_words<sizeof(T), N, kApart>(static_cast<T*>(base) + index, chunk.word, vector_access, valid);
}

__device__ __forceinline__ float2 unpack_pair(uint32_t word, __half) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &word, sizeof pair);
  return __half22float2(pair);
}

// A bfloat16 is the upper half of a float32: no bfloat16 arithmetic, which sm_70 and sm_75 lack.
__device__ __forceinline__ float2 unpack_pair(uint32_t word, __nv_bfloat16) {
  return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u));
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t word;
  memcpy(&word, &pair, sizeof word);
  return word;
}

template <typename T, int N>
__device__ __forceinline__ void unpack_words(const uint32_t* word, float (&value)[N]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = __uint_as_float(word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 pair = unpack_pair(word[i / 2], T{});
      value[i] = pair.x, value[i + 1] = pair.y;
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void unpack(const Chunk<T, N>& chunk, float (&value)[N]) {
  unpack_words<T, N>(chunk.word, value);
}

// Rounds to nearest even.
template <typename T, int N>
__device__ __forceinline__ void pack(Chunk<T, N>& chunk, const float (&value)[N]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < N; ++i) chunk.word[i] = __float_as_uint(value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 2) chunk.word[i / 2] = pack_pair(value[i], value[i + 1], T{});
  }
}

// N elements of a tensor whose dtype is known only at run time (parameters, y and its gradient): uniform branches,
// taken once a chunk. A 16-bit chunk fills the first half of the words.
template <int N>
struct AnyChunk {
  uint32_t word[N];
};

template <bool kApart, bool kConstant = true, int N>
__device__ __forceinline__ void load_chunk(AnyChunk<N>& chunk, const void* base, DType dtype, int64_t index,
                                           bool vector_access, int valid) {
  if (dtype == DType::kFloat32) {
    load_words<4, N, kConstant, kApart>(chunk.word, static_cast<const uint32_t*>(base) + index, vector_access, valid);
  } else {
    Chunk<__half, N> half;
    load_chunk<kApart, kConstant>(half, base, index, vector_access, valid);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) chunk.word[i] = half.word[i];
#pragma unroll
    for (int i = N / 2; i < N; ++i) chunk.word[i] = 0;  // left unset, they would hold registers through the loop around
  }
}

template <int N>
__device__ __forceinline__ void unpack(const AnyChunk<N>& chunk, DType dtype, float (&value)[N]) {
  if (dtype == DType::kFloat32) {
    unpack_words<float, N>(chunk.word, value);
  } else if (dtype == DType::kFloat16) {
    unpack_words<__half, N>(chunk.word, value);
  } else {
    unpack_words<__nv_bfloat16, N>(chunk.word, value);
  }
}

template <bool kApart, int N>
__device__ __forceinline__ void load_values(float (&value)[N], const void* base, DType dtype, int64_t index,
                                            bool vector_access, int valid) {
  // An ordinary load: one that could pass the stores of earlier chunks would, and wait in registers for its turn.
  AnyChunk<N> chunk;
  load_chunk<kApart, false>(chunk, base, dtype, index, vector_access, valid);
  unpack(chunk, dtype, value);
}

__device__ __forceinline__ float load_parameter(const void* base, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(base)[index];
  if (dtype == DType::kFloat16) return __half2float(static_cast<const __half*>(base)[index]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(base)[index]);
}

template <typename T, bool kApart, int N>
__device__ __forceinline__ void store_rounded(void* base, int64_t index, const float (&value)[N], bool vector_access,
                                              int valid) {
  Chunk<T, N> chunk;
  pack(chunk, value);
  store_chunk<kApart>(base, index, chunk, vector_access, valid);
}

template <bool kApart, int N>
__device__ __forceinline__ void store_values(void* base, DType dtype, int64_t index, const float (&value)[N],
                                             bool vector_access, int valid) {
  if (dtype == DType::kFloat32) {
    store_rounded<float, kApart>(base, index, value, vector_access, valid);
  } else if (dtype == DType::kFloat16) {
    store_rounded<__half, kApart>(base, index, value, vector_access, valid);
  } else {
    store_rounded<__nv_bfloat16, kApart>(base, index, value, vector_access, valid);
  }
}

template <typename T, int N>
__device__ __forceinline__ void round_through(float (&value)[N]) {
  Chunk<T, N> chunk;
  pack(chunk, value);
  unpack(chunk, value);
}

// value = float32(dtype(value)).
template <int N>
__device__ __forceinline__ void round_values(float (&value)[N], DType dtype) {
  if (dtype == DType::kFloat16) {
    round_through<__half>(value);
  } else if (dtype == DType::kBFloat16) {
    round_through<__nv_bfloat16>(value);
  }
}

}  // namespace onetrip
