// Gradients of row_norm_forward.cuh. With n = (z - mean) * rstd and wdy = dy * (weight + weight_offset),
//
//   g = (wdy - n * mean(wdy * n) - mean(wdy)) * rstd + dz        (mean(wdy) is left out for RMSNorm)
//   dresidual = g;  dx = dropout_backward(g);  dbias = sum dx;  dweight = sum dy * n;  dnorm_bias = sum dy   (over
//   rows)
//
// One pass: dy, z (and dz) are read once, dx (and dresidual) written once. The sums over rows are float32: every block
// keeps those of its own rows in registers and writes them as one partial row; row_norm_partials_kernel adds the
// partial rows.
#pragma once
#include "row_norm_common.cuh"

namespace onetrip {

// Columns a thread, in every path; and the threads of a block, or as near to it as whole groups come.
constexpr int kBackwardColumns = 8;
constexpr int kBackwardThreads = 512;
constexpr int kMaxWanted = 3;

// Which rows a block takes, and where its partial sums go: workspace is [n_wanted][n_blocks][n_cols].
struct BackwardPartition {
  int64_t rows_per_block;
  int64_t n_blocks;
};

template <typename Z, int kColumns>
struct GradientChunk {
  AnyChunk<kColumns> dy;
  Chunk<Z, kColumns> z;
};

template <typename Z, int kColumns>
__device__ __forceinline__ void load_gradient(GradientChunk<Z, kColumns>& chunk, const RowNormBackward& args,
                                              DType dy_dtype, bool vector_access, int64_t row, int64_t col, int valid) {
  load_chunk(chunk.z, args.z, row * args.z_row_stride + col, vector_access, valid);
  load_chunk(chunk.dy, args.dy, dy_dtype, row * args.dy_row_stride + col, vector_access, valid);
}

// wdy and n of one chunk; both are 0 past the row's end, where dy reads as 0 and n is set to it.
template <typename Z, int kColumns>
__device__ __forceinline__ void normalise(const GradientChunk<Z, kColumns>& chunk, DType dy_dtype, float mean,
                                          float rstd, bool vector_access, int valid, float (&dy)[kColumns],
                                          float (&n)[kColumns]) {
  unpack(chunk.z, n);
  unpack(chunk.dy, dy_dtype, dy);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) n[i] = inside(i, valid, vector_access) ? (n[i] - mean) * rstd : 0.0f;
}

template <int kColumns>
__device__ __forceinline__ void apply_weight(float (&dy)[kColumns], const RowNormBackward& args, bool vector_access,
                                             int64_t col, int valid) {
  if (args.weight == nullptr) return;
  float weight[kColumns];
  load_values(weight, args.weight, args.weight_dtype, col, vector_access, valid);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) dy[i] *= weight[i] + args.weight_offset;
}

// The means of wdy * n (x) and wdy (y) over the row.
__device__ __forceinline__ float2 row_means(float2 sums, const RowNormBackward& args) {
  return make_float2(mean_of(sums.x, args.n_cols), args.norm == Norm::kLayer ? mean_of(sums.y, args.n_cols) : 0.0f);
}

template <int kColumns>
__device__ __forceinline__ void gradient_of_z(float (&wdy)[kColumns], const float (&n)[kColumns], float2 means,
                                              float rstd) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) wdy[i] = (wdy[i] - n[i] * means.x - means.y) * rstd;
}

// Writes dresidual and dx from g; leaves dropout_backward(g) in g.
template <typename X, typename Z, int kColumns>
__device__ __forceinline__ void store_gradient(float (&g)[kColumns], const RowNormBackward& args,
                                               const DropoutMask& mask, bool vector_access, int64_t row, int64_t col,
                                               int valid) {
  const int64_t index = row * args.n_cols + col;
  if (args.dresidual != nullptr) store_rounded<Z>(args.dresidual, index, g, vector_access, valid);
  if (args.dx == nullptr && args.dbias == nullptr) return;
  mask.apply(g, index);
  if (args.dx != nullptr) store_rounded<X>(args.dx, index, g, vector_access, valid);
}

__device__ __forceinline__ float* partial_row(const RowNormBackward& args, const BackwardPartition& partition,
                                              int slot) {
  return args.workspace + (slot * partition.n_blocks + blockIdx.x) * args.n_cols;
}

