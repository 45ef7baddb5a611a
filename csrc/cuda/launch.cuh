// What launchers of every family share: grids of rows, clusters of blocks, the choice of vector access.
#pragma once
#include "device_info.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// Blocks are counted over the grid's x and y: a grid's x alone ends at 2^31 - 1.
__device__ __forceinline__ int64_t first_row_of_block(int rows_per_block) {
  return (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * rows_per_block;
}

constexpr int kWideThreads = 512;  // a block of a row that its threads cannot hold

// A row in a cluster: columns a block, threads that take at least 16 of them each, and blocks that fit on an SM.
constexpr int kClusterColumns = 8192, kClusterThreads = 512, kClusterBlocksPerSm = 2;
constexpr int kClusterWarps = kMaxClusterBlocks * kClusterThreads / kWarpThreads;  // at most

#if ONETRIP_CLUSTERS

// The threads of a cluster's blocks, which share one row. Along x there are whole clusters only.
struct ClusterThreads {
  int64_t row;
  int thread, count;
  __device__ ClusterThreads() {
    const int threads = static_cast<int>(blockDim.x);
    const int size = cluster_size(), log2_size = (size > 1) + (size > 2) + (size > 4);  // 1, 2, 4 or 8 blocks
    row = static_cast<int64_t>(blockIdx.y) * (gridDim.x >> log2_size) + (blockIdx.x >> log2_size);
    thread = cluster_rank() * threads + static_cast<int>(threadIdx.x);
    count = cluster_size() * threads;
  }
};

#endif

// NVRTC compiles no host code.
#ifndef __CUDACC_RTC__

constexpr int64_t kMaxGrid = 0x7FFFFFFF;  // blocks in x, on every GPU
constexpr int kStaticSharedBytes = 1024;  // more than a block's own arrays, outside clusters, of what it may have

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t at_least_one(int64_t a) { return a > 1 ? a : 1; }

inline dim3 grid_of_rows(int64_t n_rows, int rows_per_block) {
  const int64_t n_blocks = ceil_div(n_rows, rows_per_block), grid_y = ceil_div(n_blocks, kMaxGrid);
  return dim3(static_cast<unsigned>(ceil_div(n_blocks, grid_y)), static_cast<unsigned>(grid_y));
}
// A cluster of so many blocks a row.
inline dim3 grid_of_clusters(int64_t n_rows, int cluster_blocks) {
  const int64_t grid_y = ceil_div(n_rows, kMaxGrid / cluster_blocks);
  return dim3(static_cast<unsigned>(ceil_div(n_rows, grid_y) * cluster_blocks), static_cast<unsigned>(grid_y));
}

// Tiles of a wide row that shared memory keeps: two blocks an SM share what one may have. All that is left of an SM's
// memory is L1.
inline int64_t tiles_to_keep(int64_t n_cols, int64_t bytes_per_column, const DeviceInfo& info) {
  const int64_t n_tiles = ceil_div(n_cols, kWideThreads * kChunkColumns);
  const int64_t fit = (info.block_shared / 2 - kStaticSharedBytes) / (kWideThreads * kChunkColumns * bytes_per_column);
  return at_most(n_tiles, fit);
}

// Whether every tensor of the call can be read and written in whole chunks, at most 16 bytes at a time.
class VectorAccess {
 public:
  VectorAccess(int64_t n_cols, int columns) : columns_(columns), possible_(n_cols % columns == 0) {}

  // row_stride in elements; 0 for a parameter.
  void require(const void* address, DType dtype, int64_t row_stride) { require(address, size_of(dtype), row_stride); }
  void require(const void* address, int64_t size, int64_t row_stride) {
    if (address == nullptr) return;
    const int64_t unit = columns_ * size < 16 ? columns_ * size : 16;
    possible_ = possible_ && reinterpret_cast<uintptr_t>(address) % unit == 0 && row_stride * size % unit == 0;
  }
  bool possible() const { return possible_; }

 private:
  int64_t columns_;
  bool possible_;
};

// How a row is shared out over a cluster.
struct ClusterShape {
  int blocks;   // 0: not at all
  int threads;  // a block
};

// The fewest blocks that hold the row. A row that a single block could hold too goes to a cluster where its warps can
// be shared out evenly: then thread by thread they do the same, and the results are the same bits.
inline ClusterShape cluster_of_row(int64_t n_cols, int columns_a_thread) {
  const int64_t most_warps = kClusterColumns / columns_a_thread / kWarpThreads;
  const int64_t n_warps = ceil_div(n_cols, columns_a_thread * kWarpThreads);
  int blocks = 1;
  while (blocks * most_warps < n_warps) blocks *= 2;
  const bool uneven = n_warps <= 2 * most_warps && n_warps % blocks != 0;
  if (blocks == 1 || blocks > kMaxClusterBlocks || uneven) return {0, 0};
  return {blocks, static_cast<int>(ceil_div(n_warps, blocks)) * kWarpThreads};
}

#endif  // __CUDACC_RTC__

}  // namespace onetrip
