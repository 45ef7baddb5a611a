// Gradients of rows that their threads cannot hold: row_norm_backward.cuh has the formulas, and what the two share.
#pragma once
#include "row_norm_backward.cuh"

namespace onetrip {

// How much of its rows a wide block keeps in dynamic shared memory between its two walks over them.
struct WideCache {
  int batch_rows;  // rows walked together, 1 to kMaxBatchRows
  int tiles;  // of each row, the first tiles (kBackwardThreads * kColumns columns each) are kept, the others read again
};
constexpr int kMaxBatchRows = 4;

// Rows wider than that: a block takes its rows in small batches. The first walk takes each row's means
// and keeps what fits of dy and z in shared memory; the second goes by columns, each thread adding its columns over the
// batch's rows before it touches their running sums, which live in the block's partial rows (mostly in L2).
template <typename X, typename Z, bool kFast>
__global__ void __launch_bounds__(kBackwardThreads, kFast ? backward_blocks<X>() : 1)
    row_norm_backward_wide_kernel(const RowNormBackward args, const bool aligned, const BackwardPartition partition,
                                  const WideCache cache) {
  constexpr int kColumns = kChunkColumns;
  constexpr int kZWords = Chunk<Z, kColumns>::kWords;
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_SHARED(float4, row_values, kMaxBatchRows);  // mean, rstd and the two means of the gradient
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const bool vector_access = kFast || aligned;
  const DType dy_dtype = kFast ? DTypeOf<X>::value : args.y_dtype;
  const int dy_words = kColumns * size_of(dy_dtype) / 4;
  constexpr int kStep = kBackwardThreads * kColumns;
  RowSum<0> sum_over_row(kBackwardThreads, 0, shared);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);

  // Word by word across the threads: no bank conflicts, and every thread reads back only what it wrote.
  const auto kept_words = [&](int batch_row, int tile) {
    return kept + (batch_row * cache.tiles + tile) * (dy_words + kZWords) * kBackwardThreads + threadIdx.x;
  };
  // Of a row's tile, this thread's chunk. What follows from the number is computed again at every step.
  const auto column = [&](int& tile) {
    forget(tile);
    return tile * static_cast<int64_t>(kStep) + static_cast<int>(threadIdx.x) * kColumns;
  };
  const int n_tiles = static_cast<int>((args.n_cols + kStep - 1) / kStep);
  const auto row_number = [&](int row_in_block) { return block_begin(partition) + row_in_block; };
  const int64_t rows_left = args.n_rows - block_begin(partition);
  const int n_rows = static_cast<int>(rows_left < partition.rows_per_block ? rows_left : partition.rows_per_block);

  for (int first_row = 0; first_row < n_rows; first_row += cache.batch_rows) {
    const int batch_rows = first_row + cache.batch_rows < n_rows ? cache.batch_rows : n_rows - first_row;
    for (int r = 0; args.dy != nullptr && r < batch_rows; ++r) {
      const int64_t row = row_number(first_row + r);
      const float mean = args.mean != nullptr ? __ldg(args.mean + row) : 0.0f;
      const float rstd = __ldg(args.rstd + row);
      float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll 1
      for (int tile = 0; tile < n_tiles; ++tile) {
        const int64_t col = column(tile);
        const int valid = valid_columns<kColumns>(col, args.n_cols, vector_access);
        GradientChunk<Z, kColumns> chunk;
        load_gradient(chunk, args, dy_dtype, vector_access, row, col, valid);
        if (tile < cache.tiles) {
          uint32_t* words = kept_words(r, tile);
#pragma unroll
          for (int i = 0; i < kZWords; ++i) words[i * kBackwardThreads] = chunk.z.word[i];
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (i < dy_words) words[(kZWords + i) * kBackwardThreads] = chunk.dy.word[i];
          }
        }
        float wdy[kColumns], n[kColumns];
        normalise(chunk, dy_dtype, mean, rstd, vector_access, valid, wdy, n);
        apply_weight(wdy, args, vector_access, col, valid);
        float2 chunk_sums = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) chunk_sums = add(chunk_sums, make_float2(wdy[i] * n[i], wdy[i]));
        sums = add(sums, chunk_sums);
      }
      const float2 means = row_means(sum_over_row(sums), args);
      if (threadIdx.x == 0) row_values[r] = make_float4(mean, rstd, means.x, means.y);
    }
    __syncthreads();

    // By columns: first the sums over dy, then what needs the row's means. Together they would not fit into registers.
