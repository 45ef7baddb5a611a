// Gradients of softmax_forward.cuh. With dP = dropout_backward(dy) and the sign of p saying what was dropped,
//
//   g = P * (dP - sum over the row of P * dP);  dscores = scale * g;  dmask = sum of g over the rows that share a row
//   of the mask.
//
// Columns that causality hides are not read, whatever lies there; their g is 0.
// Moves n_cols * (dy + p + dscores) bytes a row, each once, where the row's threads hold it; of wider rows what shared
// memory cannot keep is read twice. dmask costs 4 bytes a column of the mask where one group of threads takes all the
// rows that share a row of it, and 8 more for every partial sum otherwise.
#pragma once
#include "softmax_common.cuh"

namespace onetrip {

template <typename T>
struct BackwardChunk {
  Chunk<T, kChunkColumns> dy, p;
};

// Leaves zeros from column `seen` on.
template <typename T>
__device__ __forceinline__ void hide(Chunk<T, kChunkColumns>& chunk, int seen) {
#pragma unroll
  for (int w = 0; w < Chunk<T, kChunkColumns>::kWords; ++w) {
    if constexpr (sizeof(T) == 4) {
      chunk.word[w] = w < seen ? chunk.word[w] : 0;
    } else {
      chunk.word[w] = 2 * w + 1 < seen ? chunk.word[w] : 2 * w < seen ? chunk.word[w] & 0xFFFF : 0;
    }
  }
}

// dy and p of a chunk; 0 from column `visible` of the row on.
template <typename T, typename Col>
__device__ __forceinline__ void load_backward(BackwardChunk<T>& chunk, const SoftmaxBackward& args, bool vector_access,
                                              int64_t row, Col col, Col visible) {
  constexpr bool kApart = kHalvesApart<T>;
  const int valid = valid_columns<kApart>(col, visible, vector_access);
  load_chunk<kApart>(chunk.dy, args.dy, row * args.dy_row_stride + col, vector_access, valid);
  load_chunk<kApart>(chunk.p, args.p, row * args.p_row_stride + col, vector_access, valid);
  const int seen = visible_columns<kApart>(col, visible);
  if (vector_access && seen < valid) {  // the vector holds the last visible column
    hide(chunk.dy, seen);
    hide(chunk.p, seen);
  }
}

// P and dP of a chunk, of dy and of p as they lie in memory. Past what is visible both are 0. No product is left to be
// fused with what follows: the bits are the same wherever this is computed.
__device__ __forceinline__ void undo_dropout(float (&p)[kChunkColumns], float (&dp)[kChunkColumns],
                                             const SoftmaxBackward& args) {
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) {
    dp[i] = static_cast<int32_t>(__float_as_uint(p[i])) < 0 ? 0.0f : __fmul_rn(dp[i], args.dropout_scale);
    p[i] = fabsf(p[i]);
  }
}
template <typename T>
__device__ __forceinline__ void unpack_backward(const BackwardChunk<T>& chunk, const SoftmaxBackward& args,
                                                float (&p)[kChunkColumns], float (&dp)[kChunkColumns]) {
  unpack(chunk.dy, dp);
  unpack(chunk.p, p);
  if (args.has_dropout) undo_dropout(p, dp, args);
}

__device__ __forceinline__ float dot_product(const float (&p)[kChunkColumns], const float (&dp)[kChunkColumns]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) sum = fmaf(p[i], dp[i], sum);
  return sum;
}
template <typename T>
__device__ __forceinline__ float dot_product(const BackwardChunk<T>& chunk, const SoftmaxBackward& args) {
  float p[kChunkColumns], dp[kChunkColumns];
  unpack_backward(chunk, args, p, dp);
  return dot_product(p, dp);
}

// g, in the place of dP.
__device__ __forceinline__ void gradient_of(const float (&p)[kChunkColumns], float (&dp)[kChunkColumns], float dot) {
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) dp[i] = __fmul_rn(p[i], dp[i] - dot);
}

template <typename T>
__device__ __forceinline__ void store_dscores(const float (&g)[kChunkColumns], const SoftmaxBackward& args,
                                              bool vector_access, int64_t index, int valid) {
  float dscores[kChunkColumns];
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) dscores[i] = __fmul_rn(g[i], args.scale);
  store_rounded<T, kHalvesApart<T> >(args.dscores, index, dscores, vector_access, valid);
}

