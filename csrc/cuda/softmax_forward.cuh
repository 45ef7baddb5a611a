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
  bool plain;          // no mask, no causality, no dropout, no p to store
  int64_t kept_tiles;  // wide rows: the tiles (a chunk a thread) of the scores that shared memory keeps
};

// Where the mask of a row starts. Of a row past the end the start means nothing.
__device__ __forceinline__ int64_t mask_start_of(const SoftmaxForward& args, const ForwardLaunch& launch, int64_t row) {
  const MaskRows& rows = args.mask_rows;
  if (args.mask == nullptr) return 0;
  const auto start_of = [&](auto rest) {
    int64_t start = 0;
#pragma unroll  // a loop would read the sizes from a copy in local memory, made at the start of every call
    for (int k = 3; k > 0; --k) start += launch.mask_sizes[k - 1].divide(rest) * rows.strides[k];
    return start + rest * rows.strides[0];
  };
  return launch.causality.few_rows ? start_of(static_cast<uint32_t>(row)) : start_of(row);
}

// A chunk of the mask as it lies in memory: bytes, 16-bit or 32-bit elements, from the first word on.
struct MaskChunk {
  uint32_t word[kChunkColumns];
};

// Calls work(M{}), M the type of the mask's elements.
template <typename Work>
__device__ __forceinline__ void with_mask_type(MaskType type, const Work& work) {
  if (type == MaskType::kBool) {
    work(uint8_t{});
  } else if (type == MaskType::kFloat32) {
    work(float{});
  } else if (type == MaskType::kFloat16) {
    work(__half{});
  } else {
    work(__nv_bfloat16{});
  }
}

// Leaves the elements from `valid` on 0; vectors are loaded whole or not at all. index: of the first element.
template <typename M, bool kFast, bool kApart>
__device__ __forceinline__ void load_mask(MaskChunk& chunk, const SoftmaxForward& args, int64_t index, int valid) {
  using Bits = typename UintOf<sizeof(M)>::Type;
  constexpr int kBytes = sizeof(M), kWords = kChunkColumns * kBytes / 4;
  const Bits* const address = static_cast<const Bits*>(args.mask) + index;
  uint32_t word[kWords] = {};
  if constexpr (kFast) {
    load_words<kBytes, kChunkColumns, true, kApart>(word, address, true, valid);
  } else {
    const int64_t stride = args.mask_rows.col_stride;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
      if (i < valid) {
        word[i * kBytes / 4] |= static_cast<uint32_t>(__ldg(address + column_of<kApart>(i) * stride))
                                << (i * kBytes % 4 * 8);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) chunk.word[i] = word[i];
}

// value = scale * value + mask.
template <typename M>
__device__ __forceinline__ void apply_mask(float (&value)[kChunkColumns], const MaskChunk& chunk, float scale) {
  if constexpr (sizeof(M) == 1) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
      const float scaled = __fmul_rn(value[i], scale);
      value[i] = (chunk.word[i / 4] >> (i % 4 * 8) & 0xFFu) != 0 ? scaled : minus_infinity();
    }
  } else {
    float added[kChunkColumns];
    unpack_words<M>(chunk.word, added);
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[i] = fmaf(value[i], scale, added[i]);
  }
}

// The columns of a row of T that one thread works on: kChunks chunks, `step` columns apart. kPlain: everybody sees them
// all.
template <typename T, int kChunks, bool kPlain, typename Col>
struct ThreadColumns {
  static constexpr bool kApart = kHalvesApart<T>;
  Col first, step, visible;

  __device__ __forceinline__ Col col(int k) const { return first + k * step; }
  // Whether any thread of the row sees something of its chunk k: a uniform branch.
  __device__ __forceinline__ bool seen(int k) const { return kPlain || k == 0 || k * step < visible; }
};

template <typename M, bool kFast, typename Columns>
__device__ __forceinline__ void load_mask_of(MaskChunk& mask, const SoftmaxForward& args, int64_t start,
                                             const Columns& columns, int k) {
  const auto col = columns.col(k);
  load_mask<M, kFast, Columns::kApart>(mask, args, start + (kFast ? col : col * args.mask_rows.col_stride),
                                       visible_columns<Columns::kApart>(col, columns.visible));
}

