// Gradients of rows of more than 4096 columns that are not pipelined: unaligned, with a dy neither float32 nor of x's
// dtype, without a norm, wider than 65,536, or on a GPU without clusters, cp.async or enough shared memory.
// row_norm_backward.cuh has the formulas.
//
// Two kernels. A block of the first computes the means of one row. A block of the second takes 4096 columns of one
// part's rows; each thread keeps the sums of its 8 columns. Moves n_cols * (read dy and z twice, dz once + write dx,
// dresidual) bytes a row. Without a norm the first kernel is skipped and everything is read once.
#pragma once
#include "launch.cuh"
#include "row_norm_backward.cuh"

namespace onetrip {

constexpr int kTileColumns = kBackwardThreads * kBackwardColumns;

// means: [n_rows], of wdy * n (x) and wdy (y) over the row. The sum takes the order that RowSum has with 256 columns a
// warp; the warps of 65,536 columns have a place each, those beyond share it.
template <typename X, typename Z, bool kFast>
__global__ void __launch_bounds__(kBackwardThreads, kFast ? backward_blocks<X>() : 1)
    row_norm_backward_means_kernel(const RowNormBackward args, const bool aligned, float2* const means) {
  constexpr int kColumns = kChunkColumns, kTileWarps = kBackwardThreads / kWarpThreads;
  constexpr bool kApart = kHalvesApart<Z>;
  ONETRIP_SHARED(float2, warp_sums, kMaxClusterWarps);
  const bool vector_access = kFast || aligned;
  const DType dy_dtype = kFast ? DTypeOf<X>::value : args.y_dtype;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int64_t row = first_row_of_block(1);
  if (row >= args.n_rows) return;
  const float mean = args.mean != nullptr ? __ldg(args.mean + row) : 0.0f;
  const float rstd = __ldg(args.rstd + row);
  int n_warps = 0;  // of the tiles so far
  for (int64_t first = 0; first < args.n_cols; first += kTileColumns, n_warps += kTileWarps) {
    const int64_t col = first + first_column<kApart>(static_cast<int>(threadIdx.x));
    const int valid = valid_columns<kApart>(col, args.n_cols, vector_access);
    GradientChunk<Z, kColumns> chunk;
    load_gradient(chunk, args, dy_dtype, vector_access, row, col, valid);
    float wdy[kColumns], n[kColumns];
    normalise(chunk, dy_dtype, mean, rstd, vector_access, valid, wdy, n);
    apply_weight<kApart>(wdy, args, vector_access, col, valid);
    const float2 sums = warp_sum<kWarpThreads>(chunk_sums(wdy, n));
    if (lane == 0) {
      float2& place = warp_sums[n_warps % kMaxClusterWarps + warp];
      place = n_warps < kMaxClusterWarps ? sums : add(place, sums);
    }
  }
  __syncthreads();
  if (warp != 0) return;
  const float2 sums = sum_of_warps(warp_sums, n_warps < kMaxClusterWarps ? n_warps : kMaxClusterWarps);
  if (lane == 0) means[row] = row_means(sums, args);
}

// The grid is (tiles of the columns) x (parts).
template <typename X, typename Z, bool kFast>
__global__ void __launch_bounds__(kBackwardThreads, kFast ? backward_blocks<X>() : 1)
    row_norm_backward_columns_kernel(const RowNormBackward args, const bool aligned, const BackwardPartition partition,
                                     const float2* const means) {
  constexpr int kColumns = kChunkColumns;
  constexpr bool kApart = kHalvesApart<Z>;
  ONETRIP_DYNAMIC_SHARED(float, buffers);
  allow_next_kernel();
  const bool vector_access = kFast || aligned;
  const DType dy_dtype = kFast ? DTypeOf<X>::value : args.y_dtype;
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileColumns, n_left = args.n_cols - first;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread / kWarpThreads * kWarpThreads * kColumns >= n_left) return;  // whole warps: neighbours exchange masks
  const int64_t col = first + first_column<kApart>(thread);
  const int valid = valid_columns<kApart>(col, args.n_cols, vector_access);
  ColumnSums<true, kApart> dbias(buffers, args.dbias != nullptr);
  ColumnSums<true, kApart> dweight(buffers + (args.dbias != nullptr ? kSumFloats : 0), args.dweight != nullptr);
  ColumnSums<false, kApart> dnorm_bias(buffers, args.dnorm_bias != nullptr);

  for (int64_t row = blockIdx.y; row < args.n_rows; row += partition.n_parts) {
    float g[kColumns] = {};
    if (args.dy != nullptr) {
      GradientChunk<Z, kColumns> chunk;
      load_gradient(chunk, args, dy_dtype, vector_access, row, col, valid);
      const float mean = args.mean != nullptr ? __ldg(args.mean + row) : 0.0f;
      const float rstd = __ldg(args.rstd + row);
      const float2 row_means = __ldg(means + row);
      float n[kColumns];
      normalise(chunk, dy_dtype, mean, rstd, vector_access, valid, g, n);
      if (args.dweight != nullptr) dweight.add_products(g, n);
      if (args.dnorm_bias != nullptr) dnorm_bias.add(g);
      apply_weight<kApart>(g, args, vector_access, col, valid);
      gradient_of_z(g, n, row_means, rstd);
    }
    add_dz<Z>(g, args, vector_access, row, col, valid);
    store_gradient<X, Z>(g, args, mask, vector_access, row * args.n_cols + col, valid);
    if (args.dbias != nullptr) dbias.add(g, valid, vector_access);
  }

  int slot = 0;
  const auto store_sums = [&](auto& sums, bool wanted) {
    if (!wanted) return;
    float value[kColumns];
    sums.copy_to(value);
    store_rounded<float, kApart>(partial_row(args, partition, blockIdx.y, slot++), col, value, vector_access, valid);
  };
  store_sums(dbias, args.dbias != nullptr);
  store_sums(dweight, args.dweight != nullptr);
  store_sums(dnorm_bias, args.dnorm_bias != nullptr);
}

}  // namespace onetrip
