// What forward and backward of row_norm share: how a row is cut into chunks, and the dropout mask.
#pragma once
#include "../common/philox.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// Columns a chunk: 16 bytes of a 16-bit type, two accesses of 16 bytes of float32. A row's chunks go to its threads in
// turn, so that a warp touches consecutive addresses; a multiple of 4, so that one Philox call serves 4 columns of the
// same thread. (4 columns for float32 alone were tried: twice the addresses, and registers spilled.)
constexpr int kChunkColumns = 8;

// A row's statistics are means over n_cols; a row wider than 2^24 would be the first that float cannot count exactly.
__device__ __forceinline__ float mean_of(float sum, int64_t n_cols) { return sum / static_cast<float>(n_cols); }

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

 private:
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

  const volatile DropoutState* shared_;
  bool on_;
};

}  // namespace onetrip
