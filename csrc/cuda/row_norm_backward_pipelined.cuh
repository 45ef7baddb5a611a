// Gradients of aligned rows of up to 65,536 columns, with the next rows prefetched into shared memory by cp.async.
// row_norm_backward.cuh has the formulas.
//
// A block takes the rows of one part. Its groups of threads take the rows in turn, and each thread always the same 16
// columns, so the sums over rows stay on the SM. Rows of more than 8192 columns are shared by the 2, 4 or 8 blocks of a
// cluster, as one group. 512 threads with 128 registers each fill an SM. Each thread prefetches what it will read
// itself; the only synchronization is the sum over a row, and with dropout the exchange of masks. With 16-bit dy and z
// an SM has up to 128 KB in flight. Moves n_cols * (read dy, z, dz + write dx, dresidual) bytes a row, each once, and 4
// * n_cols a part and sum.
#pragma once
#include "row_norm_backward.cuh"

namespace onetrip {

// Threads that share a row, how many rows ahead they prefetch dy and z, and dz (dz <= dy_z; 0: dz is not prefetched),
// and the elements from one row of a group to its next, in dy, z and the outputs.
struct PipelinePlan {
  int row_threads;  // of a block
  int dy_z, dz;
  int64_t dy_step, z_step, out_step;
};
constexpr int kMaxStages = 4;

// Two chunks a thread: what every row costs a thread beside its columns (addresses, the sum, the statistics) is twice
// as many instructions as a chunk is. A row's first chunks come before its second ones, block by block.
constexpr int kPipelinedThreads = 512, kPipelinedChunks = 2;
constexpr int kPipelinedColumns = kPipelinedChunks * kChunkColumns;

// A thread's columns in pieces of 16 bytes.
template <typename T>
constexpr int kChunkPieces = kChunkColumns * static_cast<int>(sizeof(T)) / 16;
template <typename T>
constexpr int kPieces = kPipelinedChunks * kChunkPieces<T>;

// Pieces of shared memory: the weights, of one group's threads; and for every thread the sums of dbias and the stages.
__host__ __device__ __forceinline__ int weight_pieces(const RowNormBackward& args) {
  return args.weight != nullptr ? kPieces<float> : 0;
}
__host__ __device__ __forceinline__ int dbias_pieces(const RowNormBackward& args) {
  return args.dbias != nullptr ? kPieces<float> : 0;
}
template <typename Z, typename Y>
constexpr int kStagePieces = kPieces<Z> + kPieces<Y>;

// The plan of a part's groups: rows to prefetch are as many of dy and z as fit into a block's shared memory, then of
// dz; 0 if none fits. shared_bytes: dynamic shared memory that a block may have.
template <typename Z, typename Y>
PipelinePlan pipeline_plan(const RowNormBackward& args, int row_threads, const BackwardPartition& partition,
                           int64_t shared_bytes) {
  const int64_t per_thread = (shared_bytes / 16 / row_threads - weight_pieces(args)) / partition.n_groups;
  const int64_t rows = static_cast<int64_t>(partition.n_parts) * partition.n_groups;
  PipelinePlan plan{row_threads, 0, 0, rows * args.dy_row_stride, rows * args.z_row_stride, rows * args.n_cols};
  int64_t n_pieces = per_thread - dbias_pieces(args);
  while (plan.dy_z < kMaxStages && n_pieces >= kStagePieces<Z, Y>) ++plan.dy_z, n_pieces -= kStagePieces<Z, Y>;
  while (args.dz != nullptr && plan.dz < plan.dy_z && n_pieces >= kPieces<Z>) ++plan.dz, n_pieces -= kPieces<Z>;
  return plan;
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

// Y: dy's type. kRowThreads: lanes of a warp; 0: whole warps of the block, as the plan says; kClusterRow: the cluster's
// blocks. The grid is (blocks a row) x (parts).
template <typename X, typename Z, typename Y, int kRowThreads>
__global__ void __launch_bounds__(kPipelinedThreads, 1)
    row_norm_backward_pipelined_kernel(const RowNormBackward args, const BackwardPartition partition,
                                       const PipelinePlan plan) {
#if ONETRIP_COPY_ASYNC
  if constexpr (kRowThreads != kClusterRow || ONETRIP_CLUSTERS != 0) {
    constexpr int kColumns = kChunkColumns, kChunks = kPipelinedChunks;
    constexpr bool kApart = kHalvesApart<Z>;
    allow_next_kernel();
    const int threads = static_cast<int>(blockDim.x);
    const int row_threads = kRowThreads > 0 ? kRowThreads : plan.row_threads, n_groups = partition.n_groups;
    const int group = static_cast<int>(threadIdx.x) / row_threads;
    const int thread = static_cast<int>(threadIdx.x) - group * row_threads;
    ONETRIP_SHARED(float2, shared, 2 * (kRowThreads == kClusterRow ? kMaxClusterWarps : kMaxWarps));
    auto sum_over_row = [&] {
      if constexpr (kRowThreads == kClusterRow) {
        return RowSum<kClusterRow>(shared);
      } else {
        return RowSum<kRowThreads>(row_threads, group, shared);
      }
    }();
    ONETRIP_SHARED(DropoutState, dropout_state, 1);
    const DropoutMask mask(args.dropout, dropout_state);
    const int first_of_block = static_cast<int>(blockIdx.x) * row_threads * kPipelinedColumns;
    const int first_col = first_of_block + first_column<kApart>(thread), chunk_step = row_threads * kColumns;
    const auto has_columns = [&](int chunk) { return first_col + chunk * chunk_step < args.n_cols; };
    // All of a chunk that has columns; of one whose halves are apart, perhaps the first half.
    const auto valid_of = [&](int chunk) {
      return valid_columns<kApart>(first_col + chunk * chunk_step, static_cast<int>(args.n_cols), true);
    };
    const int n_rows = rows_of_part(partition, blockIdx.y, args.n_rows);
    const int64_t first_row = row_of_part(partition, blockIdx.y, group, group);

    // The weights: [piece][thread of the group]. This thread's own pieces: [piece][thread]. Accesses of 16 bytes have
    // no bank conflicts; copies of 8 bytes into half pieces have two-way ones.
    ONETRIP_DYNAMIC_SHARED(uint4, weights);
    uint4* const pieces = weights + weight_pieces(args) * row_threads;
    const auto weight_piece = [&](int i) { return weights + i * row_threads + thread; };
    const auto piece = [&](int i) { return pieces + i * threads + static_cast<int>(threadIdx.x); };
    const auto read_words = [&](uint32_t* word, const auto& place, int first, int n_pieces) {
#pragma unroll
      for (int i = 0; i < n_pieces; ++i) {
        const uint4 v = *place(first + i);
        word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
      }
    };
    const auto read_floats = [&](float (&value)[kColumns], const auto& place, int first) {
      uint32_t word[kColumns];
      read_words(word, place, first, kChunkPieces<float>);
      unpack_words<float>(word, value);
    };
    const auto write_floats = [&](const float (&value)[kColumns], const auto& place, int first) {
#pragma unroll
      for (int i = 0; i < kChunkPieces<float>; ++i) {
        *place(first + i) = make_uint4(__float_as_uint(value[4 * i]), __float_as_uint(value[4 * i + 1]),
                                       __float_as_uint(value[4 * i + 2]), __float_as_uint(value[4 * i + 3]));
      }
    };
    // Where a chunk's pieces are: of the weights or dbias, of z and dy in a stage, of dz in one of its stages.
    const auto floats_at = [](int chunk) { return chunk * kChunkPieces<float>; };
    const int first_stage = dbias_pieces(args), first_dz_stage = first_stage + plan.dy_z * kStagePieces<Z, Y>;
    const auto z_at = [&](int stage, int chunk) {
      return first_stage + stage * kStagePieces<Z, Y> + chunk * kChunkPieces<Z>;
    };
    const auto dy_at = [&](int stage, int chunk) { return z_at(stage, kChunks) + chunk * kChunkPieces<Y>; };
    const auto dz_at = [&](int stage, int chunk) {
      return first_dz_stage + stage * kPieces<Z> + chunk * kChunkPieces<Z>;
    };

    const auto copy = [&](int first, const auto* from, int chunk) {
      constexpr int kBytes = static_cast<int>(sizeof(*from));
      if constexpr (kApart) {
        const int valid = valid_of(chunk);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (valid <= half * kHalfColumns) continue;
          const auto* const from_half = from + half * kHalfStep<kApart>;
          if constexpr (kBytes == 4) {
            copy_async<16>(piece(first + half), from_half);
          } else {
            copy_async<8>(reinterpret_cast<uint2*>(piece(first)) + half, from_half);
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kColumns * kBytes / 16; ++i)
          copy_async<16>(piece(first + i), reinterpret_cast<const uint4*>(from) + i);
      }
    };
    // Rows of the part are numbered from 0 on; this thread's group takes r = group, group + n_groups, ...
    // dy and z of the next row to copy.
    const Y* next_dy = static_cast<const Y*>(args.dy) + first_row * args.dy_row_stride + first_col;
    const Z* next_z = static_cast<const Z*>(args.z) + first_row * args.z_row_stride + first_col;
    const auto copy_dy_z = [&](int stage, int chunk) {
      copy(z_at(stage, chunk), next_z + chunk * chunk_step, chunk);
      copy(dy_at(stage, chunk), next_dy + chunk * chunk_step, chunk);
    };
    const auto commit_dy_z = [&] {
      copy_async_commit();
      next_dy += plan.dy_step;
      next_z += plan.z_step;
    };
    const auto dz_of_row = [&](int r) {
      return static_cast<const Z*>(args.dz) + row_of_part(partition, blockIdx.y, group, r) * args.dz_row_stride +
             first_col;
    };
    const auto copy_dz = [&](int stage, int r) {
      if (plan.dz != 0 && r >= 0 && r < n_rows) {
        const Z* const dz = dz_of_row(r);
#pragma unroll
        for (int k = 0; k < kChunks; ++k) {
          if (has_columns(k)) copy(dz_at(stage, k), dz + k * chunk_step, k);
        }
      }
      copy_async_commit();
    };
    if constexpr (kApart) {
      // dy and z of second halves past the row's end, which no copy reaches, stay 0: n would be computed from them.
      // What they are in dz is neither stored nor added up.
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (valid_of(k) != kHalfColumns) continue;
        for (int stage = 0; stage < plan.dy_z; ++stage) {
          *piece(z_at(stage, k) + 1) = make_uint4(0, 0, 0, 0);
          uint4* const dy = piece(dy_at(stage, k) + kChunkPieces<Y> - 1);
          if constexpr (sizeof(Y) == 4) {
            *dy = make_uint4(0, 0, 0, 0);
          } else {
            reinterpret_cast<uint2*>(dy)[1] = make_uint2(0, 0);
          }
        }
      }
    }
    // As if rows before the part's first had been worked on.
#pragma unroll 1
    for (int stage = 0; stage < plan.dy_z; ++stage) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (group + stage * n_groups < n_rows && has_columns(k)) copy_dy_z(stage, k);
      }
      commit_dy_z();
      const int dz_stage = stage - (plan.dy_z - plan.dz);
      copy_dz(dz_stage, dz_stage < 0 ? -1 : group + dz_stage * n_groups);
    }