// One float a column of this thread for each of the sums over rows, until the block's rows are through.
// In registers where the kernel has 128 of them to spend, else in shared memory, word by word across the threads.
template <bool kInShared>
class ColumnSums {
 public:
  // buffer: [kBackwardColumns][blockDim] floats.
  __device__ explicit ColumnSums(float* buffer) : buffer_(buffer + threadIdx.x) {
    if (kInShared && buffer != nullptr) {
#pragma unroll
      for (int i = 0; i < kBackwardColumns; ++i) buffer_[i * kBackwardThreads] = 0.0f;
    }
  }
  __device__ __forceinline__ void add(int i, float value) {
    if constexpr (kInShared) {
      buffer_[i * kBackwardThreads] += value;
    } else {
      sum_[i] += value;
    }
  }
  __device__ __forceinline__ void publish(float* buffer) const {
    if constexpr (!kInShared) {
#pragma unroll
      for (int i = 0; i < kBackwardColumns; ++i) buffer[i * kBackwardThreads + threadIdx.x] = sum_[i];
    }
  }

 private:
  float* buffer_;
  float sum_[kInShared ? 1 : kBackwardColumns] = {};
};

// Floats of dynamic shared memory: the weights and a buffer for every wanted sum; else one buffer, used in turn.
constexpr int kSumFloats = kBackwardThreads * kBackwardColumns;
__host__ __device__ constexpr int backward_shared_floats(bool fast, bool has_weight, int n_wanted) {
  return fast ? ((has_weight ? 1 : 0) + n_wanted) * kSumFloats : kSumFloats;
}

// Blocks an SM that the fast kernel's registers must leave room for: half of its threads, but for sm_70, which has no
// registers for what is uniform in a warp and would spill 100 to 200 bytes a thread.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kBackwardBlocks = 1;
#else
constexpr int kBackwardBlocks = 2;
#endif

