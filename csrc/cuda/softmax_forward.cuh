// P = softmax(scale * scores + mask);  y = dropout(P)      (Bridle 1990; masks and dropout: Vaswani et al. 2017)
//
// scores, y, p: [n_rows, n_cols]; mask: read in place, by strides. p is P with the sign bit set where dropout drops.
// One float32 computation from the scores to y and p, each rounded once. Columns that causality hides are not read;
// zeros are written there. A row of nothing but -Inf gives zeros.
// Moves n_cols * (scores + y [+ p]) bytes a row, each once, where the row's threads hold it; of wider rows the scores
// that shared memory cannot keep are read twice. A mask that is broadcast comes from the caches.
#pragma once
#include "softmax_common.cuh"

namespace onetrip {

// What a launch adds to its arguments.
struct ForwardLaunch {
  RowThreads threads;
  Divisor mask_sizes[3];  // MaskRows::sizes 1 to 3
  Causality causality;
  int64_t kept_tiles;  // wide rows: the tiles (a chunk a thread) of the scores that shared memory keeps
};

// The mask of one row, and how many of its columns causality lets see.
struct RowMask {
  int64_t start;
  int64_t visible;
};

__device__ __forceinline__ RowMask row_mask_of(const SoftmaxForward& args, const ForwardLaunch& launch, int64_t row) {
  RowMask result{0, launch.causality.visible(row, args.n_cols)};
  const MaskRows& rows = args.mask_rows;
  if (args.mask == nullptr) return result;
  if (launch.causality.few_rows) {
    uint32_t rest = static_cast<uint32_t>(row);
#pragma unroll
    for (int k = 3; k > 0; --k) result.start += launch.mask_sizes[k - 1].divide(rest) * rows.strides[k];
    result.start += rest * rows.strides[0];
  } else {
    int64_t rest = row;
#pragma unroll 1
    for (int k = 3; k > 0; --k) result.start += launch.mask_sizes[k - 1].divide(rest) * rows.strides[k];
    result.start += rest * rows.strides[0];
  }
  return result;
}

// A chunk of the mask as it lies in memory: bytes, 16-bit or 32-bit elements, from the first word on.
struct MaskChunk {
  uint32_t word[kChunkColumns];
};

template <typename Bits>
__device__ __forceinline__ void load_mask_elements(MaskChunk& chunk, const void* mask, int64_t index, int64_t stride,
                                                   int valid) {
  constexpr int kBytes = sizeof(Bits);
  const Bits* address = static_cast<const Bits*>(mask) + index;
#pragma unroll
  for (int i = 0; i < kChunkColumns * kBytes / 4; ++i) chunk.word[i] = 0;
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) {
    if (i < valid) {
      chunk.word[i * kBytes / 4] |= static_cast<uint32_t>(__ldg(address + i * stride)) << (i * kBytes % 4 * 8);
    }
  }
}

template <bool kFast>
__device__ __forceinline__ void load_mask(MaskChunk& chunk, const SoftmaxForward& args, int64_t index, int valid) {
  const int64_t stride = args.mask_rows.col_stride;
  if (args.mask_type == MaskType::kFloat32) {
    if (kFast) {
      load_words<4, kChunkColumns, true>(chunk.word, static_cast<const float*>(args.mask) + index, true, valid);
    } else {
      load_mask_elements<uint32_t>(chunk, args.mask, index, stride, valid);
    }
  } else if (args.mask_type == MaskType::kBool) {
    if (kFast) {
      const uint2 bytes = __ldg(reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(args.mask) + index));
      chunk.word[0] = bytes.x, chunk.word[1] = bytes.y;
    } else {
      load_mask_elements<uint8_t>(chunk, args.mask, index, stride, valid);
    }
  } else {
    if (kFast) {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(args.mask) + index));
      chunk.word[0] = words.x, chunk.word[1] = words.y, chunk.word[2] = words.z, chunk.word[3] = words.w;
    } else {
      load_mask_elements<uint16_t>(chunk, args.mask, index, stride, valid);
    }
  }
}

// value = scale * value + mask.
__device__ __forceinline__ void apply_mask(float (&value)[kChunkColumns], const MaskChunk& chunk, MaskType type,
                                           float scale) {
  if (type == MaskType::kBool) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
      value[i] = (chunk.word[i / 4] >> (i % 4 * 8) & 0xFFu) != 0 ? __fmul_rn(value[i], scale) : minus_infinity();
    }
    return;
  }
  float added[kChunkColumns];
  if (type == MaskType::kFloat32) {
    unpack_words<float>(chunk.word, added);
  } else if (type == MaskType::kFloat16) {
    unpack_words<__half>(chunk.word, added);
  } else {
    unpack_words<__nv_bfloat16>(chunk.word, added);
  }
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) value[i] = fmaf(value[i], scale, added[i]);
}

