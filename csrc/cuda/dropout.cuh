// The dropout mask of common/philox.h, drawn chunk by chunk.
#pragma once
#include "../common/philox.h"
#include "../launch.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// What waits in shared memory and is read again for every chunk: in registers it would take twenty that the row needs.
struct alignas(16) DropoutState {
  uint64_t offset, key[kPhiloxRounds];  // the first key is the seed; read in pairs
  uint32_t last_dropped;  // an element is dropped if its random bits, above any 16 others, are at most this
  float scale;
};

class DropoutMask {
 public:
  // shared: one a block. Every thread of the block must come here.
  __device__ DropoutMask(const Dropout& dropout, DropoutState* shared) : shared_(shared), on_(dropout.threshold != 0) {
    if (!on_) return;
    const int round = static_cast<int>(threadIdx.x);
    if (round < kPhiloxRounds) {
      const uint64_t seed = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[0]) : dropout.seed;
      shared->key[round] = philox_key(seed, round);
    }
    if (round == 0) {
      shared->offset = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[1]) : dropout.offset;
      shared->last_dropped = (dropout.threshold << 16) - 1;  // all ones where p = 1
      shared->scale = dropout.scale;
    }
    __syncthreads();
  }

  // value[i] of element i of the chunk that begins with element `first` becomes value * scale, or exactly 0 (whatever
  // it was) where it is dropped. aligned: the row begins with a multiple of 8; if so, and where halves are apart, all
  // lanes of the warp must come here.
  template <bool kApart>
  __device__ __forceinline__ void apply(float (&value)[kPhiloxElements], int64_t first, bool aligned) const {
    if (!on_) return;
    if (aligned && !kApart) {
      const float scale = shared_->scale;
      PhiloxBlock random = draw(static_cast<uint64_t>(first) / kPhiloxElements);
      const uint32_t last_dropped = shared_->last_dropped;
#pragma unroll
      for (int i = 0; i < kPhiloxElements; ++i)
        value[i] = value_or_zero(__fmul_rn(value[i], scale), random_bits(random, i) > last_dropped);
      return;
    }
    uint32_t kept;
    if (kApart && aligned) {
      kept = exchanged_halves(static_cast<uint64_t>(first));
    } else {
      kept = kept_columns<kApart>(static_cast<uint64_t>(first), false);
    }
    const float scale = shared_->scale;
#pragma unroll
    for (int i = 0; i < kPhiloxElements; ++i)
      value[i] = value_or_zero(__fmul_rn(value[i], scale), (kept >> i & 1u) != 0);
  }

  __device__ __forceinline__ bool on() const { return on_; }
  __device__ __forceinline__ float scale() const { return shared_->scale; }

  // Bit i says whether element first + i is kept, for i < 8. aligned: first is a multiple of 8.
  __device__ __forceinline__ uint32_t kept_bits(uint64_t first, bool aligned) const {
    const uint64_t group = first / kPhiloxElements;
    if (aligned) return kept_of_group(group);
    const uint32_t shift = static_cast<uint32_t>(first % kPhiloxElements);
    uint32_t bits = 0;
    // Two groups where the chunk begins inside one.
#pragma unroll 1
    for (int g = 0; g < (shift != 0 ? 2 : 1); ++g) bits |= kept_of_group(group + g) << (kPhiloxElements * g);
    return bits >> shift;
  }

  // The same of element i of the chunk that begins with element `first`. aligned: the row begins with a multiple of 8.
  // A chunk whose halves are apart takes half of each of two Philox calls: lanes may be missing for an exchange.
  template <bool kApart>
  __device__ __forceinline__ uint32_t kept_columns(uint64_t first, bool aligned) const {
    if constexpr (kApart) {
      constexpr uint32_t kHalf = (1u << kHalfColumns) - 1;
      uint32_t bits = 0;
      if (aligned) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint64_t from = first + half * kHalfStep<kApart>;
          bits |= (kept_of_group(from / kPhiloxElements) >> from % kPhiloxElements & kHalf) << half * kHalfColumns;
        }
      } else {
#pragma unroll 1
        for (int half = 0; half < 2; ++half)
          bits |= (kept_bits(first + half * kHalfStep<kApart>, false) & kHalf) << half * kHalfColumns;
      }
      return bits;
    } else {
      return kept_bits(first, aligned);
    }
  }

 private:
  // kept_columns<true>() of aligned chunks, by all lanes of the warp. Two neighbours share two Philox calls: each makes
  // one, and gives the other its half.
  __device__ __forceinline__ uint32_t exchanged_halves(uint64_t first) const {
    const bool is_second = threadIdx.x % 2 != 0;
    const uint32_t kept = kept_of_group(first / kPhiloxElements + (is_second ? kHalfStep<true> / kPhiloxElements : 0));
    const uint32_t other = __shfl_xor_sync(kFullWarp, kept, 1);
    constexpr uint32_t kHalf = (1u << kHalfColumns) - 1;
    return is_second ? (kept & ~kHalf) | other >> kHalfColumns : (kept & kHalf) | (other & kHalf) << kHalfColumns;
  }

  __device__ __forceinline__ PhiloxBlock draw(uint64_t group) const {
    static_assert(kPhiloxRounds % 2 == 1, "the offset and the keys make pairs");
    uint64_t offset, key, next_key;
    read_again(offset, key, &shared_->offset);
    PhiloxBlock random = philox_counter(offset, group);
    philox_round(random, key);
#pragma unroll
    for (int round = 1; round < kPhiloxRounds; round += 2) {
      read_again(key, next_key, &shared_->key[round]);
      philox_round(random, key);
      philox_round(random, next_key);
    }
    return random;
  }

  __device__ __forceinline__ uint32_t kept_of_group(uint64_t group) const {
    // Not const: under -fsanitize=bounds GCC 12 reads wrong values from a const array.
    PhiloxBlock random = draw(group);
    const uint32_t last_dropped = shared_->last_dropped;
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kPhiloxElements; ++i) bits |= random_bits(random, i) > last_dropped ? 1u << i : 0u;
    return bits;
  }

  const volatile DropoutState* shared_;
  bool on_;
};

}  // namespace onetrip
