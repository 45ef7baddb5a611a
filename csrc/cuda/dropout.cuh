// The dropout mask of common/philox.h, drawn chunk by chunk.
#pragma once
#include "../common/philox.h"
#include "../launch.h"
#include "platform.cuh"

namespace onetrip {

// The generator's state waits in shared memory and is read again for every chunk: in registers, the state and the ten
// round keys that compilers like to compute ahead would take thirty that the row needs.
struct DropoutState {
  uint64_t threshold, seed, offset;
  float scale;
};

class DropoutMask {
 public:
  // shared: one a block. Every thread of the block must come here.
  __device__ DropoutMask(const Dropout& dropout, DropoutState* shared) : shared_(shared), on_(dropout.threshold != 0) {
    if (!on_) return;
    if (threadIdx.x == 0) {
      shared->threshold = dropout.threshold;
      shared->seed = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[0]) : dropout.seed;
      shared->offset = dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[1]) : dropout.offset;
      shared->scale = dropout.scale;
    }
    __syncthreads();
  }

  // value[i] of element first + i becomes value * scale, or exactly 0 (whatever it was) where it is dropped.
  template <int N>
  __device__ __forceinline__ void apply(float (&value)[N], int64_t first) const {
    if (!on_) return;
    const uint32_t kept = kept_bits<N>(static_cast<uint64_t>(first));
    const float scale = shared_->scale;
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = (kept >> i & 1u) != 0 ? __fmul_rn(value[i], scale) : 0.0f;
  }

  __device__ __forceinline__ bool on() const { return on_; }
  __device__ __forceinline__ float scale() const { return shared_->scale; }

  __device__ __forceinline__ DropoutState state() const {
    return DropoutState{shared_->threshold, shared_->seed, shared_->offset, shared_->scale};
  }

  // Bit i says whether element first + i is kept.
  template <int N>
  __device__ __forceinline__ uint32_t kept_bits(uint64_t first) const {
    const uint64_t group = first / 4;
    const uint32_t shift = static_cast<uint32_t>(first % 4);
    const int n_groups = N / 4 + (shift != 0 ? 1 : 0);  // one more where the row starts inside a group of 4
    const uint64_t threshold = shared_->threshold, seed = shared_->seed, offset = shared_->offset;
    uint32_t bits = 0;
#pragma unroll 1
    for (int g = 0; g < n_groups; ++g) {
      // Not const: under -fsanitize=bounds GCC 12 reads wrong values from a const array.
      PhiloxBlock random = philox(seed, offset, group + g);
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= (random.word[i] >= threshold ? 1u : 0u) << (4 * g + i);
    }
    return bits >> shift;
  }

  // The same where first is a multiple of N: groups are drawn side by side, and so are calls with the same state: they
  // share the keys of their rounds.
  template <int N>
  static __device__ __forceinline__ uint32_t kept_bits_of_whole(const DropoutState& state, uint64_t first) {
    const uint64_t group = first / 4;
    const uint32_t last_dropped = static_cast<uint32_t>(state.threshold - 1);  // of 2^32: all
    uint32_t bits = 0;
#pragma unroll
    for (int g = 0; g < N / 4; ++g) {
      PhiloxBlock random = philox<true>(state.seed, state.offset, group | static_cast<uint64_t>(g));
#pragma unroll
      for (int i = 0; i < 4; ++i) bits |= random.word[i] > last_dropped ? 1u << (4 * g + i) : 0u;
    }
    return bits;
  }

 private:
  const volatile DropoutState* shared_;
  bool on_;
};

}  // namespace onetrip
