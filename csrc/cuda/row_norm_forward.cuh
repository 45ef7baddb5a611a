// z = residual + dropout(x + bias);  y = round_to(n_dtype, (z - mean) * rstd) * (weight + weight_offset) + norm_bias
//
// LayerNorm: Ba, Kiros & Hinton 2016. RMSNorm: Zhang & Sennrich 2019 (mean is 0 there).
// x, residual, z, y: [n_rows, n_cols]; weight, bias, norm_bias: [n_cols]; mean, rstd: [n_rows] float32.
// Moves n_cols * (x + residual + z + y) bytes a row, each once, where registers hold it: up to 16384 columns, 65536 in
// a cluster. Of wider rows the inputs (or z, where it is stored) are read a second time where shared memory cannot keep
// z. Parameters come from the caches.
#pragma once
#include "dropout.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// Chunks a thread. Of float32 rows two: what 64 registers hold, with a residual on its way. 16-bit rows wait for
// instructions too: three or four chunks share the sums over the row and the addresses, in 80 or 96 registers.
constexpr int kFewestChunks = 2;
template <typename Z>
constexpr int kMostChunks = sizeof(Z) == 2 ? 4 : kFewestChunks;

// The fewest lanes of a warp that hold a row: 8, 16 or 32, and 32 for a row that they do not hold.
constexpr int kFewestLanes = 8;
template <typename Z>
__host__ __device__ constexpr int lanes_of_row(int64_t n_cols) {
  int lanes = kFewestLanes;
  while (lanes < kWarpThreads && lanes * kMostChunks<Z> * kChunkColumns < n_cols) lanes *= 2;
  return lanes;
}

// Whether a thread can do without a chunk that begins past the row's end: read element by element, no lane helps
// another, and kernels have the chunks of their widest rows.
template <typename Col>
__device__ __forceinline__ bool is_left_out(bool vector_access, Col col, Col n_cols) {
  return !vector_access && col >= n_cols;
}

// How a kernel meets its tensors: element by element; vectorised; vectorised, with y and the parameters of z's dtype
// and n_dtype that or float32. Dtypes that are not known are run-time choices. The last saves instructions, which only
// 16-bit rows wait for.
enum class Access { kElements, kVectors, kUniform };
template <typename Z>
constexpr Access kQuickestAccess = sizeof(Z) == 2 ? Access::kUniform : Access::kVectors;

// The statistics of a row from its sums. The mean is rounded once: what the product with the reciprocal lost is added.
struct RowCount {
  float count, inverse;
  __device__ __forceinline__ explicit RowCount(int64_t n_cols)
      : count(static_cast<float>(n_cols)), inverse(quick_reciprocal(count)) {}
  __device__ __forceinline__ float mean(float sum) const {
    const float product = sum * inverse;
    return fmaf(fmaf(-count, product, sum), inverse, product);
  }
  __device__ __forceinline__ float rstd(float squares, float eps) const { return rsqrtf(fmaf(squares, inverse, eps)); }
};

// A row that its threads hold: kChunks chunks a thread, the k-th at column first + k * step.
template <typename Z, int kColumns, int kChunks>
struct HeldRow {
  Chunk<Z, kColumns> z[kChunks];
};

// Whether registers can hold two chunks of x and of the residual on their way past the dropout mask: otherwise 32 bytes
// a thread would spill.
constexpr bool kManyLoads = kUniformRegisters;

// Reads x and residual, where there are registers for both all loads before the first use, and rounds z to its dtype.
// n_cols: 0 for a thread without a row.
template <typename X, typename Z, int kColumns, int kChunks, typename Col>
__device__ __forceinline__ void compute_z(HeldRow<Z, kColumns, kChunks>& held, const RowNormForward& args,
                                          const DropoutMask& mask, bool vector_access, int64_t row, Col first, Col step,
                                          Col n_cols) {
  constexpr bool kApart = kHalvesApart<Z>;
  Chunk<X, kColumns> x[kChunks];
  Chunk<Z, kColumns> residual[kChunks];
  const auto load_residual = [&](int k) {
    const Col col = first + k * step;
    load_chunk<kApart>(residual[k], args.residual, row * args.residual_row_stride + col, vector_access,
                       valid_columns<kApart>(col, n_cols, vector_access));
  };
  constexpr bool kResidualEarly = kChunks == 1 || kManyLoads;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const Col col = first + k * step;
    load_chunk<kApart>(x[k], args.x, row * args.x_row_stride + col, vector_access,
                       valid_columns<kApart>(col, n_cols, vector_access));
    if (kResidualEarly && args.residual != nullptr) load_residual(k);
  }
  if constexpr (kApart && kChunks > 1) compiler_barrier(first);  // or the columns wait in registers as 64-bit numbers
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    const Col col = first + k * step;
    if (kChunks > 1 && is_left_out(vector_access, col, n_cols)) continue;
    const int valid = valid_columns<kApart>(col, n_cols, vector_access);
    float value[kColumns];
    compiler_barrier(x[k]);  // the other chunks wait as they were read
    unpack(x[k], value);
    if (args.bias != nullptr) {
      float bias[kColumns];
      load_values<kApart>(bias, args.bias, args.bias_dtype, col, vector_access, valid);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) value[i] += bias[i];
    }
    mask.apply<kApart>(value, row * args.n_cols + col, vector_access);
    if (args.residual != nullptr) {
      if (!kResidualEarly) load_residual(k);
      float added[kColumns];
      unpack(residual[k], added);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) value[i] = __fadd_rn(value[i], added[i]);
    }
    pack(held.z[k], value);
    compiler_barrier(held.z[k]);
  }
}