// Vectors of the mask are loaded ahead, for all chunks. Element by element, each chunk's are loaded when its turn
// comes: their addresses take registers.
template <bool kFast, typename T, int kChunks, bool kPlain, typename Col>
__device__ __forceinline__ void load_masks(MaskChunk (&mask)[kChunks], const SoftmaxForward& args, int64_t start,
                                           const ThreadColumns<T, kChunks, kPlain, Col>& columns) {
  if (kPlain || !kFast || args.mask == nullptr) return;
  with_mask_type(args.mask_type, [&](auto element) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      load_mask_of<decltype(element), kFast>(mask[k], args, start, columns, k);
    }
  });
}

// scale * scores + mask; -Inf where nothing is to be seen.
template <bool kFast, typename T, int kChunks, bool kPlain, typename Col>
__device__ __forceinline__ void values_of(float (&value)[kChunks][kChunkColumns],
                                          const Chunk<T, kChunkColumns> (&scores)[kChunks], MaskChunk (&mask)[kChunks],
                                          const SoftmaxForward& args, int64_t mask_start,
                                          const ThreadColumns<T, kChunks, kPlain, Col>& columns) {
  if (kPlain || args.mask == nullptr) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      if (!columns.seen(k)) continue;
      unpack(scores[k], value[k]);
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) value[k][i] = __fmul_rn(value[k][i], args.scale);
    }
  } else {
    with_mask_type(args.mask_type, [&](auto element) {
#pragma unroll
      for (int k = 0; k < kChunks; ++k) {
        if (!columns.seen(k)) continue;
        unpack(scores[k], value[k]);
        if (!kFast) load_mask_of<decltype(element), kFast>(mask[k], args, mask_start, columns, k);
        apply_mask<decltype(element)>(value[k], mask[k], args.scale);
      }
    });
  }
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (columns.seen(k)) hide_columns<kHalvesApart<T> >(value[k], columns.col(k), columns.visible, minus_infinity());
  }
}

// What is subtracted before exp: the largest value, but 0 where that is -Inf. Then a row of nothing but -Inf sums to 0
// instead of NaN, and a NaN among such values still shows.
__device__ __forceinline__ float subtrahend_of(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// exp(value - subtrahend). (The product with log2(e) comes last: that of a large finite mask would overflow.)
__device__ __forceinline__ float exponential(float value, float subtrahend) {
  return exp2_flushed(__fmul_rn(value - subtrahend, 1.4426950408889634f));
}

// The subtrahend (x) and 1 / sum (y) of a row with this largest value and sum of exp(value - subtrahend_of(largest)).
// A sum is 0, NaN, or at least the 1 of the largest value.
__device__ __forceinline__ float2 scaling_of(float largest, float sum) {
  return make_float2(subtrahend_of(largest), sum == 0.0f ? 0.0f : quick_reciprocal(sum));
}

// The same, from the largest values (x) and sums (y) that at most kMostWarps warps have left in slots. First every lane
// joins those of its number, so that up to 32 warps are joined in one order, wherever they run.
template <int kMostWarps>
__device__ __forceinline__ float2 join_slots(const float2* slots, int n_warps) {
  constexpr int kSlots = kMostWarps / kWarpThreads;
  const bool several = kSlots > 1 && n_warps > kWarpThreads;  // a lane
  const int lane = static_cast<int>(threadIdx.x % kWarpThreads);
  float2 slot[kSlots];
  float largest = minus_infinity(), sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if (k > 0 && !several) continue;
    const int i = lane + k * kWarpThreads;
    slot[k] = i < n_warps ? slots[i] : make_float2(minus_infinity(), 0.0f);
    largest = fmaxf(largest, slot[k].x);
  }
  largest = lanes_max(largest, kWarpThreads);
  const float subtrahend = subtrahend_of(largest);
#pragma unroll
  for (int k = 0; k < kSlots; ++k) {
    if (k > 0 && !several) continue;
    const float rescaled = __fmul_rn(slot[k].y, exponential(slot[k].x, subtrahend));
    sum = k == 0 ? rescaled : sum + rescaled;
  }
  return scaling_of(largest, lanes_sum(sum, kWarpThreads));
}