#pragma unroll 1
    for (int tile = 0; tile < n_tiles; ++tile) {
      int64_t col = column(tile);
      const int valid = valid_columns<kColumns>(col, args.n_cols, vector_access);
      if (valid == 0) break;
      const auto load_running = [&](float (&sum)[kColumns], int slot) {
        if (first_row == 0) return;
        Chunk<float, kColumns> running;
        load_chunk<false>(running, partial_row(args, partition, slot), col, vector_access, valid);
        unpack(running, sum);
      };
      const auto store_running = [&](const float (&sum)[kColumns], int slot) {
        store_rounded<float>(partial_row(args, partition, slot), col, sum, vector_access, valid);
      };
      const auto read_again = [&](GradientChunk<Z, kColumns>& chunk, int r) {
        if (tile < cache.tiles) {
          const uint32_t* words = kept_words(r, tile);
#pragma unroll
          for (int i = 0; i < kZWords; ++i) chunk.z.word[i] = words[i * kBackwardThreads];
#pragma unroll
          for (int i = 0; i < kColumns; ++i)
            chunk.dy.word[i] = i < dy_words ? words[(kZWords + i) * kBackwardThreads] : 0;
        } else {
          load_gradient(chunk, args, dy_dtype, vector_access, row_number(first_row + r), col, valid);
        }
      };
      const int dweight_slot = args.dbias != nullptr ? 1 : 0;
      const int dnorm_bias_slot = dweight_slot + (args.dweight != nullptr ? 1 : 0);
      if (args.dweight != nullptr || args.dnorm_bias != nullptr) {
        // Zeros even where they are not wanted: a value set on one way only would take a register everywhere.
        float dweight[kColumns] = {}, dnorm_bias[kColumns] = {};
        if (args.dweight != nullptr) load_running(dweight, dweight_slot);
        if (args.dnorm_bias != nullptr) load_running(dnorm_bias, dnorm_bias_slot);
#pragma unroll 1
        for (int r = 0; args.dy != nullptr && r < batch_rows; ++r) {
          forget(r);
          GradientChunk<Z, kColumns> chunk;
          col = column(tile);
          read_again(chunk, r);
          const float4 values = row_values[r];
          float dy[kColumns], n[kColumns];
          normalise(chunk, dy_dtype, values.x, values.y, vector_access, valid, dy, n);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            dweight[i] += dy[i] * n[i];
            dnorm_bias[i] += dy[i];
          }
        }
        if (args.dweight != nullptr) store_running(dweight, dweight_slot);
        if (args.dnorm_bias != nullptr) store_running(dnorm_bias, dnorm_bias_slot);
      }
      float dbias[kColumns] = {};
      if (args.dbias != nullptr) load_running(dbias, 0);
#pragma unroll 1
      for (int r = 0; r < batch_rows; ++r) {
        forget(r);
        col = column(tile);
        const int64_t row = row_number(first_row + r);
        float g[kColumns];
        if (args.dy != nullptr) {
          GradientChunk<Z, kColumns> chunk;
          read_again(chunk, r);
          const float4 values = row_values[r];
          float n[kColumns];
          normalise(chunk, dy_dtype, values.x, values.y, vector_access, valid, g, n);
          apply_weight(g, args, vector_access, col, valid);
          gradient_of_z(g, n, make_float2(values.z, values.w), values.y);
        } else {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) g[i] = 0.0f;
        }
        add_dz<Z>(g, args, vector_access, row, col, valid);
        store_gradient<X, Z>(g, args, mask, vector_access, row, col, valid);
        if (args.dbias != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dbias[i] += inside(i, valid, vector_access) ? g[i] : 0.0f;
        }
      }
      if (args.dbias != nullptr) store_running(dbias, 0);
    }
    __syncthreads();  // row_values is free for the next batch
  }
}

}  // namespace onetrip