// y of one chunk; z centred, where that is what backward wants.
template <typename Z, int kColumns, typename Col>
__device__ __forceinline__ void finish_chunk(const Chunk<Z, kColumns>& z, const RowNormForward& args,
                                             bool vector_access, int64_t row, Col col, Col n_cols, float mean,
                                             float rstd) {
  constexpr bool kApart = kHalvesApart<Z>;
  const int valid = valid_columns<kApart>(col, n_cols, vector_access);
  const int64_t index = row * args.n_cols + col;
  float value[kColumns];
  unpack(z, value);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) value[i] -= mean;
  if (args.z != nullptr && args.center_z) store_rounded<Z, kApart>(args.z, index, value, vector_access, valid);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) value[i] = __fmul_rn(value[i], rstd);
  round_values(value, args.n_dtype);
  if (args.weight != nullptr) {
    float weight[kColumns];
    load_values<kApart>(weight, args.weight, args.weight_dtype, col, vector_access, valid);
    if (args.weight_offset != 0.0f) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) weight[i] += args.weight_offset;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) value[i] = __fmul_rn(value[i], weight[i]);
  }
  if (args.norm_bias != nullptr) {
    float norm_bias[kColumns];
    load_values<kApart>(norm_bias, args.norm_bias, args.norm_bias_dtype, col, vector_access, valid);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) value[i] += norm_bias[i];
  }
  store_values<kApart>(args.y, args.y_dtype, index, value, vector_access, valid);
}

__device__ __forceinline__ void store_statistics(const RowNormForward& args, int64_t row, float mean, float rstd) {
  if (args.mean != nullptr) args.mean[row] = mean;
  if (args.rstd != nullptr) args.rstd[row] = rstd;
}

// The row stays in registers between its one read and its one write; the variance is the two-pass one, of those
// registers. thread: which of the row_threads threads of its row this is. There is no loop over rows: addresses that a
// loop does not change would wait in registers for the next row. Threads whose row lies past the end go through all of
// it, for the sake of the others, with a row of no columns.
template <typename X, typename Z, int kChunks, bool kVectorAccess, typename SumOverRow>
__device__ __forceinline__ void forward_row(const RowNormForward& args, const DropoutMask& mask, int64_t row,
                                            int thread, int row_threads, SumOverRow& sum_over_row) {
  constexpr int kColumns = kChunkColumns;
  constexpr bool kApart = kHalvesApart<Z>;
  const int step = row_threads * kColumns;
  int first_col = first_column<kApart>(thread);  // forgotten before each use: addresses are cheaper than registers
  const int n_cols = row < args.n_rows ? static_cast<int>(args.n_cols) : 0;
  HeldRow<Z, kColumns, kChunks> held;
  compute_z<X>(held, args, mask, kVectorAccess, row, first_col, step, n_cols);
  if (args.z != nullptr && !args.center_z) {
    compiler_barrier(first_col);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int col = first_col + k * step;
      store_chunk<kApart>(args.z, row * args.n_cols + col, held.z[k], kVectorAccess,
                          valid_columns<kApart>(col, n_cols, kVectorAccess));
    }
  }
  if (args.norm == Norm::kNone) return;

  float mean = 0.0f;
  if (args.norm == Norm::kLayer) {
    float sum = 0.0f;
    compiler_barrier(first_col);
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (is_left_out(kVectorAccess, first_col + k * step, n_cols)) continue;
      const int valid = valid_columns<kApart>(first_col + k * step, n_cols, kVectorAccess);
      float value[kColumns], chunk_sum = 0.0f;
      unpack(held.z[k], value);
      compiler_barrier(held.z[k]);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) chunk_sum += inside<kApart>(i, valid, kVectorAccess) ? value[i] : 0.0f;
      sum += chunk_sum;
    }
    mean = RowCount(args.n_cols).mean(sum_over_row(sum));
  }
  float squares = 0.0f;
  compiler_barrier(first_col);
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (is_left_out(kVectorAccess, first_col + k * step, n_cols)) continue;
    const int valid = valid_columns<kApart>(first_col + k * step, n_cols, kVectorAccess);
    float value[kColumns], chunk_squares = 0.0f;
    unpack(held.z[k], value);
    compiler_barrier(held.z[k]);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float centred = inside<kApart>(i, valid, kVectorAccess) ? value[i] - mean : 0.0f;
      chunk_squares = fmaf(centred, centred, chunk_squares);
    }
    squares += chunk_squares;
  }
  const float rstd = RowCount(args.n_cols).rstd(sum_over_row(squares), args.eps);

