// Gradients of aligned rows of 4097 to 65,536 columns: row_norm_backward.cuh has the formulas.
//
// A row is shared by 1, 2, 4 or 8 blocks, a cluster, of at most 512 threads, each of which always takes the same 16
// columns. The cluster walks the rows of its part one after another, so that the sums over rows stay on the SM: one
// trip, in which dy, z (and dz) are read once and dx (and dresidual) written once. The block has its SM to itself and
// reduces one row at a time; meanwhile the next rows' dy, z and dz are on their way to shared memory. Every thread
// copies what it will read itself, and nobody waits for anybody but in the sum over the row. Of 16-bit dy and z a full
// block has up to 4 rows, 128 KB, in flight; of float32 up to 2 or 3.
#pragma once
#include "row_norm_backward.cuh"

namespace onetrip {

// How many rows ahead a thread copies: dy and z, and dz; 0 of dz: it is loaded when it is wanted. Not more of dz.
struct ClusterStages {
  int dy_z, dz;
};
constexpr int kMaxStages = 4;

// Two chunks a thread: what every row costs a thread beside its columns (addresses, the sum, the statistics) is twice
// as many instructions as a chunk is. The block's first chunks come before its second ones.
constexpr int kWalkThreads = 512, kWalkChunks = 2;
constexpr int kWalkColumns = kWalkChunks * kChunkColumns;

// A thread's columns in pieces of 16 bytes.
template <typename T>
constexpr int kChunkPieces = kChunkColumns * static_cast<int>(sizeof(T)) / 16;
template <typename T>
constexpr int kPieces = kWalkChunks * kChunkPieces<T>;

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
__global__ void __launch_bounds__(kWalkThreads, 1)
    row_norm_backward_cluster_kernel(const RowNormBackward args, const BackwardPartition partition,
                                     const ClusterStages stages) {
#if ONETRIP_COPY_ASYNC
  if constexpr (kRowThreads == 0 || ONETRIP_CLUSTERS != 0) {
    constexpr int kColumns = kChunkColumns, kChunks = kWalkChunks;
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
    const int threads = static_cast<int>(blockDim.x);
    const int first_col = (static_cast<int>(blockIdx.x) * kChunks * threads + static_cast<int>(threadIdx.x)) * kColumns;
    const auto column = [&](int chunk) { return first_col + chunk * threads * kColumns; };
    const auto has_columns = [&](int chunk) { return column(chunk) < args.n_cols; };
    const auto row_number = [&](int r) { return part_begin(partition, blockIdx.y) + r; };
    const int64_t rows_left = args.n_rows - row_number(0);
    const int n_rows = static_cast<int>(rows_left < partition.rows_per_part ? rows_left : partition.rows_per_part);

    // This thread's pieces: [piece][thread], without bank conflicts.
    ONETRIP_DYNAMIC_SHARED(uint4, pieces);
    const auto piece = [&](int i) { return pieces + i * threads + static_cast<int>(threadIdx.x); };
    const auto read_words = [&](uint32_t* word, int first, int n_pieces) {
#pragma unroll
      for (int i = 0; i < n_pieces; ++i) {
        const uint4 v = *piece(first + i);
        word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
      }
    };
    const auto read_floats = [&](float (&value)[kColumns], int first) {
      uint32_t word[kColumns];
      read_words(word, first, kChunkPieces<float>);
      unpack_words<float>(word, value);
    };
    const auto write_floats = [&](const float (&value)[kColumns], int first) {
#pragma unroll
      for (int i = 0; i < kChunkPieces<float>; ++i) {
        *piece(first + i) = make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                                       __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
      }
    };
    // Where a chunk's pieces are: of the weights, of dbias, of z and dy in a stage, of dz in one of its stages.
    constexpr int kStagePieces = kPieces<Z> + kPieces<X>;
    const auto weight_at = [&](int chunk) { return chunk * kChunkPieces<float>; };
    const int first_dbias = args.weight != nullptr ? kPieces<float> : 0;
    const auto dbias_at = [&](int chunk) { return first_dbias + chunk * kChunkPieces<float>; };
    const int first_stage = fixed_pieces(args), first_dz_stage = first_stage + stages.dy_z * kStagePieces;
    const auto z_at = [&](int stage, int chunk) {
      return first_stage + stage * kStagePieces + chunk * kChunkPieces<Z>;
    };
    const auto dy_at = [&](int stage, int chunk) {
      return first_stage + stage * kStagePieces + kPieces<Z> + chunk * kChunkPieces<X>;
    };
    const auto dz_at = [&](int stage, int chunk) {
      return first_dz_stage + stage * kPieces<Z> + chunk * kChunkPieces<Z>;
    };

    const auto copy = [&](int first, const auto* from) {
#pragma unroll
      for (int i = 0; i < kColumns * static_cast<int>(sizeof(*from)) / 16; ++i) {
        copy_async_16(piece(first + i), reinterpret_cast<const uint4*>(from) + i);
      }
    };
    const auto copy_dy_z = [&](int stage, int r) {
      if (r < n_rows) {
        const X* const dy = static_cast<const X*>(args.dy) + row_number(r) * args.dy_row_stride;
        const Z* const z = static_cast<const Z*>(args.z) + row_number(r) * args.z_row_stride;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (!has_columns(k)) continue;
          copy(z_at(stage, k), z + column(k));
          copy(dy_at(stage, k), dy + column(k));
        }
      }
      copy_async_commit();
    };
    const auto copy_dz = [&](int stage, int r) {
      if (stages.dz != 0 && r >= 0 && r < n_rows) {
        const Z* const dz = static_cast<const Z*>(args.dz) + row_number(r) * args.dz_row_stride;
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (has_columns(k)) copy(dz_at(stage, k), dz + column(k));
        }
      }
      copy_async_commit();
    };
    // As if rows before the part's first had been worked on.
#pragma unroll 1
    for (int r = 0; r < stages.dy_z; ++r) {
      copy_dy_z(r, r);
      copy_dz(r - (stages.dy_z - stages.dz), r - (stages.dy_z - stages.dz));
    }

