// Gradients of row_norm_forward.cuh. With n = (z - mean) * rstd and wdy = dy * (weight + weight_offset),
//
//   g = (wdy - n * mean(wdy * n) - mean(wdy)) * rstd + dz        (mean(wdy) is left out for RMSNorm)
//   dresidual = g;  dx = dropout_backward(g);  dbias = sum dx;  dweight = sum dy * n;  dnorm_bias = sum dy   (over
//   rows)
//
// One pass: dy, z (and dz) are read once, dx (and dresidual) written once. The sums over rows are float32: every block
// keeps those of its own rows on the SM and writes them as one partial row; row_norm_partials_kernel adds the partial
// rows. GPUs that can pipeline take most rows by row_norm_backward_pipelined.cuh; wide ones that none of these takes
// are in row_norm_backward_wide.cuh.
//
// The gradients of a row are the same bits whichever kernel takes it. So no compiler may fuse a product with a sum, or
// not, as it likes: products are __fmul_rn, or fmaf where they are fused.
#pragma once
#include "dropout.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// Columns of a chunk, in every path. All kernels of an (X, Z) pair give a thread the same columns of it, or their sums
// would take another order (vec.cuh).
constexpr int kBackwardColumns = kChunkColumns;
constexpr int kBackwardThreads = 512;  // of a block, or as near to it as whole groups come
constexpr int kMaxWanted = 3;

// Which rows make a partial row, how threads share them, and where the partial sums go: workspace is
// [n_wanted][n_parts][n_cols]. A part has n_groups rows, one a group, of every n_parts * n_groups, so that all blocks
// walk through memory side by side. (Consecutive rows a part took 3 to 9% longer in bfloat16 on an H200.)
struct BackwardPartition {
  int rows_per_part;  // n_groups for each of its steps, of which the last may have fewer, or none: rows_of_part
  int n_parts;
  int row_threads, n_groups;
};

// The tensor's row that is row r of a part, where the group takes r = group, group + n_groups, ... Computed again
// wherever it is wanted.
__device__ __forceinline__ int64_t row_of_part(const BackwardPartition& partition, uint32_t part, int group, int r) {
  compiler_barrier(part);
  const int first = static_cast<int>(part) * partition.n_groups + group;
  return first + static_cast<int64_t>(r - group) * partition.n_parts;
}

__device__ __forceinline__ int rows_of_part(const BackwardPartition& partition, uint32_t part, int64_t n_rows) {
  const int n_groups = partition.n_groups, before_last_step = partition.rows_per_part - n_groups;
  const int64_t left = n_rows - row_of_part(partition, part, 0, before_last_step);
  return before_last_step + static_cast<int>(left < 0 ? 0 : left < n_groups ? left : n_groups);
}

template <typename Z, int kColumns>
struct GradientChunk {
  AnyChunk<kColumns> dy;
  Chunk<Z, kColumns> z;
};

template <typename Z, int kColumns>
__device__ __forceinline__ void compiler_barrier(GradientChunk<Z, kColumns>& chunk, DType dy_dtype) {
  compiler_barrier(chunk.z);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (i < kColumns * size_of(dy_dtype) / 4) compiler_barrier(chunk.dy.word[i]);
  }
}

template <typename Z, int kColumns>
__device__ __forceinline__ void load_gradient(GradientChunk<Z, kColumns>& chunk, const RowNormBackward& args,
                                              DType dy_dtype, bool vector_access, int64_t row, int64_t col, int valid) {
  constexpr bool kApart = kHalvesApart<Z>;
  load_chunk<kApart>(chunk.z, args.z, row * args.z_row_stride + col, vector_access, valid);
  load_chunk<kApart>(chunk.dy, args.dy, dy_dtype, row * args.dy_row_stride + col, vector_access, valid);
}