#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    compiler_barrier(first_col);
    if (is_left_out(kVectorAccess, first_col + k * step, n_cols)) continue;
    finish_chunk(held.z[k], args, kVectorAccess, row, first_col + k * step, n_cols, mean, rstd);
  }
  if (thread == 0 && n_cols != 0) store_statistics(args, row, mean, rstd);
}

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// The same for Access::kUniform, to the same bits: dtypes are known, z is not centred, and the row waits as numbers. A
// plain LayerNorm of bfloat16 takes 17 to 20 instructions an element up to 8192 columns, where an H200's memory leaves
// time for 28.
template <typename X, typename Z, int kChunks, typename SumOverRow>
__device__ __forceinline__ void forward_uniform_row(const RowNormForward& args, const DropoutMask& mask, int64_t row,
                                                    int thread, int row_threads, SumOverRow& sum_over_row) {
  constexpr int kColumns = kChunkColumns;
  constexpr bool kResidualEarly = kManyLoads;
  const int step = row_threads * kColumns;
  int first_col = thread * kColumns;  // forgotten before its last uses: addresses are cheaper than registers
  const int n_cols = row < args.n_rows ? static_cast<int>(args.n_cols) : 0;
  const auto valid_of = [&](int k) { return valid_columns<false>(first_col + k * step, n_cols, true); };
  const auto load = [&](float (&value)[kColumns], const void* parameter, int k) {
    Chunk<Z, kColumns> chunk;
    load_chunk<false, false>(chunk, parameter, first_col + k * step, true, kColumns);
    unpack(chunk, value);
  };
  float z[kChunks][kColumns];
  {
    Chunk<X, kColumns> x[kChunks];
    Chunk<Z, kColumns> residual[kChunks];
    const X* const x_row = static_cast<const X*>(args.x) + row * args.x_row_stride + first_col;
    const Z* const residual_row = static_cast<const Z*>(args.residual) + row * args.residual_row_stride + first_col;
    const auto load_residual = [&](int k) {
      load_chunk<false>(residual[k], residual_row, k * step, true, valid_of(k));
    };
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      load_chunk<false>(x[k], x_row, k * step, true, valid_of(k));
      if (kResidualEarly && args.residual != nullptr) load_residual(k);
    }
    if (args.bias == nullptr && !mask.on() && args.residual == nullptr) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) unpack(x[k], z[k]);
    } else {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        compiler_barrier(x[k]);  // the other chunk waits as it was read
        unpack(x[k], z[k]);
        if (args.bias != nullptr && valid_of(k) != 0) {
          float bias[kColumns];
          load(bias, args.bias, k);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) z[k][i] += bias[i];
        }
        if (valid_of(k) != 0) mask.apply<false>(z[k], row * args.n_cols + first_col + k * step, true);
        if (args.residual != nullptr) {
          if (!kResidualEarly) load_residual(k);
          float added[kColumns];
          unpack(residual[k], added);
#pragma unroll
          for (int i = 0; i < kColumns; ++i) z[k][i] = __fadd_rn(z[k][i], added[i]);
        }
        round_through<Z>(z[k]);
      }
    }
  }
  if (args.z != nullptr) {
    compiler_barrier(first_col);
    Z* const z_row = static_cast<Z*>(args.z) + row * args.n_cols + first_col;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) store_rounded<Z, false>(z_row, k * step, z[k], true, valid_of(k));
  }
  if (args.norm == Norm::kNone) return;

  const RowCount row_count(args.n_cols);
  float mean = 0.0f;
  if (args.norm == Norm::kLayer) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      float chunk_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) chunk_sum += z[k][i];
      sum += chunk_sum;
    }
    mean = row_count.mean(sum_over_row(sum));
  }
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (valid_of(k) == 0) continue;
    float chunk_squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      z[k][i] -= mean;
      chunk_squares = fmaf(z[k][i], z[k][i], chunk_squares);
    }
    squares += chunk_squares;
  }
  const float rstd = row_count.rstd(sum_over_row(squares), args.eps);
  // Whether the weight has an offset is asked once: skipped one by one, its additions would cost what they cost.
  const auto finish = [&](auto has_offset) {
    compiler_barrier(first_col);
    Z* const y = static_cast<Z*>(args.y) + row * args.n_cols + first_col;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (valid_of(k) == 0) continue;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) z[k][i] = __fmul_rn(z[k][i], rstd);
      if (args.n_dtype != DType::kFloat32) round_through<Z>(z[k]);
      float parameter[kColumns];
      if (args.weight != nullptr) {
        load(parameter, args.weight, k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          z[k][i] = __fmul_rn(z[k][i], decltype(has_offset)::value ? parameter[i] + args.weight_offset : parameter[i]);
        }
      }
      if (args.norm_bias != nullptr) {
        load(parameter, args.norm_bias, k);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) z[k][i] += parameter[i];
      }
      store_rounded<Z, false>(y, k * step, z[k], true, kColumns);
    }
  };
  if (args.weight_offset == 0.0f) {
    finish(Constant<false>{});
  } else {
    finish(Constant<true>{});
  }
  if (thread == 0 && n_cols != 0) store_statistics(args, row, mean, rstd);
}