// scale * scores + mask of one chunk; -Inf where nothing is to be seen.
template <typename T, bool kFast, typename Col>
__device__ __forceinline__ void values_of(float (&value)[kChunkColumns], const Chunk<T, kChunkColumns>& scores,
                                          const SoftmaxForward& args, int64_t mask_start, Col col, Col visible) {
  const int seen = visible_columns(col, visible);
  unpack(scores, value);
  if (args.mask == nullptr || seen == 0) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[i] = __fmul_rn(value[i], args.scale);
  } else {
    MaskChunk mask;
    load_mask<kFast>(mask, args, mask_start + (kFast ? col : col * args.mask_rows.col_stride), seen);
    apply_mask(value, mask, args.mask_type, args.scale);
  }
  if (seen < kChunkColumns) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[i] = i < seen ? value[i] : minus_infinity();
  }
}

// What is subtracted before exp: the largest value, but 0 where that is -Inf. Then a row of nothing but -Inf sums to 0
// instead of NaN, and a NaN among such values still shows.
__device__ __forceinline__ float subtrahend_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// exp(value - subtrahend). (The product with log2(e) comes last: that of a large finite mask would overflow.)
__device__ __forceinline__ float exponential(float value, float subtrahend) {
  return exp2_flushed(__fmul_rn(value - subtrahend, 1.4426950408889634f));
}

// Of a row with this largest value and sum of exp(value - subtrahend_of(largest)): the subtrahend (x) and 1 / sum (y).
__device__ __forceinline__ float2 scaling_of(float largest, float sum) {
  return make_float2(subtrahend_of(largest), sum == 0.0f ? 0.0f : 1.0f / sum);
}

// The same, from the largest values (x) and sums (y) that warps have left in slots. First every lane joins those of its
// number, so that up to 32 warps are joined in one order, wherever they run.
__device__ __forceinline__ float2 join_slots(const float2* slots, int n_warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  float largest = minus_infinity(), sum = 0.0f;
#pragma unroll 1
  for (int i = lane; i < n_warps; i += kWarpThreads) largest = fmaxf(largest, slots[i].x);
  largest = lanes_max(largest, kWarpThreads);
  const float subtrahend = subtrahend_of(largest);
#pragma unroll 1
  for (int i = lane; i < n_warps; i += kWarpThreads) {
    sum += __fmul_rn(slots[i].y, exponential(slots[i].x, subtrahend));
  }
  return scaling_of(largest, lanes_sum(sum, kWarpThreads));
}

// Over n_warps warps of the block. slots: [kMaxWarps], used once a block.
__device__ __forceinline__ float2 join_warps(float largest, float sum, int n_warps, float2* slots) {
  if (n_warps == 1) return scaling_of(largest, sum);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  if (lane == 0) slots[warp] = make_float2(largest, sum);
  __syncthreads();
  return join_slots(slots, n_warps);
}

// The dropout mask of a chunk in the low 8 bits: 1 where it is kept, and where nothing is to be seen.
template <typename Col>
__device__ __forceinline__ uint32_t kept_columns(const SoftmaxForward& args, const DropoutMask& dropout,
                                                 bool vector_access, int64_t row, Col col, Col visible) {
  const int seen = visible_columns(col, visible);
  const uint32_t unseen = 0xFFu << seen & 0xFFu;
  if (seen == 0) return unseen;
  return (dropout.kept_bits<kChunkColumns>(static_cast<uint64_t>(row * args.n_cols + col), vector_access) & 0xFFu) |
         unseen;
}

// Writes y, and p, of a chunk of probabilities; zeros where nothing is to be seen.
template <typename T, typename Col>
__device__ __forceinline__ void store_probabilities(float (&value)[kChunkColumns], uint32_t kept,
                                                    const SoftmaxForward& args, const DropoutMask& dropout,
                                                    bool vector_access, int64_t row, Col col, Col visible) {
  const int valid = valid_columns<kChunkColumns>(col, static_cast<Col>(args.n_cols), vector_access);
  const int seen = visible_columns(col, visible);
  const int64_t index = row * args.n_cols + col;
  if (seen < kChunkColumns) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[i] = i < seen ? value[i] : 0.0f;
  }
  if (args.p != nullptr) {
    float p[kChunkColumns];
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) p[i] = (kept >> i & 1u) != 0 ? value[i] : -value[i];
    store_rounded<T>(args.p, index, p, vector_access, valid);
  }
  if (dropout.on()) {
    const float scale = dropout.scale();
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[i] = (kept >> i & 1u) != 0 ? __fmul_rn(value[i], scale) : 0.0f;
  }
  store_rounded<T>(args.y, index, value, vector_access, valid);
}