// g of a chunk; writes dscores.
template <typename T, typename Col>
__device__ __forceinline__ void finish_chunk(float (&g)[kChunkColumns], const BackwardChunk<T>& chunk,
                                             const SoftmaxBackward& args, float dot, bool vector_access, int64_t row,
                                             Col col, Col n_cols, Col visible) {
  constexpr bool kApart = kHalvesApart<T>;
  float p[kChunkColumns];
  unpack_backward(chunk, args, p, g);
  gradient_of(p, g, dot);
  hide_columns<kApart>(g, col, visible, 0.0f);  // where dot is NaN too
  if (args.dscores == nullptr) return;
  store_dscores<T>(g, args, vector_access, row * args.n_cols + col, valid_columns<kApart>(col, n_cols, vector_access));
}

// Sums over the threads of a row, several times if need be.
class DotSum {
 public:
  __device__ DotSum(const RowThreads& threads, float2* shared)
      : count_(threads.count), warps_(threads.count, threads.group(), shared) {}
  __device__ __forceinline__ float operator()(float value) {
    if (count_ > kWarpThreads) return warps_(value);
    // As lanes_sum(), in a loop: what tells the steps apart would be held in registers.
#pragma unroll 1
    for (int lane_mask = count_ / 2; lane_mask > 0; lane_mask /= 2) value += shuffle_xor(value, lane_mask);
    return value;
  }

 private:
  int count_;
  RowSum<0> warps_;
};

// The row's threads hold P and dP from the one read to the one write. kChunks 1: lanes of a warp a row. Otherwise:
// whole warps. dmask: only where no rows share a row of the mask. thread: which of the count threads of the row this
// is. sum_over_row(value): over those threads.
template <typename T, int kChunks, bool kFast, typename Sum>
__device__ __forceinline__ void backward_row(const SoftmaxBackward& args, const Causality& causality, int64_t row,
                                             int thread, int count, Sum&& sum_over_row) {
  constexpr bool kApart = kHalvesApart<T>;
  const int step = count * kChunkColumns;
  int first_col = first_column<kApart>(thread);  // forgotten before its last uses: addresses cost less than registers
  const int n_cols = row < args.n_rows ? static_cast<int>(args.n_cols) : 0;
  const int visible = row < args.n_rows ? causality.visible(row, n_cols) : 0;

  float p[kChunks][kChunkColumns], dp[kChunks][kChunkColumns];
  {
    BackwardChunk<T> chunk[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) load_backward(chunk[k], args, kFast, row, first_col + k * step, visible);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) unpack(chunk[k].p, p[k]), unpack(chunk[k].dy, dp[k]);
  }
  if (args.has_dropout) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) undo_dropout(p[k], dp[k], args);
  }
  float dot = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) dot += dot_product(p[k], dp[k]);
  dot = sum_over_row(dot);
  compiler_barrier(first_col);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) gradient_of(p[k], dp[k], dot);
  if (causality.on) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      hide_columns<kApart>(dp[k], first_col + k * step, visible, 0.0f);  // where dot is NaN too
    }
  }
  const int64_t index = row * args.n_cols + first_col;
  const auto valid = [&](int k) { return valid_columns<kApart>(first_col + k * step, n_cols, kFast); };
  if (args.dscores != nullptr) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) store_dscores<T>(dp[k], args, kFast, index + k * step, valid(k));
  }
  if (args.dmask != nullptr) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      store_rounded<float, kApart>(args.dmask, index + k * step, dp[k], kFast, valid(k));
    }
  }
}

// Lanes of a warp, the warp, or the block a row.
template <typename T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kChunks == 1 ? kRowsThreads : kMaxThreads, kChunks == 1 ? 8 : 1)
    softmax_backward_kernel(const SoftmaxBackward args, const RowThreads threads, const Causality causality) {
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  const int64_t row = threads.row();
  backward_row<T, kChunks, kFast>(args, causality, row, threads.thread(), threads.count, [&](float dot) {
    if constexpr (kChunks == 1) {
      return lanes_sum(dot, threads.count);
    } else {
      return threads.count == kWarpThreads ? warp_sum<kWarpThreads>(dot) : BlockOrLanesSum<0>(shared)(dot);
    }
  });
}

// The blocks of a cluster a row. While they meet for the first time, the row is on its way.
template <typename T>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocksPerSm)
    softmax_backward_cluster_kernel(const SoftmaxBackward args, const Causality causality) {
#if ONETRIP_CLUSTERS
  ONETRIP_SHARED(float2, shared, 2 * kMaxClusterWarps);
  RowSum<kClusterRow> sum_over_row(shared);
  const ClusterThreads threads;
  backward_row<T, kBlockChunks, true>(args, causality, threads.row, threads.thread, threads.count, sum_over_row);
#endif
}