// Groups of threads (kRowThreads lanes; 0: row_threads of the block, whole warps) take the block's rows in turn, each
// thread always the same kBackwardColumns columns, whose sums it keeps. The groups wait for nobody but themselves, so
// that some load while others reduce; at the end their sums are added in order.
//
// kFast: every access is vectorised and dy has x's dtype; 64 registers then suffice, with the sums and the weights in
// shared memory, and half of an SM's threads are resident. Otherwise both are run-time choices. The sums have the same
// bits.
template <typename X, typename Z, int kRowThreads, bool kFast>
__global__ void __launch_bounds__(kBackwardThreads, kFast ? kBackwardBlocks : 1)
    row_norm_backward_kernel(const RowNormBackward args, const bool aligned, const BackwardPartition partition,
                             const int block_row_threads) {
  constexpr int kColumns = kChunkColumns;
  constexpr int kChunks = kBackwardColumns / kColumns;
  // A float32 dz waits in memory: for the sum over the row there are no 8 registers left to hold it.
  constexpr bool kDzEarly = !kFast || sizeof(Z) == 2;
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_DYNAMIC_SHARED(float, buffers);
  const bool vector_access = kFast || aligned;
  const DType dy_dtype = kFast ? DTypeOf<X>::value : args.y_dtype;
  const int row_threads = kRowThreads == 0 ? block_row_threads : kRowThreads;
  const int n_groups = static_cast<int>(blockDim.x) / row_threads;
  const int group = static_cast<int>(threadIdx.x) / row_threads;
  const int thread = static_cast<int>(threadIdx.x) - group * row_threads;
  const int first_col = thread * kColumns, step = row_threads * kColumns;
  RowSum<kRowThreads> sum_over_row(row_threads, group, shared);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);

  float* const weights = buffers;
  if (kFast && args.weight != nullptr) {
    for (int col = static_cast<int>(threadIdx.x); col < kSumFloats; col += static_cast<int>(blockDim.x)) {
      weights[col] =
          col < args.n_cols ? load_parameter(args.weight, args.weight_dtype, col) + args.weight_offset : 0.0f;
    }
    __syncthreads();
  }
  float* next_buffer = buffers + (kFast && args.weight != nullptr ? kSumFloats : 0);
  const auto take_buffer = [&](const void* wanted) {
    float* const buffer = wanted != nullptr ? next_buffer : nullptr;
    if (kFast && wanted != nullptr) next_buffer += kSumFloats;
    return buffer;
  };
  float* const dbias_buffer = take_buffer(args.dbias);
  float* const dweight_buffer = take_buffer(args.dweight);
  float* const dnorm_bias_buffer = take_buffer(args.dnorm_bias);
  ColumnSums<kFast> dbias(dbias_buffer), dweight(dweight_buffer), dnorm_bias(dnorm_bias_buffer);

  const int64_t block_begin = blockIdx.x * partition.rows_per_block;
  const int64_t rows_left = args.n_rows - block_begin;
  const int n_rows = static_cast<int>(rows_left < partition.rows_per_block ? rows_left : partition.rows_per_block);
  // Uniform in a warp: a group past the block's last row goes on with a row of no columns.
  for (int first_row = 0; first_row < n_rows; first_row += n_groups) {
    const int64_t row = block_begin + first_row + group;
    const int n_cols = first_row + group < n_rows ? static_cast<int>(args.n_cols) : 0;
    Chunk<Z, kColumns> dz[kChunks];
    float wdy[kChunks][kColumns], n[kChunks][kColumns];
    float2 means = make_float2(0.0f, 0.0f);
    float rstd = 0.0f;
    GradientChunk<Z, kColumns> loaded[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int col = first_col + k * step;
      const int valid = valid_columns<kColumns>(col, n_cols, vector_access);
      if (args.dy != nullptr) load_gradient(loaded[k], args, dy_dtype, vector_access, row, col, valid);
      if (kDzEarly && args.dz != nullptr) {
        load_chunk(dz[k], args.dz, row * args.dz_row_stride + col, vector_access, valid);
      }
    }
    if (args.dy != nullptr) {
      const float mean = args.mean != nullptr && n_cols != 0 ? __ldg(args.mean + row) : 0.0f;
      rstd = n_cols != 0 ? __ldg(args.rstd + row) : 0.0f;
      float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int col = first_col + k * step;
        const int valid = valid_columns<kColumns>(col, n_cols, vector_access);
        normalise(loaded[k], dy_dtype, mean, rstd, vector_access, valid, wdy[k], n[k]);
        if (args.dweight != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dweight.add(k * kColumns + i, wdy[k][i] * n[k][i]);
        }
        if (args.dnorm_bias != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dnorm_bias.add(k * kColumns + i, wdy[k][i]);
        }
        if (!kFast) {
          apply_weight(wdy[k], args, vector_access, col, valid);
        } else if (args.weight != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) wdy[k][i] *= weights[col + i];
        }
#pragma unroll
        for (int i = 0; i < kColumns; ++i) sums = add(sums, make_float2(wdy[k][i] * n[k][i], wdy[k][i]));
      }
      means = row_means(sum_over_row(sums), args);
    }
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int col = first_col + k * step;
      const int valid = valid_columns<kColumns>(col, n_cols, vector_access);
      float g[kColumns] = {};
      if (args.dz != nullptr) {
        if (!kDzEarly) load_chunk(dz[k], args.dz, row * args.dz_row_stride + col, vector_access, valid);
        unpack(dz[k], g);
      }
      if (args.dy != nullptr) {
        gradient_of_z(wdy[k], n[k], means, rstd);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) g[i] += wdy[k][i];
      }
      store_gradient<X, Z>(g, args, mask, vector_access, row, col, valid);
      if (args.dbias != nullptr) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dbias.add(k * kColumns + i, inside(i, valid, vector_access) ? g[i] : 0.0f);
      }
    }
  }

  int slot = 0;
  const auto add_groups = [&](const ColumnSums<kFast>& sums, float* buffer) {
    if (buffer == nullptr) return;
    __syncthreads();  // the readers of the previous sums are done
    sums.publish(buffer);
    __syncthreads();
    float* const out = partial_row(args, partition, slot++);
    for (int col = static_cast<int>(threadIdx.x); col < args.n_cols; col += static_cast<int>(blockDim.x)) {
      const int word = col / step * kColumns + col % kColumns, owner = col % step / kColumns;
      float total = 0.0f;
      for (int i = 0; i < n_groups; ++i) total += buffer[word * kBackwardThreads + i * row_threads + owner];
      out[col] = total;
    }
  };
  add_groups(dbias, dbias_buffer);
  add_groups(dweight, dweight_buffer);
  add_groups(dnorm_bias, dnorm_bias_buffer);
}