template <typename X, typename Z, int kChunks, Access kAccess, typename SumOverRow>
__device__ __forceinline__ void forward_row_by(const RowNormForward& args, const DropoutMask& mask, int64_t row,
                                               int thread, int row_threads, SumOverRow& sum_over_row) {
  if constexpr (kAccess == Access::kUniform) {
    forward_uniform_row<X, Z, kChunks>(args, mask, row, thread, row_threads, sum_over_row);
  } else {
    forward_row<X, Z, kChunks, kAccess == Access::kVectors>(args, mask, row, thread, row_threads, sum_over_row);
  }
}

// Blocks of lanes an SM that registers leave room for: of two chunks a thread half of its threads, or three eighths
// where 64 registers would spill, as in rows that are read element by element (a third of 1536 threads); of three and
// four, as many columns or more.
template <Access kAccess, int kChunks>
constexpr int lane_blocks() {
  if (kChunks > kFewestChunks) return kHalfOfResidentThreads / 128 * kFewestChunks / kChunks + 1;
  if (kAccess == Access::kElements) return kHalfOfResidentThreads / 128 * 3 / 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
  return kAccess == Access::kUniform ? 8 : 6;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
  return kAccess == Access::kUniform ? 6 : 8;
#else
  return kHalfOfResidentThreads / 128;
#endif
}

// The threads of the largest block: those of a row of 16384 columns.
template <int kChunks>
constexpr int kForwardThreads = kChunks == kFewestChunks ? kMaxThreads : kMaxThreads / 2;

// kRowThreads lanes take a row (0: the whole block, whose size the launcher fits to the row; or kAnyLanes).
template <typename X, typename Z, int kRowThreads, int kChunks, Access kAccess>
__global__ void __launch_bounds__(kRowThreads == 0 ? kForwardThreads<kChunks> : 128,
                                  kRowThreads == 0 ? 1 : lane_blocks<kAccess, kChunks>())
    row_norm_forward_kernel(const RowNormForward args) {
  ONETRIP_SHARED(float2, shared, kRowThreads == 0 ? 2 * kMaxWarps : 1);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);
  const int thread = static_cast<int>(threadIdx.x), n_threads = static_cast<int>(blockDim.x);
  const int row_threads = kRowThreads == 0           ? n_threads
                          : kRowThreads == kAnyLanes ? lanes_of_row<Z>(args.n_cols)
                                                     : kRowThreads;
  const int64_t row =
      kRowThreads == 0 ? first_row_of_block(1) : first_row_of_block(n_threads / row_threads) + thread / row_threads;
  const int thread_of_row = kRowThreads == 0 ? thread : thread % row_threads;
  BlockOrLanesSum<kRowThreads> sum_over_row(shared, row_threads);
  forward_row_by<X, Z, kChunks, kAccess>(args, mask, row, thread_of_row, row_threads, sum_over_row);
}