// Which rows share a row of the mask, and who adds them up. Neighbouring dimensions along which the mask moves count as
// one, and so do those along which it is broadcast: of four, at most two of either kind. Rows of the mask are cut into
// parts, a block each (parts * n_groups lists of rows_per_group rows); the partial sums of more than one part go to
// the workspace, [n_mask_rows][n_parts][n_cols].
struct MaskSharing {
  int64_t n_mask_rows, n_sharing;
  int64_t moving_inner, moving_steps[2];    // mask row m starts at row (m / inner) * steps[0] + (m % inner) * steps[1]
  int64_t sharing_inner, sharing_steps[2];  // and the s-th row that shares it lies as far behind, in the same way
  int64_t n_parts, rows_per_group;
  int n_groups;
  bool joined;  // the groups of a block work on one row of the mask; else each on its own

  __device__ __forceinline__ int64_t first_row(int64_t mask_row) const {
    return mask_row / moving_inner * moving_steps[0] + mask_row % moving_inner * moving_steps[1];
  }
};

// Walks over the rows that share a row of the mask.
class SharingRows {
 public:
  __device__ SharingRows(const MaskSharing& sharing, int64_t mask_row, int64_t first)
      : inner_(first % sharing.sharing_inner),
        row_(sharing.first_row(mask_row) + first / sharing.sharing_inner * sharing.sharing_steps[0] +
             inner_ * sharing.sharing_steps[1]) {}
  __device__ __forceinline__ int64_t row() const { return row_; }
  __device__ __forceinline__ void next(const MaskSharing& sharing) {
    row_ += sharing.sharing_steps[1];
    if (++inner_ < sharing.sharing_inner) return;
    row_ += sharing.sharing_steps[0] - inner_ * sharing.sharing_steps[1];
    inner_ = 0;
  }

 private:
  int64_t inner_, row_;
};

__device__ __forceinline__ float* sum_row(const SoftmaxBackward& args, const MaskSharing& sharing, int64_t mask_row,
                                          int64_t part) {
  return sharing.n_parts == 1 ? args.dmask + mask_row * args.n_cols
                              : args.workspace + (mask_row * sharing.n_parts + part) * args.n_cols;
}

constexpr int kSharedBlock = 256;  // threads a block, where a row takes no more

// A group of threads, a chunk each, takes some of the rows that share a row of the mask, one after another, and keeps
// the sum of g in registers; the groups of a block are added in order.
template <typename T, bool kFast>
__global__ void __launch_bounds__(kMaxThreads, 1)
    softmax_backward_shared_kernel(const SoftmaxBackward args, const RowThreads threads, const MaskSharing sharing,
                                   const Causality causality) {
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_DYNAMIC_SHARED(float, sums);  // [kChunkColumns][blockDim], where groups are joined
  constexpr bool kApart = kHalvesApart<T>;
  const int group = threads.group();
  // Forgotten in the loop: addresses cost less than registers.
  int col = first_column<kApart>(threads.thread_of_group());
  DotSum row_sum(threads, shared);
  // In lists of rows: those of one row of the mask follow each other.
  const int64_t block = first_row_of_block(1), list = block * sharing.n_groups + group;
  const int64_t lists = sharing.joined ? sharing.n_parts * sharing.n_groups : 1;
  const int64_t mask_row = list / lists, first = list % lists * sharing.rows_per_group;
  const int64_t left = mask_row < sharing.n_mask_rows ? sharing.n_sharing - first : 0;
  SharingRows rows(sharing, mask_row, first);

  float sum[kChunkColumns] = {};
  for (int i = 0; i < sharing.rows_per_group; ++i, rows.next(sharing)) {
    // Lanes without a row go through all of it, for the sake of the warp, with a row of no columns.
    const int n_cols = i < left ? static_cast<int>(args.n_cols) : 0;
    const int visible = i < left ? causality.visible(rows.row(), n_cols) : 0;
    compiler_barrier(col);
    BackwardChunk<T> chunk;
    load_backward(chunk, args, kFast, rows.row(), col, visible);
    const float dot = row_sum(dot_product(chunk, args));
    float g[kChunkColumns];
    compiler_barrier(chunk.dy), compiler_barrier(chunk.p);
    finish_chunk(g, chunk, args, dot, kFast, rows.row(), col, n_cols, visible);
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) sum[j] += g[j];
  }
  if (!sharing.joined) {
    store_rounded<float, kApart>(args.dmask, mask_row * args.n_cols + col, sum, kFast,
                                 valid_columns<kApart>(col, left > 0 ? static_cast<int>(args.n_cols) : 0, kFast));
    return;
  }
  const int n_threads = static_cast<int>(blockDim.x);
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) sums[j * n_threads + static_cast<int>(threadIdx.x)] = sum[j];
  __syncthreads();
  if (mask_row >= sharing.n_mask_rows) return;
  float* const out = sum_row(args, sharing, mask_row, block % sharing.n_parts);
  for (int i = static_cast<int>(threadIdx.x); i < args.n_cols; i += n_threads) {
    const ChunkPlace place = place_of_column<kApart>(static_cast<unsigned>(i));
    const float* const of_column = sums + place.element * static_cast<unsigned>(n_threads) + place.thread;
    float total = 0.0f;
    for (int g = 0; g < sharing.n_groups; ++g) total += of_column[g * threads.count];
    out[i] = total;
  }
}