// How much of its rows a wide block keeps in dynamic shared memory between its two walks over them.
struct WideCache {
  int batch_rows;  // rows walked together, 1 to kMaxBatchRows
  int64_t tiles;   // of each row, the first tiles (blockDim * kColumns columns each) are kept, the others read again
};
constexpr int kMaxBatchRows = 4;

// Rows too wide for sums in registers: a block takes its rows in small batches. The first walk takes each row's means
// and keeps what fits of dy and z in shared memory; the second goes by columns, each thread adding its columns over the
// batch's rows before it touches their running sums, which live in the block's partial rows (mostly in L2).
template <typename X, typename Z, bool kVectorAccess>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    row_norm_backward_wide_kernel(const RowNormBackward args, const BackwardPartition partition,
                                  const WideCache cache) {
  constexpr int kColumns = kChunkColumns;
  constexpr int kZWords = Chunk<Z, kColumns>::kWords;
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_SHARED(float4, row_values, kMaxBatchRows);  // mean, rstd and the two means of the gradient
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const int dy_words = kColumns * size_of(args.y_dtype) / 4;
  const int64_t first_col = static_cast<int64_t>(threadIdx.x) * kColumns,
                step = static_cast<int64_t>(blockDim.x) * kColumns;
  RowSum<0> sum_over_row(static_cast<int>(blockDim.x), 0, shared);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);

  // Word by word across the threads: no bank conflicts, and every thread reads back only what it wrote.
  const auto kept_words = [&](int batch_row, int64_t tile) {
    return kept + ((batch_row * cache.tiles + tile) * (dy_words + kZWords)) * blockDim.x + threadIdx.x;
  };
  const int64_t block_begin = blockIdx.x * partition.rows_per_block;
  const int64_t block_end =
      block_begin + partition.rows_per_block < args.n_rows ? block_begin + partition.rows_per_block : args.n_rows;

  for (int64_t first_row = block_begin; first_row < block_end; first_row += cache.batch_rows) {
    const int batch_rows =
        first_row + cache.batch_rows < block_end ? cache.batch_rows : static_cast<int>(block_end - first_row);
    for (int r = 0; args.dy != nullptr && r < batch_rows; ++r) {
      const int64_t row = first_row + r;
      const float mean = args.mean != nullptr ? __ldg(args.mean + row) : 0.0f;
      const float rstd = __ldg(args.rstd + row);
      float2 sums = make_float2(0.0f, 0.0f);
      int64_t tile = 0;
      for (int64_t col = first_col; col < args.n_cols; col += step, ++tile) {
        const int valid = valid_columns<kColumns>(col, args.n_cols, kVectorAccess);
        GradientChunk<Z, kColumns> chunk;
        load_gradient(chunk, args, args.y_dtype, kVectorAccess, row, col, valid);
        if (tile < cache.tiles) {
          uint32_t* words = kept_words(r, tile);
#pragma unroll
          for (int i = 0; i < kZWords; ++i) words[i * blockDim.x] = chunk.z.word[i];
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            if (i < dy_words) words[(kZWords + i) * blockDim.x] = chunk.dy.word[i];
          }
        }
        float wdy[kColumns], n[kColumns];
        normalise(chunk, args.y_dtype, mean, rstd, kVectorAccess, valid, wdy, n);
        apply_weight(wdy, args, kVectorAccess, col, valid);
        float2 chunk_sums = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) chunk_sums = add(chunk_sums, make_float2(wdy[i] * n[i], wdy[i]));
        sums = add(sums, chunk_sums);
      }
      const float2 means = row_means(sum_over_row(sums), args);
      if (threadIdx.x == 0) row_values[r] = make_float4(mean, rstd, means.x, means.y);
    }
    __syncthreads();

    int64_t tile = 0;
    for (int64_t col = first_col; col < args.n_cols; col += step, ++tile) {
      const int valid = valid_columns<kColumns>(col, args.n_cols, kVectorAccess);
      float dbias[kColumns] = {}, dweight[kColumns] = {}, dnorm_bias[kColumns] = {};
      const auto visit_sums = [&](auto&& visit) {
        int slot = 0;
        if (args.dbias != nullptr) visit(dbias, partial_row(args, partition, slot++));
        if (args.dweight != nullptr) visit(dweight, partial_row(args, partition, slot++));
        if (args.dnorm_bias != nullptr) visit(dnorm_bias, partial_row(args, partition, slot++));
      };
      if (first_row != block_begin) {
        visit_sums([&](float (&sum)[kColumns], float* partial) {
          Chunk<float, kColumns> running;
          load_chunk<false>(running, partial, col, kVectorAccess, valid);
          unpack(running, sum);
        });
      }
      for (int r = 0; r < batch_rows; ++r) {
        const int64_t row = first_row + r;
        float g[kColumns] = {};
        if (args.dz != nullptr) {
          Chunk<Z, kColumns> dz;
          load_chunk(dz, args.dz, row * args.dz_row_stride + col, kVectorAccess, valid);
          unpack(dz, g);
        }
        if (args.dy != nullptr) {
          GradientChunk<Z, kColumns> chunk;
          if (tile < cache.tiles) {
            const uint32_t* words = kept_words(r, tile);
#pragma unroll
            for (int i = 0; i < kZWords; ++i) chunk.z.word[i] = words[i * blockDim.x];
#pragma unroll
            for (int i = 0; i < kColumns; ++i) chunk.dy.word[i] = i < dy_words ? words[(kZWords + i) * blockDim.x] : 0;
          } else {
            load_gradient(chunk, args, args.y_dtype, kVectorAccess, row, col, valid);
          }
          const float4 values = row_values[r];
          float wdy[kColumns], n[kColumns];
          normalise(chunk, args.y_dtype, values.x, values.y, kVectorAccess, valid, wdy, n);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) {
            dweight[i] += wdy[i] * n[i];
            dnorm_bias[i] += wdy[i];
          }
          apply_weight(wdy, args, kVectorAccess, col, valid);
          gradient_of_z(wdy, n, make_float2(values.z, values.w), values.y);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) g[i] += wdy[i];
        }
        store_gradient<X, Z>(g, args, mask, kVectorAccess, row, col, valid);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dbias[i] += inside(i, valid, kVectorAccess) ? g[i] : 0.0f;
      }
      visit_sums([&](float (&sum)[kColumns], float* partial) {
        store_rounded<float>(partial, col, sum, kVectorAccess, valid);
      });
    }
    __syncthreads();  // row_values is free for the next batch
  }
}