    float dweight[kChunks][kColumns] = {}, dnorm_bias[kChunks][kColumns] = {};
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (args.weight != nullptr && group == 0) {
        float weight[kColumns];
        load_values<kApart>(weight, args.weight, args.weight_dtype, first_col + k * chunk_step, true, valid_of(k));
#pragma unroll
        for (int i = 0; i < kColumns; ++i) weight[i] += args.weight_offset;
        write_floats(weight, weight_piece, floats_at(k));
      }
      if (args.dbias != nullptr) write_floats(dweight[k], piece, floats_at(k));  // zeros as yet
    }
    if (args.weight != nullptr) __syncthreads();

    float mean = 0.0f, rstd = 0.0f;
    const auto load_statistics = [&](int r) {
      if (r >= n_rows) return;
      const int64_t row = row_of_part(partition, blockIdx.y, group, r);
      if (args.mean != nullptr) mean = __ldg(args.mean + row);
      rstd = __ldg(args.rstd + row);
    };
    load_statistics(group);

    int64_t index = first_row * args.n_cols + first_col;  // of the row's first column here, in dx and dresidual
    int stage = 0, dz_stage = 0;
    // Lanes of a warp that share it with others go on without a row.
#pragma unroll 1
    for (int r = group; kRowThreads > 0 ? r - group < n_rows : r < n_rows; r += n_groups) {
      const bool has_row = kRowThreads <= 0 || r < n_rows;
      const bool copies = r + plan.dy_z * n_groups < n_rows;
      float g[kChunks][kColumns] = {}, n[kChunks][kColumns] = {};
      float2 sums[kChunks] = {};
      wait_for_stage(plan.dy_z);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (!has_row || !has_columns(k)) continue;
        GradientChunk<Z, kColumns> chunk;
        read_words(chunk.z.word, piece, z_at(stage, k), kChunkPieces<Z>);
        read_words(chunk.dy.word, piece, dy_at(stage, k), kChunkPieces<Y>);
        // Of halves past the row's end g is 0 and n is -mean * rstd, which counts for nothing while it is finite.
        normalise(chunk, DTypeOf<Y>::value, mean, rstd, true, kColumns, g[k], n[k]);
        if (copies) copy_dy_z(stage, k);
        if (args.dweight != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dweight[k][i] = fmaf(g[k][i], n[k][i], dweight[k][i]);
        }
        if (args.dnorm_bias != nullptr) {
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dnorm_bias[k][i] += g[k][i];
        }
        if (args.weight != nullptr) {
          float weight[kColumns];
          read_floats(weight, weight_piece, floats_at(k));
#pragma unroll
          for (int i = 0; i < kColumns; ++i) g[k][i] = __fmul_rn(g[k][i], weight[i]);
        }
        sums[k] = chunk_sums(g[k], n[k]);
      }
      commit_dy_z();
      stage = stage + 1 < plan.dy_z ? stage + 1 : 0;
      const float rstd_of_row = rstd;
      load_statistics(r + n_groups);
      const float2 means = row_means(sum_over_row(sums[0], sums[1]), args);
      if (plan.dz != 0) wait_for_stage(plan.dz);
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        int valid = kColumns;
        if constexpr (kApart) {  // whole warps: neighbours exchange masks
          if (first_of_block + thread / kWarpThreads * kWarpThreads * kColumns + k * chunk_step >= args.n_cols)
            continue;
          valid = has_row ? valid_of(k) : 0;
        } else {
          if (!has_row || !has_columns(k)) continue;
        }
        gradient_of_z(g[k], n[k], means, rstd_of_row);
        if (args.dz != nullptr) {
          Chunk<Z, kColumns> dz;
          if (plan.dz != 0) {
            read_words(dz.word, piece, dz_at(dz_stage, k), kChunkPieces<Z>);
          } else {
            load_chunk<kApart>(dz, dz_of_row(r), k * chunk_step, true, valid);
          }
          add_chunk(g[k], dz);
        }
        store_gradient<X, Z>(g[k], args, mask, true, index + k * chunk_step, valid);
        if (args.dbias != nullptr && valid > 0) {
          float dbias[kColumns];
          read_floats(dbias, piece, floats_at(k));
#pragma unroll
          for (int i = 0; i < kColumns; ++i) dbias[i] += g[k][i];
          write_floats(dbias, piece, floats_at(k));
        }
      }
      copy_dz(dz_stage, r + plan.dz * n_groups);
      dz_stage = dz_stage + 1 < plan.dz ? dz_stage + 1 : 0;
      index += plan.out_step;
    }

    // The groups' sums, added in order: those in the threads' first pieces.
    int slot = 0;
    const auto add_groups = [&] {
      __syncthreads();
      float* const out = partial_row(args, partition, blockIdx.y, slot++) + first_of_block;
      const int n_pieces = 2 * row_threads;  // of a chunk of every thread
      for (int i = static_cast<int>(threadIdx.x); i < kChunks * n_pieces; i += threads) {
        if (first_of_block + 4 * i >= args.n_cols) break;
        const int chunk = i / n_pieces, in_chunk = i - chunk * n_pieces;
        const ChunkPlace place = place_of_column<kApart>(4u * in_chunk);
        const uint4* const first = pieces + (floats_at(chunk) + place.element / 4) * threads + place.thread;
        float total[4] = {};
        for (int j = 0; j < n_groups; ++j) {
          const uint4 v = first[j * row_threads];
          total[0] += __uint_as_float(v.x), total[1] += __uint_as_float(v.y);
          total[2] += __uint_as_float(v.z), total[3] += __uint_as_float(v.w);
        }
        store_rounded<float, false>(out, 4 * i, total, true, 4);
      }
      __syncthreads();
    };
    const auto add_groups_of = [&](const float (&sums)[kChunks][kColumns]) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) write_floats(sums[k], piece, floats_at(k));
      add_groups();
    };
    copy_async_wait<0>();
    if (args.dbias != nullptr) add_groups();
    if (args.dweight != nullptr) add_groups_of(dweight);
    if (args.dnorm_bias != nullptr) add_groups_of(dnorm_bias);
  }
#endif
}

}  // namespace onetrip