// dy and n of one chunk; both are 0 past the row's end, where dy reads as 0 and n is set to it.
template <typename Z, int kColumns>
__device__ __forceinline__ void normalise(const GradientChunk<Z, kColumns>& chunk, DType dy_dtype, float mean,
                                          float rstd, bool vector_access, int valid, float (&dy)[kColumns],
                                          float (&n)[kColumns]) {
  unpack(chunk.z, n);
  unpack(chunk.dy, dy_dtype, dy);
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    n[i] = inside<kHalvesApart<Z> >(i, valid, vector_access) ? __fmul_rn(n[i] - mean, rstd) : 0.0f;
}

template <bool kApart, int kColumns>
__device__ __forceinline__ void apply_weight(float (&dy)[kColumns], const RowNormBackward& args, bool vector_access,
                                             int64_t col, int valid) {
  if (args.weight == nullptr) return;
  float weight[kColumns];
  load_values<kApart>(weight, args.weight, args.weight_dtype, col, vector_access, valid);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) dy[i] = __fmul_rn(dy[i], weight[i] + args.weight_offset);
}

// The sums of wdy * n (x) and wdy (y) over a chunk.
template <int kColumns>
__device__ __forceinline__ float2 chunk_sums(const float (&wdy)[kColumns], const float (&n)[kColumns]) {
  float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums = make_float2(fmaf(wdy[i], n[i], sums.x), sums.y + wdy[i]);
  return sums;
}

// The means of wdy * n (x) and wdy (y) over the row.
__device__ __forceinline__ float2 row_means(float2 sums, const RowNormBackward& args) {
  return make_float2(mean_of(sums.x, args.n_cols), args.norm == Norm::kLayer ? mean_of(sums.y, args.n_cols) : 0.0f);
}

template <int kColumns>
__device__ __forceinline__ void gradient_of_z(float (&wdy)[kColumns], const float (&n)[kColumns], float2 means,
                                              float rstd) {
#pragma unroll
  for (int i = 0; i < kColumns; ++i) wdy[i] = __fmul_rn(fmaf(-n[i], means.x, wdy[i]) - means.y, rstd);
}

template <typename Z, int kColumns>
__device__ __forceinline__ void add_chunk(float (&g)[kColumns], const Chunk<Z, kColumns>& chunk) {
  float added[kColumns];
  unpack(chunk, added);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) g[i] += added[i];
}

template <typename Z, int kColumns>
__device__ __forceinline__ void add_dz(float (&g)[kColumns], const RowNormBackward& args, bool vector_access,
                                       int64_t row, int64_t col, int valid) {
  if (args.dz == nullptr) return;
  Chunk<Z, kColumns> dz;
  load_chunk<kHalvesApart<Z> >(dz, args.dz, row * args.dz_row_stride + col, vector_access, valid);
  add_chunk(g, dz);
}

// Writes dresidual and dx from g, of the chunk that begins with element index; leaves dropout_backward(g) in g. Where
// DropoutMask::apply asks for all lanes of the warp, so does this.
template <typename X, typename Z, int kColumns>
__device__ __forceinline__ void store_gradient(float (&g)[kColumns], const RowNormBackward& args,
                                               const DropoutMask& mask, bool vector_access, int64_t index, int valid) {
  constexpr bool kApart = kHalvesApart<Z>;
  if (args.dresidual != nullptr) store_rounded<Z, kApart>(args.dresidual, index, g, vector_access, valid);
  if (args.dx == nullptr && args.dbias == nullptr) return;
  mask.apply<kApart>(g, index, vector_access);
  if (args.dx != nullptr) store_rounded<X, kApart>(args.dx, index, g, vector_access, valid);
}

__device__ __forceinline__ float* partial_row(const RowNormBackward& args, const BackwardPartition& partition,
                                              uint32_t part, int slot) {
  return args.workspace + (int64_t{slot} * partition.n_parts + part) * args.n_cols;
}