// Over n_warps warps of the block. slots: [kMaxWarps], used once a block.
__device__ __forceinline__ float2 join_warps(float largest, float sum, int n_warps, float2* slots) {
  if (n_warps == 1) return scaling_of(largest, sum);
  if (threadIdx.x % kWarpThreads == 0) slots[threadIdx.x / kWarpThreads] = make_float2(largest, sum);
  __syncthreads();
  return join_slots<kMaxWarps>(slots, n_warps);
}

// What dropout drops of the chunk that begins with element `first`, a bit a column: nothing where nothing is to be
// seen. kWhole: rows are whole chunks.
template <bool kApart, bool kWhole, typename Col>
__device__ __forceinline__ uint32_t dropped_columns(const DropoutMask& dropout, int64_t first, Col col, Col visible) {
  const int left = visible_columns<kApart>(col, visible);
  if (left == 0) return 0;
  const uint32_t dropped = ~dropout.kept_columns<kApart>(static_cast<uint64_t>(first), kWhole);
  return left < kChunkColumns ? dropped & ~(~0u << left) : dropped & 0xFFu;
}

// Writes y, and p, of a chunk of probabilities from element `index` on; what is not to be seen is 0, and not dropped.
template <typename T>
__device__ __forceinline__ void store_dropped(float (&value)[kChunkColumns], uint32_t dropped,
                                              const SoftmaxForward& args, float scale, bool vector_access,
                                              int64_t index, int valid) {
  float p[kChunkColumns];
  uint32_t zero = 0;
  compiler_barrier(
      zero);  // compilers make three instructions of a choice between a number and 0 by a bit, instead of one
#pragma unroll
  for (int i = 0; i < kChunkColumns; ++i) {
    const float scaled = __fmul_rn(value[i], scale);
    p[i] = (dropped >> i & 1u) == 0 ? value[i] : -value[i];
    value[i] = (dropped >> i & 1u) == 0 ? scaled : __uint_as_float(zero);
  }
  if (args.p != nullptr) store_rounded<T, kHalvesApart<T> >(args.p, index, p, vector_access, valid);
  store_rounded<T, kHalvesApart<T> >(args.y, index, value, vector_access, valid);
}

