// Gradients of aligned rows of 4097 to 65,536 columns: row_norm_backward.cuh has the formulas.
//
// A row is shared by 1, 2, 4 or 8 blocks, a cluster, of at most 1024 threads, each of which always takes the same 8
// columns. The cluster walks the rows of its part one after another, so that the sums over rows stay on the SM: one
// trip, in which dy, z (and dz) are read once and dx (and dresidual) written once. The block has its SM to itself and
// reduces one row at a time; meanwhile the next rows' dy, z and dz are on their way to shared memory. Every thread
// copies what it will read itself, and nobody waits for anybody but in the sum over the row. Of 16-bit dy and z a full
// block holds up to 4 rows, 128 KB, in flight; of float32 up to 2.
#pragma once
#include "row_norm_backward.cuh"

namespace onetrip {

// How many rows ahead a thread copies: dy and z, and dz; 0 of dz: it is loaded when it is wanted. Not more of dz.
struct ClusterStages {
  int dy_z, dz;
};
constexpr int kMaxStages = 4;

// A thread's chunk in pieces of 16 bytes.
template <typename T>
constexpr int kPieces = kChunkColumns * static_cast<int>(sizeof(T)) / 16;

// What stays in shared memory for all rows: the weights, and the sums of dbias.
__host__ __device__ __forceinline__ int fixed_pieces(const RowNormBackward& args) {
  return kPieces<float> * ((args.weight != nullptr ? 1 : 0) + (args.dbias != nullptr ? 1 : 0));
}

#if ONETRIP_COPY_ASYNC

// Every row commits two groups of copies: dy and z before its sum, dz after it. Those committed n_stages rows ago have
// arrived once the other one of that row and both of every row since may still be on their way.
__device__ __forceinline__ void wait_for_stage(int n_stages) {
  static_assert(kMaxStages == 4, "the cases");
  switch (n_stages) {
    case 1:
      return copy_async_wait<1>();
    case 2:
      return copy_async_wait<3>();
    case 3:
      return copy_async_wait<5>();
    default:
      return copy_async_wait<7>();
  }
}

#endif

// kRowThreads: 0 where one block has the whole row, kClusterRow where the cluster's blocks share it. The grid is
// (blocks a row) x (parts).
template <typename X, typename Z, int kRowThreads>
__global__ void __launch_bounds__(kMaxThreads, 1)
    row_norm_backward_cluster_kernel(const RowNormBackward args, const BackwardPartition partition,
                                     const ClusterStages stages) {
#if ONETRIP_COPY_ASYNC
  if constexpr (kRowThreads == 0 || ONETRIP_CLUSTERS != 0) {
    constexpr int kColumns = kChunkColumns;
    ONETRIP_SHARED(float2, shared, 2 * (kRowThreads == 0 ? kMaxWarps : kMaxClusterWarps));
    auto sum_over_row = [&] {
      if constexpr (kRowThreads == 0) {
        return RowSum<0>(static_cast<int>(blockDim.x), 0, shared);
      } else {
        return RowSum<kRowThreads>(shared);
      }
    }();
    ONETRIP_SHARED(DropoutState, dropout_state, 1);
    const DropoutMask mask(args.dropout, dropout_state);
    const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * kColumns;
    const bool has_columns = col < args.n_cols;
    const int valid = has_columns ? kColumns : 0;
    const int64_t rows_left = args.n_rows - part_begin(partition, blockIdx.y);
    const int n_rows = static_cast<int>(rows_left < partition.rows_per_part ? rows_left : partition.rows_per_part);

    // This thread's pieces: [piece][thread], without bank conflicts.
    ONETRIP_DYNAMIC_SHARED(uint4, pieces);
    const auto piece = [pieces](int i) { return pieces + i * static_cast<int>(blockDim.x) + threadIdx.x; };
    const auto read_words = [&](uint32_t* word, int first, int n_pieces) {
#pragma unroll
      for (int i = 0; i < n_pieces; ++i) {
        const uint4 v = *piece(first + i);
        word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
      }
    };
    const auto read_floats = [&](float (&value)[kColumns], int first) {
      uint32_t word[kColumns];
      read_words(word, first, kPieces<float>);
      unpack_words<float>(word, value);
    };
    const auto write_floats = [&](const float (&value)[kColumns], int first) {
#pragma unroll
      for (int i = 0; i < kPieces<float>; ++i) {
        *piece(first + i) = make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                                       __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
      }
    };
    constexpr int kWeights = 0, kStagePieces = kPieces<Z> + kPieces<X>;
    const int dbias_sums = args.weight != nullptr ? kPieces<float> : 0;
    const int first_stage = fixed_pieces(args), first_dz_stage = first_stage + stages.dy_z * kStagePieces;

    const auto copy = [&](int first, const auto* tensor, int64_t row_stride, int r) {
      const auto* const from = tensor + (part_begin(partition, blockIdx.y) + r) * row_stride + col;
#pragma unroll
      for (int i = 0; i < kColumns * static_cast<int>(sizeof(*tensor)) / 16; ++i) {
        copy_async_16(piece(first + i), reinterpret_cast<const uint4*>(from) + i);
      }
    };
    const auto copy_dy_z = [&](int stage, int r) {
      if (has_columns && r < n_rows) {
        const int first = first_stage + stage * kStagePieces;
        copy(first, static_cast<const Z*>(args.z), args.z_row_stride, r);
        copy(first + kPieces<Z>, static_cast<const X*>(args.dy), args.dy_row_stride, r);
      }
      copy_async_commit();
    };
    const auto copy_dz = [&](int stage, int r) {
      if (args.dz != nullptr && stages.dz != 0 && has_columns && r >= 0 && r < n_rows) {
        copy(first_dz_stage + stage * kPieces<Z>, static_cast<const Z*>(args.dz), args.dz_row_stride, r);
      }
      copy_async_commit();
    };
    // As if rows before the part's first had been worked on.
    for (int r = 0; r < stages.dy_z; ++r) {
      copy_dy_z(r, r);
      copy_dz(r - (stages.dy_z - stages.dz), r - (stages.dy_z - stages.dz));
    }

    // A thread past the row's end reads zeros wherever others read numbers, and so adds nothing.
    const float zeros[kColumns] = {};
    if (!has_columns) {
      for (int i = first_stage; i < first_dz_stage + stages.dz * kPieces<Z>; ++i) *piece(i) = make_uint4(0, 0, 0, 0);
    }
    if (args.weight != nullptr) {
      float weight[kColumns];
      load_values(weight, args.weight, args.weight_dtype, col, true, valid);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) weight[i] += args.weight_offset;
      write_floats(weight, kWeights);
    }
    if (args.dbias != nullptr) write_floats(zeros, dbias_sums);
    float dweight[kColumns] = {}, dnorm_bias[kColumns] = {};

    float mean = 0.0f, rstd = 0.0f;
    const auto load_statistics = [&](int r) {
      if (!has_columns || r >= n_rows) return;
      const int64_t row = part_begin(partition, blockIdx.y) + r;
      if (args.mean != nullptr) mean = __ldg(args.mean + row);
      rstd = __ldg(args.rstd + row);
    };
    load_statistics(0);

    int stage = 0, dz_stage = 0;
    for (int r = 0; r < n_rows; ++r) {
      float g[kColumns], n[kColumns];
      wait_for_stage(stages.dy_z);
      {
        GradientChunk<Z, kColumns> chunk;
        const int first = first_stage + stage * kStagePieces;
        read_words(chunk.z.word, first, kPieces<Z>);
        read_words(chunk.dy.word, first + kPieces<Z>, kPieces<X>);
        normalise(chunk, DTypeOf<X>::value, mean, rstd, true, kColumns, g, n);
      }
      copy_dy_z(stage, r + stages.dy_z);
      stage = stage + 1 < stages.dy_z ? stage + 1 : 0;
      if (args.dweight != nullptr) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dweight[i] = fmaf(g[i], n[i], dweight[i]);
      }
      if (args.dnorm_bias != nullptr) {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dnorm_bias[i] += g[i];
      }
      if (args.weight != nullptr) {
        float weight[kColumns];
        read_floats(weight, kWeights);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) g[i] = __fmul_rn(g[i], weight[i]);
      }
      const float rstd_of_row = rstd;
      load_statistics(r + 1);
      const float2 means = row_means(sum_over_row(chunk_sums(g, n)), args);
      gradient_of_z(g, n, means, rstd_of_row);
      const int64_t row = part_begin(partition, blockIdx.y) + r;
      if (stages.dz != 0) {
        wait_for_stage(stages.dz);
        Chunk<Z, kColumns> dz;
        read_words(dz.word, first_dz_stage + dz_stage * kPieces<Z>, kPieces<Z>);
        add_chunk(g, dz);
      } else {
        add_dz<Z>(g, args, true, row, col, valid);
      }
      copy_dz(dz_stage, r + stages.dz);
      dz_stage = dz_stage + 1 < stages.dz ? dz_stage + 1 : 0;
      store_gradient<X, Z>(g, args, mask, true, row, col, valid);
      if (args.dbias != nullptr) {
        float dbias[kColumns];
        read_floats(dbias, dbias_sums);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) dbias[i] += g[i];
        write_floats(dbias, dbias_sums);
      }
    }

    int slot = 0;
    const auto store_sums = [&](const float (&sums)[kColumns]) {
      store_rounded<float>(partial_row(args, partition, blockIdx.y, slot++), col, sums, true, valid);
    };
    if (args.dbias != nullptr) {
      float dbias[kColumns];
      read_floats(dbias, dbias_sums);
      store_sums(dbias);
    }
    if (args.dweight != nullptr) store_sums(dweight);
    if (args.dnorm_bias != nullptr) store_sums(dnorm_bias);
  }
#endif
}

}  // namespace onetrip