// Rows that their threads cannot hold: a block takes the rows of a list one after another, two walks over each. The
// first keeps what fits of dy and p in shared memory. The sum of g lives in dmask (or the partial row), mostly in L2.
template <typename T, bool kFast>
__global__ void __launch_bounds__(kWideThreads, kWideBlocks)
    softmax_backward_wide_kernel(const SoftmaxBackward args, const MaskSharing sharing, const Causality causality,
                                 const int64_t kept_tiles) {
  constexpr int kWords = Chunk<T, kChunkColumns>::kWords;
  constexpr bool kApart = kHalvesApart<T>;
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const int64_t block = first_row_of_block(1), mask_row = block / sharing.n_parts, part = block % sharing.n_parts;
  if (mask_row >= sharing.n_mask_rows) return;
  const int64_t first_col = first_column<kApart>(static_cast<int>(threadIdx.x)), step = kWideThreads * kChunkColumns;
  RowSum<0> row_sum(kWideThreads, 0, shared);
  const auto kept_word = [&](int64_t tile, int i) -> uint32_t& {
    return kept[(tile * 2 * kWords + i) * kWideThreads + threadIdx.x];
  };
  const int64_t first = part * sharing.rows_per_group;
  SharingRows rows(sharing, mask_row, first);
  for (int64_t i = 0; i < sharing.rows_per_group && first + i < sharing.n_sharing; ++i, rows.next(sharing)) {
    const int64_t row = rows.row(), visible = causality.visible(row, args.n_cols);
    float dot = 0.0f;
    int64_t tile = 0;
    for (int64_t col = first_col; col < visible; col += step, ++tile) {
      BackwardChunk<T> chunk;
      load_backward(chunk, args, kFast, row, col, visible);
      if (tile < kept_tiles) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          kept_word(tile, w) = chunk.dy.word[w];
          kept_word(tile, kWords + w) = chunk.p.word[w];
        }
      }
      dot += dot_product(chunk, args);
    }
    dot = row_sum(dot);
    tile = 0;
    for (int64_t col = first_col; col < args.n_cols; col += step, ++tile) {
      BackwardChunk<T> chunk;
      if (tile < kept_tiles && col < visible) {
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          chunk.dy.word[w] = kept_word(tile, w);
          chunk.p.word[w] = kept_word(tile, kWords + w);
        }
      } else {
        load_backward(chunk, args, kFast, row, col, visible);
      }
      float g[kChunkColumns];
      finish_chunk(g, chunk, args, dot, kFast, row, col, args.n_cols, visible);
      if (args.dmask != nullptr) {
        float* const out = sum_row(args, sharing, mask_row, part);
        const int valid = valid_columns<kApart>(col, args.n_cols, kFast);
        if (i != 0) {
          Chunk<float, kChunkColumns> running;
          float sum[kChunkColumns];
          load_chunk<kApart, false>(running, out, col, kFast, valid);
          unpack(running, sum);
#pragma unroll
          for (int j = 0; j < kChunkColumns; ++j) g[j] += sum[j];
        }
        store_rounded<float, kApart>(out, col, g, kFast, valid);
      }
    }
  }
}

// dmask[m][col] = sum over parts of workspace[m][part][col]. A block takes 32 columns of one row of the mask; its warps
// take the parts in turn and are added in order.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_parts_kernel(const SoftmaxBackward args, const int64_t n_mask_rows, const int64_t n_parts) {
  ONETRIP_SHARED(float, warp_sums, kThreads);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int n_warps = static_cast<int>(blockDim.x) / kWarpThreads;
  const int64_t col_blocks = (args.n_cols + kWarpThreads - 1) / kWarpThreads, block = first_row_of_block(1);
  const int64_t mask_row = block / col_blocks, col = block % col_blocks * kWarpThreads + lane;
  const bool inside = mask_row < n_mask_rows && col < args.n_cols;
  float sum = 0.0f;
  if (inside) {
#pragma unroll 4
    for (int64_t part = warp; part < n_parts; part += n_warps) {
      sum += __ldg(args.workspace + (mask_row * n_parts + part) * args.n_cols + col);
    }
  }
  warp_sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || !inside) return;
  for (int i = 1; i < n_warps; ++i) sum += warp_sums[i * kWarpThreads + lane];
  args.dmask[mask_row * args.n_cols + col] = sum;
}

}  // namespace onetrip
