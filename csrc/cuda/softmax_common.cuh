// What forward and backward of softmax share: how threads share a row, and the joins over them.
//
// A row is cut into chunks of 8 columns, which go to its threads in turn. Threads of a row are 1, 2, 4, 8, 16 or 32
// lanes of a warp (of float32 8 at least, which share 64 columns), or several whole warps.
#pragma once
#include "dropout.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

constexpr int kRowsThreads = 128;  // a block of several rows, of a warp each at most
constexpr int kLog2MaxThreads = 10;
static_assert(1 << kLog2MaxThreads == kMaxThreads);

// Chunks a thread, where whole warps hold a row: what 64 registers allow. (4 spilled in 16-bit types too.)
constexpr int kBlockChunks = 2;
static_assert(kBlockChunks * kChunkColumns * kClusterThreads == kClusterColumns, "the launch's");

// Wide blocks an SM that registers must leave room for: half of its threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kWideBlocks = 1;
#else
constexpr int kWideBlocks = 2;
#endif

// The threads of a block, cut into groups of one row each.
struct RowThreads {
  int count;     // threads a row
  int log2_row;  // log2 of count, where it is at most 32; else of as many as a block can have
  int rows;      // rows a block, where a row of several warps has the block for itself

  // Which row this thread works on, and which of the row's threads it is; as above.
  __device__ __forceinline__ int row_of_block() const { return static_cast<int>(threadIdx.x) >> log2_row; }
  __device__ __forceinline__ int64_t row() const {
    return first_row_of_block(1) * static_cast<unsigned>(rows) + row_of_block();
  }
  __device__ __forceinline__ int thread() const { return static_cast<int>(threadIdx.x) & ((1 << log2_row) - 1); }

  // The same where several groups of several warps share a block: a division.
  __device__ __forceinline__ int group() const {
    return count > kWarpThreads ? static_cast<int>(threadIdx.x) / count : row_of_block();
  }
  __device__ __forceinline__ int thread_of_group() const { return static_cast<int>(threadIdx.x) - group() * count; }
};

// Division by a multiplication (Granlund & Montgomery 1994), for numbers below 2^31 and below 2^63.
struct Divisor {
  int64_t divisor;
  uint64_t multiplier;
  uint32_t multiplier_32, shift;

  // Divides n, and returns the remainder.
  __device__ __forceinline__ uint32_t divide(uint32_t& n) const {
    const uint32_t quotient = (__umulhi(n, multiplier_32) + n) >> shift;
    const uint32_t remainder = n - quotient * static_cast<uint32_t>(divisor);
    n = quotient;
    return remainder;
  }
  __device__ __forceinline__ int64_t divide(int64_t& n) const {
    const uint64_t number = static_cast<uint64_t>(n), quotient = (__umul64hi(number, multiplier) + number) >> shift;
    const int64_t remainder = n - static_cast<int64_t>(quotient) * divisor;
    n = static_cast<int64_t>(quotient);
    return remainder;
  }
};

// Which columns causality lets rows see: row r, query r % n_queries, those up to n_cols - n_queries + query.
struct Causality {
  bool on;
  bool few_rows;  // every row's number is below 2^31
  Divisor n_queries;

  // How many columns the row sees; n_cols where not causal. Col: int for rows in registers, int64_t for any.
  template <typename Col>
  __device__ __forceinline__ Col visible(int64_t row, Col n_cols) const {
    if (!on) return n_cols;
    int64_t result;
    if (few_rows) {
      uint32_t rest = static_cast<uint32_t>(row);
      const uint32_t query = n_queries.divide(rest);
      result = n_cols - static_cast<Col>(static_cast<uint32_t>(n_queries.divisor) - 1 - query);
    } else {
      result = n_cols - n_queries.divisor + n_queries.divide(row) + 1;
    }
    return result > 0 ? static_cast<Col>(result) : 0;
  }
};

// How many of a chunk's columns are visible, 0 to 8: always the first ones.
template <bool kApart, typename Col>
__device__ __forceinline__ int visible_columns(Col col, Col visible) {
  return valid_columns<kApart>(col, visible, false);
}

// value[i] becomes `hidden` from the first column that is not visible on. Nearly every chunk is all visible: a branch.
template <bool kApart, typename Col>
__device__ __forceinline__ void hide_columns(float (&value)[kChunkColumns], Col col, Col visible, float hidden) {
  const Col left = visible - col;
  if (left > column_of<kApart>(kChunkColumns - 1)) return;
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) value[i] = left > column_of<kApart>(i) ? value[i] : hidden;
}

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// As lanes_sum() of reduce.cuh.
__device__ __forceinline__ float lanes_max(float value, int lanes) {
#pragma unroll
  for (int lane_mask = kWarpThreads / 2; lane_mask > 0; lane_mask /= 2) {
    value = fmaxf(value, shuffle_xor(value, lane_mask & (lanes - 1)));
  }
  return value;
}

#ifndef __CUDACC_RTC__

// Threads that share a row of so many columns, at most columns_per_thread each. T: of the row.
template <typename T>
RowThreads threads_of_row(int64_t n_cols, int columns_per_thread) {
  const int64_t wanted = ceil_div(n_cols, columns_per_thread);
  int log2_lanes = kHalvesApart<T> ? 3 : 0;
  static_assert(1 << 3 == kSharingThreads);
  while (log2_lanes < 5 && (1 << log2_lanes) < wanted) ++log2_lanes;
  const int64_t warps = ceil_div(wanted, kWarpThreads);
  if (wanted <= kWarpThreads) return {1 << log2_lanes, log2_lanes, kRowsThreads >> log2_lanes};
  return {static_cast<int>(warps) * kWarpThreads, kLog2MaxThreads, 1};
}

#endif

}  // namespace onetrip