// One float a column of this thread of a sum over rows, until the block's rows are through: in registers, or in shared
// memory, word by word across the threads.
template <bool kInShared, bool kApart>
class ColumnSums {
 public:
  // buffer: [kBackwardColumns][kBackwardThreads] floats.
  __device__ ColumnSums(float* buffer, bool wanted) : buffer_(buffer + threadIdx.x) {
    if (kInShared && wanted) {
#pragma unroll
      for (int i = 0; i < kBackwardColumns; ++i) buffer_[i * kBackwardThreads] = 0.0f;
    }
  }
  // valid, vector_access: which of them belong to the row.
  __device__ __forceinline__ void add(const float (&value)[kBackwardColumns], int valid = kBackwardColumns,
                                      bool vector_access = true) {
#pragma unroll
    for (int i = 0; i < kBackwardColumns; ++i) sum(i) += inside<kApart>(i, valid, vector_access) ? value[i] : 0.0f;
  }
  __device__ __forceinline__ void add_products(const float (&a)[kBackwardColumns], const float (&b)[kBackwardColumns]) {
#pragma unroll
    for (int i = 0; i < kBackwardColumns; ++i) sum(i) = fmaf(a[i], b[i], sum(i));
  }
  __device__ __forceinline__ void copy_to(float (&value)[kBackwardColumns]) {
#pragma unroll
    for (int i = 0; i < kBackwardColumns; ++i) value[i] = sum(i);
  }
  // Puts the sums into the buffer, where they are not there yet, and returns it (the block's, not the thread's).
  __device__ __forceinline__ const float* publish() {
    if constexpr (!kInShared) {
#pragma unroll
      for (int i = 0; i < kBackwardColumns; ++i) buffer_[i * kBackwardThreads] = sum(i);
    }
    return buffer_ - threadIdx.x;
  }

 private:
  __device__ __forceinline__ float& sum(int i) {
    return kInShared ? buffer_[i * kBackwardThreads] : sum_[kInShared ? 0 : i];
  }

  float* buffer_;
  float sum_[kInShared ? 1 : kBackwardColumns] = {};
};

// Floats of dynamic shared memory. Fast: the weights and a buffer for each of dbias and dweight that is wanted, or one
// where none is but dnorm_bias. Otherwise: one buffer, used in turn.
constexpr int kSumFloats = kBackwardThreads * kBackwardColumns;
inline int backward_shared_floats(bool fast, const RowNormBackward& args, int row_threads) {
  if (!fast) return kSumFloats;
  const int n_buffers = args.dbias != nullptr && args.dweight != nullptr ? 2 : 1;
  return (args.weight != nullptr ? row_threads * kBackwardColumns : 0) + n_buffers * kSumFloats;
}

// Blocks an SM that the registers of the fast kernels must leave room for: half of its threads. Not so for float32 on
// sm_70, which has no registers for what is uniform in a warp and would spill 16 to 56 bytes a thread; a thread then
// has twice the bytes of a 16-bit type in flight.
template <typename X>
constexpr int backward_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
  return sizeof(X) == 2 ? 2 : 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
  return 1;
#else
  return 2;
#endif
}