// The row's threads hold it, from the one read of the scores to the one write: kChunks chunks a thread, of which those
// that causality hides from all of them cost a uniform branch each. kChunks 1: lanes of a warp a row. Otherwise: whole
// warps. Each warp takes the largest of its own values, so that one barrier joins the warps.
// thread: which of the count threads of the row this is. join(largest, sum): scaling_of() the row, over its warps.
// Threads whose row lies past the end go through all of it, for the sake of the others, with a row of no columns.
// kPlain: there is no mask, no causality, no dropout, no p to store. Asking costs a fifth of all instructions.
template <typename T, int kChunks, bool kFast, bool kPlain, typename Join>
__device__ __forceinline__ void forward_row(const SoftmaxForward& args, const ForwardLaunch& launch,
                                            const DropoutMask& dropout, int64_t row, int thread, int count,
                                            const Join& join) {
  constexpr bool kApart = kHalvesApart<T>;
  const bool has_row = row < args.n_rows;
  const int n_cols = has_row ? static_cast<int>(args.n_cols) : 0;
  const int64_t mask_start = kPlain ? 0 : mask_start_of(args, launch, row);
  const int visible = kPlain || !has_row ? n_cols : launch.causality.visible(row, n_cols);
  // The first column is forgotten before its last uses: addresses cost less than registers.
  ThreadColumns<T, kChunks, kPlain, int> columns{first_column<kApart>(thread), count * kChunkColumns, visible};

  float value[kChunks][kChunkColumns];
  // The dropout mask is drawn while the scores are on their way, where there are registers for both; never after, when
  // every value waits.
  constexpr bool kDrawLate = sizeof(T) == 2 || kChunks == 1;
  uint32_t dropped = 0;  // 8 bits a chunk
  static_assert(kChunks <= 4, "32 bits");
  constexpr int kSideBySide = kFast && kUniformRegisters ? kChunks : 1;
  const auto draw = [&] {
    if (kPlain || !dropout.on()) return;
    const int64_t first = row * args.n_cols + columns.first;
#pragma unroll kSideBySide
    for (int k = 0; k < kChunks; ++k) {
      if (!columns.seen(k)) continue;
      dropped |= dropped_columns<kApart, kFast>(dropout, first + k * columns.step, columns.col(k), visible) << (8 * k);
    }
  };
  if (!kDrawLate) draw();
  {
    Chunk<T, kChunkColumns> scores[kChunks];
    MaskChunk mask[kChunks];
    const T* const from = static_cast<const T*>(args.scores) + row * args.scores_row_stride + columns.first;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      load_chunk<kApart>(scores[k], from, k * columns.step, kFast,
                         valid_columns<kApart>(columns.col(k), visible, kFast));
    }
    load_masks<kFast>(mask, args, mask_start, columns);
    if (kDrawLate) draw();
    if (!kFast) compiler_barrier(columns.first);
    values_of<kFast>(value, scores, mask, args, mask_start, columns);
  }
  float largest = minus_infinity();
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (!columns.seen(k)) continue;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) largest = fmaxf(largest, value[k][i]);
  }
  const int lanes = kChunks == 1 ? count : kWarpThreads;
  largest = lanes_max(largest, lanes);
  const float subtrahend = subtrahend_of(largest);
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
    if (!columns.seen(k)) continue;
    float chunk_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) {
      value[k][i] = exponential(value[k][i], subtrahend);
      chunk_sum = i == 0 ? value[k][i] : chunk_sum + value[k][i];
    }
    sum = k == 0 ? chunk_sum : sum + chunk_sum;
  }
  sum = lanes_sum(sum, lanes);
  const float2 joined = join(largest, sum);
  const float factor = exponential(largest, joined.x) * joined.y;
  compiler_barrier(columns.first);
  const int64_t index = row * args.n_cols + columns.first;
#pragma unroll
  for (int k = 0; k < kChunks; ++k) {
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) value[k][i] = __fmul_rn(value[k][i], factor);  // unset, where not seen
    if (!kPlain && launch.causality.on) hide_columns<kApart>(value[k], columns.col(k), visible, 0.0f);
  }
  const auto valid = [&](int k) { return valid_columns<kApart>(columns.col(k), n_cols, kFast); };
  if (kPlain || (!dropout.on() && args.p == nullptr)) {
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      store_rounded<T, kApart>(args.y, index + k * columns.step, value[k], kFast, valid(k));
    }
  } else {
    const float scale = dropout.on() ? dropout.scale() : 1.0f;
#pragma unroll
    for (int k = 0; k < kChunks; ++k) {
      store_dropped<T>(value[k], dropped >> (8 * k), args, scale, kFast, index + k * columns.step, valid(k));
    }
  }
}

// The choice of kPlain, for rows of whole chunks.
template <typename T, int kChunks, bool kFast, typename Join>
__device__ __forceinline__ void forward_row(const SoftmaxForward& args, const ForwardLaunch& launch,
                                            const DropoutMask& dropout, int64_t row, int thread, int count,
                                            const Join& join) {
  if (kFast && launch.plain) {
    forward_row<T, kChunks, kFast, kFast>(args, launch, dropout, row, thread, count, join);
  } else {
    forward_row<T, kChunks, kFast, false>(args, launch, dropout, row, thread, count, join);
  }
}