    float dweight[kChunks][kColumns] = {}, dnorm_bias[kChunks][kColumns] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      // Past the row's end there are zeros wherever others read numbers.
      if (!has_columns(k)) {
        for (int stage = 0; stage < stages.dy_z; ++stage) {
          for (int i = 0; i < kChunkPieces<Z>; ++i) *piece(z_at(stage, k) + i) = make_uint4(0, 0, 0, 0);
          for (int i = 0; i < kChunkPieces<X>; ++i) *piece(dy_at(stage, k) + i) = make_uint4(0, 0, 0, 0);
        }
        for (int stage = 0; stage < stages.dz; ++stage) {
          for (int i = 0; i < kChunkPieces<Z>; ++i) *piece(dz_at(stage, k) + i) = make_uint4(0, 0, 0, 0);
        }
      }
      if (args.weight != nullptr) {
        float weight[kColumns];
        load_values(weight, args.weight, args.weight_dtype, column(k), true, has_columns(k) ? kColumns : 0);
#pragma unroll
        for (int i = 0; i < kColumns; ++i) weight[i] += args.weight_offset;
        write_floats(weight, weight_at(k));
      }
      if (args.dbias != nullptr) write_floats(dweight[k], dbias_at(k));  // zeros as yet
    }

    float mean = 0.0f, rstd = 0.0f;
    const auto load_statistics = [&](int r) {
      if (r >= n_rows) return;
      if (args.mean != nullptr) mean = __ldg(args.mean + row_number(r));
      rstd = __ldg(args.rstd + row_number(r));
    };
    load_statistics(0);

    int stage = 0, dz_stage = 0;
#pragma unroll 1
    for (int r = 0; r < n_rows; ++r) {
      float g[kChunks][kColumns], n[kChunks][kColumns];
      wait_for_stage(stages.dy_z);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        GradientChunk<Z, kColumns> chunk;
        read_words(chunk.z.word, z_at(stage, k), kChunkPieces<Z>);
        read_words(chunk.dy.word, dy_at(stage, k), kChunkPieces<X>);
        // Zeros past the row's end: (0 - 0) * 0.
        normalise(chunk, DTypeOf<X>::value, has_columns(k) ? mean : 0.0f, has_columns(k) ? rstd : 0.0f, true, kColumns,
                  g[k], n[k]);
      }
      copy_dy_z(stage, r + stages.dy_z);
      stage = stage + 1 < stages.dy_z ? stage + 1 : 0;
      if (args.dweight != nullptr) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dweight[k][i] = fmaf(g[k][i], n[k][i], dweight[k][i]);
        }
      }
      if (args.dnorm_bias != nullptr) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dnorm_bias[k][i] += g[k][i];
        }
      }
      if (args.weight != nullptr) {
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          float weight[kColumns];
          read_floats(weight, weight_at(k));
#pragma unroll
          for (int i = 0; i < kColumns; ++i) g[k][i] = __fmul_rn(g[k][i], weight[i]);
        }
      }
      const float rstd_of_row = rstd;
      load_statistics(r + 1);
      const float2 means = row_means(sum_over_row(chunk_sums(g[0], n[0]), chunk_sums(g[1], n[1])), args);
      if (stages.dz != 0) wait_for_stage(stages.dz);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        const int valid = has_columns(k) ? kColumns : 0;
        gradient_of_z(g[k], n[k], means, rstd_of_row);
        if (stages.dz != 0) {
          Chunk<Z, kColumns> dz;
          read_words(dz.word, dz_at(dz_stage, k), kChunkPieces<Z>);
          add_chunk(g[k], dz);
        } else {
          add_dz<Z>(g[k], args, true, row_number(r), column(k), valid);
        }
      }
      copy_dz(dz_stage, r + stages.dz);
      dz_stage = dz_stage + 1 < stages.dz ? dz_stage + 1 : 0;
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        store_gradient<X, Z, true>(g[k], args, mask, true, row_number(r), column(k), has_columns(k) ? kColumns : 0);
        if (args.dbias != nullptr) {
          float dbias[kColumns];
          read_floats(dbias, dbias_at(k));
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dbias[i] += g[k][i];
          write_floats(dbias, dbias_at(k));
        }
      }
    }

#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      int slot = 0;
      const auto store_sums = [&](const float (&sums)[kColumns]) {
        store_rounded<float>(partial_row(args, partition, blockIdx.y, slot++), column(k), sums, true,
                             has_columns(k) ? kColumns : 0);
      };
      if (args.dbias != nullptr) {
        float dbias[kColumns];
        read_floats(dbias, dbias_at(k));
        store_sums(dbias);
      }
      if (args.dweight != nullptr) store_sums(dweight[k]);
      if (args.dnorm_bias != nullptr) store_sums(dnorm_bias[k]);
    }
  }
#endif
}

}  // namespace onetrip