// The row's threads hold it, from the one read of the scores to the one write: kChunks chunks a thread, of which those
// past the row's end (or past what causality lets see) cost a uniform branch each. kChunks 1: lanes of a warp a row.
// Otherwise: whole warps. Each warp takes the largest of its own values, so that one barrier joins the warps.
// thread: which of the count threads of the row this is. join(largest, sum): scaling_of() the row, over its warps.
// Threads whose row lies past the end go through all of it, for the sake of the others, with a row of no columns.
template <typename T, int kChunks, bool kFast, typename Join>
__device__ __forceinline__ void forward_row(const SoftmaxForward& args, const ForwardLaunch& launch,
                                            const DropoutMask& dropout, int64_t row, int thread, int count,
                                            const Join& join) {
  const int step = count * kChunkColumns;
  int first_col = thread * kChunkColumns;  // forgotten before use: addresses cost less than registers
  const bool has_row = row < args.n_rows;
  const int n_cols = has_row ? static_cast<int>(args.n_cols) : 0;
  RowMask row_mask{0, 0};
  if (has_row) row_mask = row_mask_of(args, launch, row);
  const int visible = static_cast<int>(row_mask.visible);

  float value[kChunks][kChunkColumns];
  // The dropout mask is drawn while the scores are on their way, where there are registers for both; never after, when
  // every value waits.
  constexpr bool kDrawLate = sizeof(T) == 2 || kChunks == 1;
  uint32_t kept = ~0u;  // 8 bits a chunk
  static_assert(kChunks <= 4, "32 bits");
  const auto draw = [&] {
    if (!dropout.on()) return;
    forget(first_col);
#pragma unroll 1
    for (int k = 0; k < kChunks && k * step < visible; ++k) {
      kept &= ~(0xFFu << (8 * k)) | kept_columns(args, dropout, kFast, row, first_col + k * step, visible) << (8 * k);
    }
  };
  if (!kDrawLate) draw();
  {
    Chunk<T, kChunkColumns> scores[kChunks];
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      const int col = first_col + k * step;
      if (k == 0 || k * step < visible) {
        load_chunk(scores[k], args.scores, row * args.scores_row_stride + col, kFast,
                   valid_columns<kChunkColumns>(col, visible, kFast));
      }
    }
    if (kDrawLate) draw();
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (k == 0 || k * step < visible) {
        forget(first_col);
        values_of<T, kFast>(value[k], scores[k], args, row_mask.start, first_col + k * step, visible);
      }
    }
  }
  float largest = minus_infinity();
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k == 0 || k * step < visible) {
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) largest = fmaxf(largest, value[k][i]);
    }
  }
  const int lanes = kChunks == 1 ? count : kWarpThreads;
  largest = lanes_max(largest, lanes);
  const float subtrahend = subtrahend_of(largest);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k == 0 || k * step < visible) {
      float chunk_sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) {
        value[k][i] = exponential(value[k][i], subtrahend);
        chunk_sum += value[k][i];
      }
      sum += chunk_sum;
    }
  }
  sum = lanes_sum(sum, lanes);
  const float2 joined = join(largest, sum);
  const float factor = exponential(largest, joined.x) * joined.y;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (k == 0 || k * step < n_cols) {
      forget(first_col);
      float p[kChunkColumns];
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) {
        p[i] = k == 0 || k * step < visible ? __fmul_rn(value[k][i], factor) : 0.0f;
      }
      if (has_row) store_probabilities<T>(p, kept >> (8 * k), args, dropout, kFast, row, first_col + k * step, visible);
    }
  }
}