// Lanes of a warp, the warp, or the block a row.
template <typename T, int kChunks, bool kFast>
__global__ void __launch_bounds__(kChunks == 1 ? kRowsThreads : kMaxThreads, kChunks == 1 ? 8 : 1)
    softmax_forward_kernel(const SoftmaxForward args, const ForwardLaunch launch) {
  ONETRIP_SHARED(float2, slots, kMaxWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  const DropoutMask dropout(args.dropout, dropout_state);
  const RowThreads& threads = launch.threads;
  const int64_t row = threads.row();
  forward_row<T, kChunks, kFast>(args, launch, dropout, row, threads.thread(), threads.count,
                                 [&](float largest, float sum) {
                                   const unsigned n_warps = static_cast<unsigned>(threads.count) / kWarpThreads;
                                   return join_warps(largest, sum, kChunks == 1 ? 1 : static_cast<int>(n_warps), slots);
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
  forward_row<T, kBlockChunks, true>(args, launch, dropout, threads.row, threads.thread, threads.count,
                                     [&](float largest, float sum) {
                                       const float2* const slots = exchange.tell<1>(make_float2(largest, sum));
                                       return join_slots<kClusterWarps>(slots, ClusterExchange::n_warps());
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
  constexpr bool kApart = kHalvesApart<T>;
  ONETRIP_SHARED(float2, slots, kMaxWarps);
  ONETRIP_SHARED(DropoutState, dropout_state, 1);
  ONETRIP_DYNAMIC_SHARED(uint32_t, kept);
  const DropoutMask dropout(args.dropout, dropout_state);
  const int64_t row = first_row_of_block(1);
  if (row >= args.n_rows) return;
  const int64_t mask_start = mask_start_of(args, launch, row);
  const int64_t first_col = first_column<kApart>(static_cast<int>(threadIdx.x)), step = kWideThreads * kChunkColumns;
  const int64_t visible = launch.causality.visible(row, args.n_cols);
  const auto load = [&](Scores& scores, int64_t col) {
    load_chunk<kApart>(scores, args.scores, row * args.scores_row_stride + col, kFast,
                       valid_columns<kApart>(col, visible, kFast));
  };
  const auto values = [&](float (&value)[1][kChunkColumns], const Scores(&scores)[1], int64_t col) {
    const ThreadColumns<T, 1, false, int64_t> columns{col, step, visible};
    MaskChunk mask[1];
    load_masks<kFast>(mask, args, mask_start, columns);
    values_of<kFast>(value, scores, mask, args, mask_start, columns);
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
    const Scores scores[1] = {next};
    load(next, col + step);  // on its way while this one is worked on
    if (tile < launch.kept_tiles) {
#pragma unroll
      for (int i = 0; i < Scores::kWords; ++i) kept_word(tile, i) = scores[0].word[i];
    }
    float value[1][kChunkColumns];
    values(value, scores, col);
    const float before = largest;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) largest = fmaxf(largest, value[0][i]);
    const float subtrahend = subtrahend_of(largest);
    float chunk_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunkColumns; ++i) chunk_sum += exponential(value[0][i], subtrahend);
    sum = fmaf(sum, exponential(before, subtrahend), chunk_sum);
  }
  const float before = largest;
  largest = lanes_max(largest, kWarpThreads);
  sum = lanes_sum(sum * exponential(before, subtrahend_of(largest)), kWarpThreads);
  const float2 joined = join_warps(largest, sum, kWideThreads / kWarpThreads, slots);

  tile = 0;
  for (int64_t col = first_col; col < args.n_cols; col += step, ++tile) {
    float value[1][kChunkColumns] = {};
    if (col < visible) {
      Scores scores[1];
      if (tile < launch.kept_tiles) {
#pragma unroll
        for (int i = 0; i < Scores::kWords; ++i) scores[0].word[i] = kept_word(tile, i);
      } else {
        load(scores[0], col);
      }
      values(value, scores, col);
#pragma unroll
      for (int i = 0; i < kChunkColumns; ++i) value[0][i] = __fmul_rn(exponential(value[0][i], joined.x), joined.y);
    }
    hide_columns<kApart>(value[0], col, visible, 0.0f);
    const int64_t first = row * args.n_cols + col;
    const uint32_t dropped = dropout.on() ? dropped_columns<kApart, kFast>(dropout, first, col, visible) : 0;
    store_dropped<T>(value[0], dropped, args, dropout.on() ? dropout.scale() : 1.0f, kFast, first,
                     valid_columns<kApart>(col, args.n_cols, kFast));
  }
}

}  // namespace onetrip