// Groups of threads (kRowThreads lanes; 0: row_threads of the block, whole warps) take the block's rows in turn, each
// thread always the same kBackwardColumns columns, whose sums it keeps. The groups wait for nobody but themselves, so
// that some load while others reduce; at the end their sums are added in order.
//
// kFast: every access is vectorised and dy has x's dtype; 64 registers then suffice, with the weights, dbias and
// dweight in shared memory and dnorm_bias in registers: two blocks share the 100 KB of sm_120. Otherwise both are
// run-time choices. The sums have the same bits. Where GPUs copy rows ahead, what is left of kFast are rows without a
// norm, which have no sum to wait for; float32 then keeps half as many threads, of twice the bytes: it would spill.
template <typename X, typename Z, int kRowThreads, bool kFast>
__global__ void __launch_bounds__(kBackwardThreads,
                                  kFast && (ONETRIP_COPY_ASYNC == 0 || sizeof(X) == 2) ? backward_blocks<X>() : 1)
    row_norm_backward_kernel(const RowNormBackward args, const bool aligned, const BackwardPartition partition) {
  constexpr int kColumns = kChunkColumns;
  constexpr bool kApart = kHalvesApart<Z>;
  // A float32 dz waits in memory: for the sum over the row there are no 8 registers left to hold it.
  constexpr bool kDzEarly = !kFast || sizeof(Z) == 2;
  // 16-bit dy and z wait for the sum over the row as they are, in half the registers of wdy and n.
  constexpr bool kComputeTwice = kFast && sizeof(X) == 2;
  allow_next_kernel();
  ONETRIP_SHARED(float2, shared, 2 * kMaxWarps);
  ONETRIP_DYNAMIC_SHARED(float, buffers);
  const bool vector_access = kFast || aligned;
  const DType dy_dtype = kFast ? DTypeOf<X>::value : args.y_dtype;
  const int row_threads = kRowThreads == 0 ? partition.row_threads : kRowThreads;
  const int n_groups = partition.n_groups;
  const int group = static_cast<int>(threadIdx.x) / row_threads;
  const int thread = static_cast<int>(threadIdx.x) - group * row_threads;
  int col = first_column<kApart>(thread);
  const int padded_cols = row_threads * kColumns;
  RowSum<kRowThreads> sum_over_row(row_threads, group, shared);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);

  float* const weights = buffers;
  if (kFast && args.weight != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < padded_cols; i += static_cast<int>(blockDim.x)) {
      weights[i] = i < args.n_cols ? load_parameter(args.weight, args.weight_dtype, i) + args.weight_offset : 0.0f;
    }
    __syncthreads();
  }
  // A buffer in shared memory for each wanted sum that is kept there, one behind the other; any of them serves to add
  // up the groups' sums of one that is not.
  float* const first_buffer = weights + (kFast && args.weight != nullptr ? padded_cols : 0);
  float* const second_buffer = first_buffer + (kFast && args.dbias != nullptr ? kSumFloats : 0);
  ColumnSums<kFast, kApart> dbias(first_buffer, args.dbias != nullptr);
  ColumnSums<kFast, kApart> dweight(second_buffer, args.dweight != nullptr);
  ColumnSums<false, kApart> dnorm_bias(first_buffer, args.dnorm_bias != nullptr);

  // Lanes of a warp that share it with others go on without a row.
  for (int first_row = 0; first_row < partition.rows_per_part; first_row += n_groups) {
    const int64_t row = row_of_part(partition, blockIdx.x, group, group + first_row);
    const bool has_row = row < args.n_rows;
    const int n_cols = has_row ? static_cast<int>(args.n_cols) : 0;
    compiler_barrier(col);  // or a pair of registers would hold each tensor's address of this column
    const int valid = valid_columns<kApart>(col, n_cols, vector_access);
    Chunk<Z, kColumns> dz;
    GradientChunk<Z, kColumns> held;
    if (args.dy != nullptr) load_gradient(held, args, dy_dtype, vector_access, row, col, valid);
    if (kDzEarly && args.dz != nullptr) {
      load_chunk<kApart>(dz, args.dz, row * args.dz_row_stride + col, vector_access, valid);
    }
    const auto weigh = [&](float (&dy)[kColumns]) {
      if (!kFast) {
        apply_weight<kApart>(dy, args, vector_access, col, valid);
      } else if (args.weight != nullptr) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dy[i] = __fmul_rn(dy[i], weights[col + column_of<kApart>(i)]);
      }
    };
    float g[kColumns];
    if (args.dy != nullptr) {
      const float mean = args.mean != nullptr && n_cols != 0 ? __ldg(args.mean + row) : 0.0f;
      const float rstd = n_cols != 0 ? __ldg(args.rstd + row) : 0.0f;
      float n[kColumns];
      normalise(held, dy_dtype, mean, rstd, vector_access, valid, g, n);
      if (args.dweight != nullptr) dweight.add_products(g, n);
      if (args.dnorm_bias != nullptr) dnorm_bias.add(g);
      weigh(g);
      const float2 means = row_means(sum_over_row(chunk_sums(g, n)), args);
      if (kComputeTwice) {
        compiler_barrier(held, dy_dtype);
        normalise(held, dy_dtype, mean, rstd, vector_access, valid, g, n);
        weigh(g);
      }
      gradient_of_z(g, n, means, rstd);
    } else {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) g[i] = 0.0f;
    }
    if (args.dz != nullptr) {
      if (!kDzEarly) load_chunk<kApart>(dz, args.dz, row * args.dz_row_stride + col, vector_access, valid);
      add_chunk(g, dz);
    }
    store_gradient<X, Z>(g, args, mask, vector_access, row * args.n_cols + col, valid);
    if (args.dbias != nullptr) dbias.add(g, valid, vector_access);
  }

  int slot = 0;
  const auto add_groups = [&](auto& sums, bool wanted) {
    if (!wanted) return;
    __syncthreads();  // the readers of the previous sums are done
    const float* const buffer = sums.publish();
    __syncthreads();
    float* const out = partial_row(args, partition, blockIdx.x, slot++);
    for (int i = static_cast<int>(threadIdx.x); i < args.n_cols; i += static_cast<int>(blockDim.x)) {
      const ChunkPlace place = place_of_column<kApart>(static_cast<unsigned>(i));
      const float* const sum = buffer + place.element * kBackwardThreads + place.thread;
      float total = 0.0f;
      for (int j = 0; j < n_groups; ++j) total += sum[j * row_threads];
      out[i] = total;
    }
  };
  add_groups(dbias, args.dbias != nullptr);
  add_groups(dweight, args.dweight != nullptr);
  add_groups(dnorm_bias, args.dnorm_bias != nullptr);
}