// Lanes of a warp, the warp, or the block a row.
template <typename T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kChunks == 1 ? kRowsThreads : kMaxThreads, kChunks == 1 ? 8 : 1)
    softmax_forward_kernel(const SoftmaxForward args, const ForwardLaunch launch) {
  ONETRIP_SHARED(float2, slots, kMaxWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask dropout(args.dropout, dropout_state);
  const int count = launch.threads.count;
  const int rows_per_block = count > kWarpThreads ? 1 : static_cast<int>(blockDim.x) >> launch.threads.log2_lanes;
  const int64_t row = first_row_of_block(rows_per_block) + launch.threads.group();
  forward_row<T, kChunks, kFast>(args, launch, dropout, row, launch.threads.thread(), count,
                                 [&](float largest, float sum) {
                                   return join_warps(largest, sum, kChunks == 1 ? 1 : count / kWarpThreads, slots);
                                 });
}

// The blocks of a cluster a row. While they meet for the first time, the row is on its way.
template <typename T>
__global__ void __launch_bounds__(kClusterThreads, kClusterBlocksPerSm)
    softmax_forward_cluster_kernel(const SoftmaxForward args, const ForwardLaunch launch) {
#if ONETRIP_CLUSTERS
  ONETRIP_SHARED(float2, shared, 2 * kMaxClusterWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  ClusterExchange exchange(shared);
  const DropoutMask dropout(args.dropout, dropout_state);
  const ClusterThreads threads;
  forward_row<T, kHeldChunks, true>(args, launch, dropout, threads.row, threads.thread, threads.count,
                                    [&](float largest, float sum) {
                                      const float2* const slots = exchange.tell<1>(make_float2(largest, sum));
                                      return join_slots(slots, ClusterExchange::n_warps());
                                    });
#endif
}

// Rows that their threads cannot hold: a block a row, two walks over it. The first keeps, thread by thread, the largest
// value and the sum so far (Milakov & Gimelshein 2018), and what fits of the scores in shared memory; the second
// computes every value again.
template <typename T, bool kFast>
__global__ void __launch_bounds__(kWideThreads, kWideBlocks)
    softmax_forward_wide_kernel(const SoftmaxForward args, const ForwardLaunch launch) {
  using Scores = Chunk<T, kChunkColumns>;
  ONETRIP_SHARED(float2, slots, kMaxWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const DropoutMask dropout(args.dropout, dropout_state);
  const int64_t row = first_row_of_block(1);
  if (row >= args.n_rows) return;
  const RowMask row_mask = row_mask_of(args, launch, row);
  const int64_t first_col = static_cast<int64_t>(threadIdx.x) * kChunkColumns, step = kWideThreads * kChunkColumns;
  const int64_t visible = row_mask.visible;
  const auto load = [&](Scores& scores, int64_t col) {
    load_chunk(scores, args.scores, row * args.scores_row_stride + col, kFast,
               valid_columns<kChunkColumns>(col, visible, kFast));
  };
  // Word by word across the threads: no bank conflicts, and every thread reads back only what it wrote.
  const auto kept_word = [&](int64_t tile, int i) -> uint32_t& {
    return kept[(tile * Scores::kWords + i) * kWideThreads + threadIdx.x];
  };

  float largest = minus_infinity(), sum = 0.0f;
  Scores next;
  load(next, first_col);
  int64_t tile = 0;
  for (int64_t col = first_col; col < visible; col += step, ++tile) {
    const Scores scores = next;
    load(next, col + step);  // on its way while this one is worked on
    if (tile < launch.kept_tiles) {
#pragma unroll
      for (int i = 0; i < Scores::kWords; ++i) kept_word(tile, i) = scores.word[i];
    }
    float value[kChunkColumns];
    values_of<T, kFast>(value, scores, args, row_mask.start, col, visible);
    const float before = largest;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) largest = fmaxf(largest, value[i]);
    const float subtrahend = subtrahend_of(largest);
    float chunk_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) chunk_sum += exponential(value[i], subtrahend);
    sum = fmaf(sum, exponential(before, subtrahend), chunk_sum);
  }
  const float before = largest;
  largest = lanes_max(largest, kWarpThreads);
  sum = lanes_sum(sum * exponential(before, subtrahend_of(largest)), kWarpThreads);
  const float2 joined = join_warps(largest, sum, kWideThreads / kWarpThreads, slots);

  tile = 0;
  for (int64_t col = first_col; col < args.n_cols; col += step, ++tile) {
    float value[kChunkColumns] = {};
    if (col < visible) {
      Scores scores;
      if (tile < launch.kept_tiles) {
#pragma unroll
        for (int i = 0; i < Scores::kWords; ++i) scores.word[i] = kept_word(tile, i);
      } else {
        load(scores, col);
      }
      values_of<T, kFast>(value, scores, args, row_mask.start, col, visible);
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) value[i] = __fmul_rn(exponential(value[i], joined.x), joined.y);
    }
    const uint32_t kept_bits = dropout.on() ? kept_columns(args, dropout, kFast, row, col, visible) : ~0u;
    store_probabilities<T>(value, kept_bits, args, dropout, kFast, row, col, visible);
  }
}

}  // namespace onetrip
