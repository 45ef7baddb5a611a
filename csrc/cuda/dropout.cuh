// The dropout mask of common/philox.h, drawn chunk by chunk.
#pragma once
#include "../common/philox.h"
#include "../launch.h"
#include "platform.cuh"

namespace onetrip {

// What waits in shared memory and is read again for every chunk: in registers it would take twenty that the row needs.
struct DropoutState {
  uint64_t key[kPhiloxRounds];  // the first is the seed
  uint64_t offset;
  uint32_t last_dropped;  // an element is dropped if its random bits are at most this
  float scale;
};

class DropoutMask {
 public:
  // shared: one a block. Every thread of the block must come here.
  __device__ DropoutMask(const Dropout& dropout, DropoutState* shared) : shared_(shared), on_(dropout.threshold != 0) {
    if (!on_) return;
    if (threadIdx.x == 0) {
      const uint64_t seed = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[0]) : dropout.seed;
      for (int round = 0; round < kPhiloxRounds; ++round) shared->key[round] = philox_key(seed, round);
      shared->offset = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[1]) : dropout.offset;
      shared->last_dropped = static_cast<uint32_t>(dropout.threshold - 1);
      shared->scale = dropout.scale;
    }
    __syncthreads();
  }

  // value[i] of element first + i becomes value * scale, or exactly 0 (whatever it was) where it is dropped.
  // side_by_side: first is a multiple of N, a power of 2, and there are registers to draw N elements at the same time.
  template <int N>
  __device__ __forceinline__ void apply(float (&value)[N], int64_t first, bool side_by_side) const {
    if (!on_) return;
    const uint32_t kept = kept_bits<N>(static_cast<uint64_t>(first), side_by_side);
    const float scale = shared_->scale;
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = value_or_zero(__fmul_rn(value[i], scale), (kept >> i & 1u) != 0);
  }

  __device__ __forceinline__ bool on() const { return on_; }
  __device__ __forceinline__ float scale() const { return shared_->scale; }

  // Bit i says whether element first + i is kept. side_by_side: as above.
  template <int N>
  __device__ __forceinline__ uint32_t kept_bits(uint64_t first, bool side_by_side) const {
    const uint64_t group = first / 4, offset = shared_->offset;
    const uint32_t last_dropped = shared_->last_dropped;
    uint32_t bits = 0;
    if (side_by_side) {
      static_assert(N % 4 == 0, "whole groups");
      // Not const, here and below: under -fsanitize=bounds GCC 12 reads wrong values from a const array.
      PhiloxBlock random[N / 4];
#pragma unroll
      for (int g = 0; g < N / 4; ++g) random[g] = philox_counter(offset, group | static_cast<uint64_t>(g));
#pragma unroll
      for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t key = shared_->key[round];
#pragma unroll
        for (int g = 0; g < N / 4; ++g) philox_round(random[g], key);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) bits |= random[i / 4].word[i % 4] > last_dropped ? 1u << i : 0u;
      return bits;
    }
    const uint32_t shift = static_cast<uint32_t>(first % 4);
    const int n_groups = N / 4 + (shift != 0 ? 1 : 0);  // one more where the row starts inside a group of 4
#pragma unroll 1
    for (int g = 0; g < n_groups; ++g) {
      PhiloxBlock random = philox(shared_->key[0], offset, group + g);  // the seed read again, or all keys are held
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= (random.word[i] > last_dropped ? 1u : 0u) << (4 * g + i);
    }
    return bits >> shift;
  }

 private:
  const volatile DropoutState* shared_;
  bool on_;
};

}  // namespace onetrip