// out[slot][col] = sum over parts of partials[slot][part][col], rounded to the parameter's dtype. A block takes 8, 16
// or 32 columns of one slot (blockIdx.y), as few as it takes to occupy every SM: 32 bytes are a sector. 32 groups of
// threads (threadIdx.y), or as many as there are partial rows, take these in turn and are added in order, whatever the
// columns.
struct PartialSums {
  void* out[kMaxWanted];
  DType dtype[kMaxWanted];
};
constexpr int kPartialGroups = 32, kFewestPartialColumns = 8;

template <int kThreads>
__global__ void __launch_bounds__(kThreads) row_norm_partials_kernel(const float* workspace, const int64_t n_parts,
                                                                     const int64_t n_cols, const PartialSums sums) {
  ONETRIP_SHARED(float, group_sums, kThreads);
  const int columns = static_cast<int>(blockDim.x), n_groups = static_cast<int>(blockDim.y);
  const int lane = static_cast<int>(threadIdx.x), group = static_cast<int>(threadIdx.y);
  const int slot = static_cast<int>(blockIdx.y);
  void* const out = slot == 0 ? sums.out[0] : slot == 1 ? sums.out[1] : sums.out[2];
  const DType dtype = slot == 0 ? sums.dtype[0] : slot == 1 ? sums.dtype[1] : sums.dtype[2];
  wait_for_previous_kernel();
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * columns; first < n_cols;
       first += static_cast<int64_t>(gridDim.x) * columns) {
    const int64_t col = first + lane;
    float sum = 0.0f;
    if (col < n_cols) {
      const float* const column = workspace + slot * n_parts * n_cols + col;
#pragma unroll 4
      for (int64_t part = group; part < n_parts; part += kPartialGroups) sum += __ldcs(column + part * n_cols);
    }
    __syncthreads();
    group_sums[group * columns + lane] = sum;
    __syncthreads();
    if (group == 0 && col < n_cols) {
      float total = 0.0f;
      for (int i = 0; i < n_groups; ++i) total += group_sums[i * columns + lane];
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