// out[slot][col] = sum over blocks of partials[slot][block][col], rounded to the parameter's dtype. A block takes 32
// columns of one slot (blockIdx.y); its warps take partial rows in turn and are added in order.
struct PartialSums {
  void* out[kMaxWanted];
  DType dtype[kMaxWanted];
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads) row_norm_partials_kernel(const float* workspace, const int64_t n_blocks,
                                                                     const int64_t n_cols, const PartialSums sums) {
  ONETRIP_SHARED(float, warp_sums, kMaxThreads);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int slot = static_cast<int>(blockIdx.y);
  void* const out = slot == 0 ? sums.out[0] : slot == 1 ? sums.out[1] : sums.out[2];
  const DType dtype = slot == 0 ? sums.dtype[0] : slot == 1 ? sums.dtype[1] : sums.dtype[2];
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kWarpThreads; first < n_cols;
       first += static_cast<int64_t>(gridDim.x) * kWarpThreads) {
    const int64_t col = first + lane;
    float sum = 0.0f;
    if (col < n_cols) {
#pragma unroll 4
      for (int64_t block = warp; block < n_blocks; block += kThreads / kWarpThreads) {
        sum += __ldg(workspace + (slot * n_blocks + block) * n_cols + col);
      }
    }
    __syncthreads();
    warp_sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp == 0 && col < n_cols) {
      float total = 0.0f;
      for (int i = 0; i < kThreads / kWarpThreads; ++i) total += warp_sums[i * kWarpThreads + lane];
      if (dtype == DType::kFloat32) {
        static_cast<float*>(out)[col] = total;
      } else if (dtype == DType::kFloat16) {
        static_cast<__half*>(out)[col] = __float2half_rn(total);
      } else {
        static_cast<__nv_bfloat16*>(out)[col] = __float2bfloat16_rn(total);
      }
    }
  }
}

}  // namespace onetrip