// The blocks of a cluster take a row, which never is without a norm: no thread leaves before the last sum. While they
// meet for the first time, the row is on its way.
template <typename X, typename Z>
__global__ void __launch_bounds__(kClusterColumns / (kMostChunks<Z> * kChunkColumns), kClusterBlocksPerSm)
    row_norm_forward_cluster_kernel(const RowNormForward args) {
#if ONETRIP_CLUSTERS
  ONETRIP_SHARED(float2, shared, 2 * kMaxClusterWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  RowSum<kClusterRow> sum_over_row(shared);
  const DropoutMask mask(args.dropout, dropout_state);
  const ClusterThreads threads;
  forward_row_by<X, Z, kMostChunks<Z>, kQuickestAccess<Z>>(args, mask, threads.row, threads.thread, threads.count,
                                                           sum_over_row);
#endif
}

// Rows that do not fit into registers: a block a row, two walks over it. The first joins the moments of its chunks
// (each chunk's own are two-pass, so nothing cancels) and keeps what fits of z in shared memory; the second computes
// the rest of z again, or reads it back where it was stored.
template <typename X, typename Z, bool kVectorAccess>
__global__ void __launch_bounds__(kWideThreads, 1)
    row_norm_forward_wide_kernel(const RowNormForward args, const int64_t kept_tiles) {
  constexpr int kColumns = kChunkColumns, kWords = Chunk<Z, kColumns>::kWords;
  constexpr bool kApart = kHalvesApart<Z>;
  ONETRIP_SHARED(Moments, shared, kMaxWarps);
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const int64_t first_col = first_column<kApart>(static_cast<int>(threadIdx.x)), step = kWideThreads * kColumns;
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask mask(args.dropout, dropout_state);
  const bool stores_plain_z = args.z != nullptr && !args.center_z;
  // Word by word across the threads: no bank conflicts, and every thread reads back only what it wrote.
  const auto kept_word = [&](int64_t tile, int i) -> uint32_t& {
    return kept[(tile * kWords + i) * kWideThreads + threadIdx.x];
  };

  const int64_t row = first_row_of_block(1);
  if (row >= args.n_rows) return;
  Moments moments{0.0f, 0.0f, 0.0f};
  int64_t tile = 0;
  for (int64_t first = 0; first < args.n_cols; first += step, ++tile) {
    const int64_t col = first + first_col;
    const int valid = valid_columns<kApart>(col, args.n_cols, kVectorAccess);
    HeldRow<Z, kColumns, 1> held;
    compute_z<X>(held, args, mask, kVectorAccess, row, col, step, args.n_cols);  // by all lanes: see DropoutMask
    if (valid == 0) break;
    if (stores_plain_z) store_chunk<kApart>(args.z, row * args.n_cols + col, held.z[0], kVectorAccess, valid);
    if (tile < kept_tiles) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) kept_word(tile, i) = held.z[0].word[i];
    }
    float value[kColumns];
    unpack(held.z[0], value);
    Moments chunk{static_cast<float>(valid), 0.0f, 0.0f};
    if (args.norm == Norm::kLayer) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) chunk.mean += inside<kApart>(i, valid, kVectorAccess) ? value[i] : 0.0f;
      chunk.mean /= chunk.count;
    }
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const float centred = inside<kApart>(i, valid, kVectorAccess) ? value[i] - chunk.mean : 0.0f;
      chunk.m2 = fmaf(centred, centred, chunk.m2);
    }
    moments = join(moments, chunk);
  }
  if (args.norm == Norm::kNone) return;
  moments = block_join(moments, shared);
  const float rstd = rsqrtf(mean_of(moments.m2, args.n_cols) + args.eps);

  tile = 0;
  for (int64_t first = 0; first < args.n_cols; first += step, ++tile) {
    const int64_t col = first + first_col;
    HeldRow<Z, kColumns, 1> held;
    if (tile < kept_tiles) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) held.z[0].word[i] = kept_word(tile, i);
    } else if (stores_plain_z) {
      load_chunk<kApart, false>(held.z[0], args.z, row * args.n_cols + col, kVectorAccess,
                                valid_columns<kApart>(col, args.n_cols, kVectorAccess));
    } else {
      compute_z<X>(held, args, mask, kVectorAccess, row, col, step, args.n_cols);
    }
    finish_chunk(held.z[0], args, kVectorAccess, row, col, args.n_cols, moments.mean, rstd);
  }
  if (threadIdx.x == 0) store_statistics(args, row, moments.mean, rstd);
}

}  // namespace onetrip
