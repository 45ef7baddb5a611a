// What forward and backward of row_norm share: how a row is cut into chunks, and the dropout mask.
#pragma once
#include "../common/philox.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// Columns a chunk: 16 bytes of the narrower of the two types, x and z. A row's chunks go to its threads in turn, so
// that a warp touches consecutive addresses; a multiple of 4, so that one Philox call serves 4 columns of the same
// thread.
template <typename X, typename Z>
constexpr int kChunkColumns = 16 / (sizeof(X) < sizeof(Z) ? sizeof(X) : sizeof(Z));

// A row's statistics are means over n_cols; a row wider than 2^24 would be the first that float cannot count exactly.
__device__ __forceinline__ float mean_of(float sum, int64_t n_cols) { return sum / static_cast<float>(n_cols); }

class DropoutMask {
 public:
  __device__ explicit DropoutMask(const Dropout& dropout)
      : threshold_(dropout.threshold),
        seed_(dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[0]) : dropout.seed),
        offset_(dropout.state != nullptr ? static_cast<uint64_t>(dropout.state[1]) : dropout.offset),
        scale_(dropout.scale) {}

  // value[i] of element first + i becomes value * scale, or exactly 0 (whatever it was) where it is dropped.
  template <int N>
  __device__ __forceinline__ void apply(float (&value)[N], int64_t first) const {
    if (threshold_ == 0) return;
    const uint32_t kept = kept_bits<N>(static_cast<uint64_t>(first));
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = (kept >> i & 1u) != 0 ? __fmul_rn(value[i], scale_) : 0.0f;
  }

 private:
  __device__ __forceinline__ uint32_t kept_bits_of_group(uint64_t group) const {
    const PhiloxBlock random = philox(seed_, offset_, group);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= (random.word[i] >= threshold_ ? 1u : 0u) << i;
    return bits;
  }

  // Bit i says whether element first + i is kept.
  template <int N>
  __device__ __forceinline__ uint32_t kept_bits(uint64_t first) const {
    const uint64_t group = first / 4;
    const uint32_t shift = static_cast<uint32_t>(first % 4);
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) bits |= kept_bits_of_group(group + i) << (4 * i);
    if (shift != 0) bits |= kept_bits_of_group(group + N / 4) << N;  // rows that start inside a group of 4
    return bits >> shift;
  }

  uint64_t threshold_, seed_, offset_;
  float scale_;
};

}  // namespace onetrip
