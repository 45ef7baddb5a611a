// y = dropout(softmax(scale * scores + mask)) over rows, and its gradients.
//
// Forward takes a row through three passes. The first reads scores and mask, leaves scale * scores + mask as float32 in
// a buffer of the thread and finds its largest value; the second puts exponentials in their place and sums them; the
// third multiplies by 1 / sum, drops, rounds once and writes y, and with dropout p, whose sign is the dropout mask.
// Memory sees scores read once and y (and p) written once; a mask that many rows share stays in cache.
//
// Backward takes a row through two: sum P * dP, then P * (dP - sum) to dscores, for which dy and p come from cache.
// Memory sees dy and p read once and dscores written once. Where the mask's gradient is wanted, the rows that share a
// row of the mask are taken by one thread and added up in its cache on the way; the sharing rows of a mask of few rows
// are cut into parts, a function of the sizes alone, and the parts are added in order: no bit of a result depends on
// the number of threads or on which took what.
//
// Columns that a causal row does not see are neither read nor computed in either direction: zeros are written there.
#include "dropout.h"
#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// Walks the rows of a MaskRows, or of a part of its dimensions, and keeps the offset of the current one.
class Walk {
 public:
  Walk(const int64_t* sizes, const int64_t* strides, int64_t first) : sizes_(sizes), strides_(strides) {
    for (int i = 3; i >= 0; --i) {
      index_[i] = first % sizes[i];
      first /= sizes[i];
      offset_ += index_[i] * strides[i];
    }
  }
  int64_t offset() const { return offset_; }
  void next() {
    for (int i = 3; i >= 0; --i) {
      offset_ += strides_[i];
      if (++index_[i] < sizes_[i]) return;
      offset_ -= sizes_[i] * strides_[i];
      index_[i] = 0;
    }
  }

 private:
  const int64_t *sizes_, *strides_;
  int64_t index_[4], offset_ = 0;
};

struct NoMask {};
struct Bool {
  uint8_t byte;
};

template <class Lanes>
ONETRIP_INLINE F masked(F v, const NoMask*, Lanes) {
  return v;
}
template <class Lanes>
ONETRIP_INLINE F masked(F v, const Bool* mask, Lanes lanes) {
  return (F)select(test_bytes(mask, lanes), (U)v, (U)splat(-kInfinity));
}
template <class M, class Lanes>
ONETRIP_INLINE F masked(F v, const M* mask, Lanes lanes) {
  return v + load(mask, lanes);
}

// The rows of a mask as arrays of stride 1: in place where they are, else copied to a buffer, once for rows that follow
// each other and share it.
template <class M>
class MaskReader {
 public:
  MaskReader(const SoftmaxForward& args, int64_t first_row, float* buffer)
      : mask_(static_cast<const M*>(args.mask)),
        walk_(args.mask_rows.sizes, args.mask_rows.strides, first_row),
        col_stride_(args.mask_rows.col_stride),
        n_cols_(args.n_cols),
        buffer_(reinterpret_cast<M*>(buffer)) {}
  const M* row() {
    const M* row = mask_ + walk_.offset();
    if (col_stride_ == 1) return row;
    if (row != copied_)
      for (int64_t c = 0; c < n_cols_; ++c) buffer_[c] = row[c * col_stride_];
    copied_ = row;
    return buffer_;
  }
  void next() { walk_.next(); }

 private:
  const M* mask_;
  Walk walk_;
  int64_t col_stride_, n_cols_;
  M* buffer_;
  const M* copied_ = nullptr;
};
template <>
class MaskReader<NoMask> {
 public:
  MaskReader(const SoftmaxForward&, int64_t, float*) {}
  const NoMask* row() { return nullptr; }
  void next() {}
};
ONETRIP_INLINE const NoMask* column(const NoMask*, int64_t) { return nullptr; }
template <class M>
ONETRIP_INLINE const M* column(const M* row, int64_t c) {
  return row + c;
}

// Rows of a task: some 8 tasks a thread, of 16 Ki elements and more, so that a row's fetch is for its own thread.
inline int64_t task_rows(int64_t n_rows, int64_t n_cols) {
  constexpr int64_t kMost = 1 << 18;
  const int64_t even = n_rows / (8 * thread_count());
  return clamp(even, clamp(kTaskElements / n_cols, 1, n_rows), clamp(kMost / n_cols, 1, n_rows));
}

// +0 in columns [begin, end) of a row.
template <class T>
ONETRIP_INLINE void store_zeros(T* row, int64_t begin, int64_t end, bool may_stream) {
  for_stored_columns(begin, end, row, may_stream,
                     [&](int64_t c, auto lanes, auto streams) { store_rounded(row + c, F{}, lanes, streams); });
}

// How many columns of a row are visible. n_queries: 0 where not causal.
ONETRIP_INLINE int64_t visible_columns(int64_t n_cols, int64_t n_queries, int64_t query) {
  return n_queries ? clamp(n_cols - n_queries + query + 1, 0, n_cols) : n_cols;
}

// Whether scores serve as the row by themselves, or a buffer of float32 values is made of them and the mask.
template <class T, class M>
constexpr bool kIsInPlace = false;
template <>
constexpr bool kIsInPlace<float, NoMask> = true;

// What every row of a call shares.
struct ForwardRows {
  const SoftmaxForward& args;
  int64_t row_floats;   // of the buffer of values
  int64_t mask_floats;  // of the buffer of a mask's row; 0 where it is read in place
  int64_t rows_per_draw, cols_per_draw;
  bool streams;
};

// scale * scores + mask, and -Inf where there is no column.
template <class T, class M, class Lanes>
ONETRIP_INLINE F value_at(const T* scores, const M* mask, float scale, int64_t c, Lanes lanes) {
  return fill_lanes(masked(load(scores + c, lanes) * scale, column(mask, c), lanes), lanes, -kInfinity);
}

// The largest value of a row that is a number. Leaves the values in the buffer, whole vectors, where they are not in
// place.
template <class T, class M>
ONETRIP_INLINE float assemble(const T* scores, const M* mask, float scale, float* values, int64_t n) {
  F largest[kChains];
  for (F& chain : largest) chain = splat(-kInfinity);
  for_columns<kChains>(0, n, [&](int64_t c, auto lanes, int chain) {
    const F v = value_at(scores, mask, scale, c, lanes);
    if constexpr (!kIsInPlace<T, M>) store(values + c, v, All{});
    largest[chain] = larger_number(v, largest[chain]);
  });
  return largest_of_chains(largest);
}

// Exponentials of a row's values to the buffer, whole vectors. Returns their sum. next_scores: a row to be fetched
// meanwhile, where there is computing to be done.
template <class T, class M>
ONETRIP_INLINE float exponentiate(const T* scores, float scale, float* values, float largest, int64_t n,
                                  const T* next_scores) {
  const F shift = splat(largest == -kInfinity ? 0.0f : largest);
  F total = {};
  for (int64_t block = 0; block < n; block += kSumColumns) {
    F sums[kChains] = {};
    for_columns<kChains>(block, smaller(block + kSumColumns, n), [&](int64_t c, auto lanes, int chain) {
      __builtin_prefetch(next_scores + c, 0, 3);
      F v;
      if constexpr (kIsInPlace<T, M>) {
        v = value_at(scores, static_cast<const M*>(nullptr), scale, c, lanes);
      } else {
        v = load(values + c, All{});
      }
      v = exp_nonpositive(v - shift);
      store(values + c, v, All{});
      sums[chain] += v;
    });
    total += sum_chains(sums);
  }
  return sum_lanes(total);
}

// Rows [first_row, end_row) of y, and of p.
template <class T, class M>
void softmax_rows(const ForwardRows& rows, int64_t first_row, int64_t end_row, float* buffer) {
  const SoftmaxForward& args = rows.args;
  const int64_t n_cols = args.n_cols;
  float* values = buffer;
  MaskReader<M> mask(args, first_row, values + rows.row_floats);
  DropoutMask dropout(args.dropout, values + rows.row_floats + rows.mask_floats);
  const bool has_dropout = args.dropout.threshold != 0, draws_rows = has_dropout && rows.cols_per_draw == n_cols;
  const int64_t rows_ahead = rows_to_fetch_ahead(n_cols);
  int64_t query = args.n_queries ? first_row % args.n_queries : 0;
  for (int64_t row = first_row; row < end_row; ++row, mask.next()) {
    const T* scores = static_cast<const T*>(args.scores) + row * args.scores_row_stride;
    T* y = static_cast<T*>(args.y) + row * n_cols;
    T* p = args.p ? static_cast<T*>(args.p) + row * n_cols : nullptr;
    const int64_t visible = visible_columns(n_cols, args.n_queries, query);
    query = query + 1 < args.n_queries ? query + 1 : 0;
    const float largest = assemble(scores, mask.row(), args.scale, values, visible);
    const T* next_scores = row + rows_ahead < end_row ? scores + rows_ahead * args.scores_row_stride : scores;
    const float sum = exponentiate<T, M>(scores, args.scale, values, largest, visible, next_scores);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;  // no column that is not masked; NaN has to pass

    const bool streams_p = rows.streams && (reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(y)) % 64 == 0;
    const int row_of_draw = (row - first_row) % rows.rows_per_draw;
    if (draws_rows && row_of_draw == 0) {
      dropout.fill(row, static_cast<int>(smaller(rows.rows_per_draw, end_row - row)), 0, n_cols, n_cols);
    }
    if (has_dropout) {
      for (int64_t begin = 0; begin < visible; begin += rows.cols_per_draw) {
        const int64_t end = smaller(begin + rows.cols_per_draw, visible);
        if (!draws_rows) dropout.fill(row, 1, begin, end, n_cols);
        const uint16_t* bits = dropout.row(draws_rows ? row_of_draw : 0);
        for_stored_columns(begin, end, y, rows.streams, [&](int64_t c, auto lanes, auto streams) {
          const F probability = load(values + c, All{}) * inverse;
          const Kept kept = dropout.kept(bits + (c - begin));
          store_rounded(y + c, dropout.apply(probability, kept), lanes, streams);
          if (p) store_rounded(p + c, dropout.mark(probability, kept), lanes, streams && streams_p);
        });
      }
    } else {
      for_stored_columns(0, visible, y, rows.streams, [&](int64_t c, auto lanes, auto streams) {
        store_rounded(y + c, load(values + c, All{}) * inverse, lanes, streams);
      });
    }
    store_zeros(y, visible, n_cols, rows.streams);
    if (p) store_zeros(p, visible, n_cols, rows.streams);
  }
}

// P and dP of a vector.
struct Factors {
  F probability, gradient;
};
template <bool kHasDropout>
ONETRIP_INLINE Factors factors(F stored, F gradient, float dropout_scale) {
  if constexpr (!kHasDropout) return {stored, gradient};
  const U bits = (U)stored;
  const U kept = (U)(bits < splat_bits(0x80000000u));
  return {(F)(bits & 0x7FFFFFFFu), (F)((U)(gradient * dropout_scale) & kept)};
}

// Some rows of a backward call: `n` steps of `walk` from row `origin`.
struct BackwardRows {
  const SoftmaxBackward& args;
  int64_t origin, n;
  Walk walk;
  float* sums;        // what each adds to the gradient of its row of the mask; null: not wanted
  int64_t sums_step;  // from one row's sums to the next's
  bool is_first;      // sums are set instead of added to
  bool streams;
};

template <class T, bool kHasDropout>
void backward_rows(const BackwardRows& rows) {
  const SoftmaxBackward& args = rows.args;
  const int64_t n_cols = args.n_cols, rows_ahead = rows_to_fetch_ahead(n_cols);
  Walk walk = rows.walk;
  float* sums = rows.sums;
  for (int64_t k = 0; k < rows.n; ++k, walk.next(), sums += rows.sums_step) {
    const int64_t row = rows.origin + walk.offset();
    const T* dy = static_cast<const T*>(args.dy) + row * args.dy_row_stride;
    const T* p = static_cast<const T*>(args.p) + row * args.p_row_stride;
    T* dscores = args.dscores ? static_cast<T*>(args.dscores) + row * n_cols : nullptr;
    const int64_t visible = visible_columns(n_cols, args.n_queries, args.n_queries ? row % args.n_queries : 0);
    F total = {};
    for (int64_t block = 0; block < visible; block += kSumColumns) {
      F products[kChains] = {};
      for_columns_of<kChains, T>(block, smaller(block + kSumColumns, visible), [&](int64_t c, auto lanes, int chain) {
        const auto add = [&](F stored, F gradient) __attribute__((always_inline)) {
          const Factors f = factors<kHasDropout>(stored, gradient, args.dropout_scale);
          products[chain] = mul_add(f.probability, f.gradient, products[chain]);
          return products[chain++];  // map wants a value
        };
        map(add, load(p + c, lanes), load(dy + c, lanes));
      });
      total += sum_chains(products);
    }
    const F mean = splat(sum_lanes(total));
    const int64_t to_next = row + rows_ahead < args.n_rows ? rows_ahead : 0;
    const T* next_dy = dy + to_next * args.dy_row_stride;
    const T* next_p = p + to_next * args.p_row_stride;
    const auto propagate = [&](F stored, F gradient) __attribute__((always_inline)) {
      const Factors f = factors<kHasDropout>(stored, gradient, args.dropout_scale);
      return f.probability * (f.gradient - mean);
    };
    const auto scaled = [&](F stored, F gradient)
                            __attribute__((always_inline)) { return propagate(stored, gradient) * args.scale; };
    if (!rows.sums) {
      for_stored_columns<T>(0, visible, dscores, rows.streams, [&](int64_t c, auto lanes, auto streams) {
        if (streams) {  // what is streamed comes from memory; in caches fetching costs 2048 x 128 float32 a sixth
          __builtin_prefetch(next_dy + c, 0, 3);
          __builtin_prefetch(next_p + c, 0, 3);
        }
        store_rounded(dscores + c, map(scaled, load(p + c, lanes), load(dy + c, lanes)), lanes, streams);
      });
    } else {
      for_stored_columns(0, visible, dscores, rows.streams, [&](int64_t c, auto lanes, auto streams) {
        __builtin_prefetch(next_dy + c, 0, 3);
        __builtin_prefetch(next_p + c, 0, 3);
        const F g = propagate(load(p + c, lanes), load(dy + c, lanes));
        if (dscores) store_rounded(dscores + c, g * args.scale, lanes, streams);
        store(sums + c, rows.is_first ? g : load(sums + c, lanes) + g, lanes);
      });
      if (rows.is_first) store_zeros(sums, visible, n_cols, false);
    }
    if (dscores) store_zeros(dscores, visible, n_cols, rows.streams);
  }
}

}  // namespace

int softmax_forward(const SoftmaxForward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_rows <= 0 || n_cols <= 0) return 0;
  const auto run_rows = with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (!args.mask) return &softmax_rows<T, NoMask>;
    switch (args.mask_type) {
      case MaskType::kBool:
        return &softmax_rows<T, Bool>;
      case MaskType::kFloat16:
        return &softmax_rows<T, Float16>;
      case MaskType::kBFloat16:
        return &softmax_rows<T, BFloat16>;
      default:
        return &softmax_rows<T, float>;
    }
  });
  const bool has_dropout = args.dropout.threshold != 0;
  ForwardRows rows = {args, round_up(n_cols, 16), 0, 1, n_cols, false};
  if (args.mask && args.mask_rows.col_stride != 1) rows.mask_floats = rows.row_floats;
  // Narrow rows draw their random bits several rows at a time, wide ones some columns at a time.
  if (has_dropout) {
    rows.rows_per_draw = clamp(DropoutMask::kColumns / n_cols, 1, DropoutMask::kMaxRows);
    rows.cols_per_draw = smaller(n_cols, DropoutMask::kColumns);
  }
  rows.streams = n_rows * n_cols * size_of(args.dtype) >= kStreamBytes;
  const int64_t rows_per_task = round_up(task_rows(n_rows, n_cols), rows.rows_per_draw);
  const int64_t buffer_floats = rows.row_floats + rows.mask_floats + (has_dropout ? DropoutMask::kFloats : 0);
  return run_tasks((n_rows + rows_per_task - 1) / rows_per_task, n_rows * n_cols, buffer_floats,
                   [&](int64_t task, float* buffer) {
                     const int64_t first = task * rows_per_task;
                     run_rows(rows, first, smaller(first + rows_per_task, n_rows), buffer);
                   });
}

int softmax_backward(const SoftmaxBackward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_rows <= 0 || n_cols <= 0) return 0;
  const auto run_rows = with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    return args.has_dropout ? &backward_rows<T, true> : &backward_rows<T, false>;
  });
  const bool streams = args.dscores && n_rows * n_cols * size_of(args.dtype) >= kStreamBytes;
  if (!args.dmask) {
    if (!args.dscores) return 0;
    const int64_t rows_per_task = task_rows(n_rows, n_cols);
    const int64_t sizes[4] = {1, 1, 1, n_rows}, strides[4] = {0, 0, 0, 1};
    return run_tasks((n_rows + rows_per_task - 1) / rows_per_task, n_rows * n_cols, 16, [&](int64_t task, float*) {
      const int64_t first = task * rows_per_task, n = smaller(rows_per_task, n_rows - first);
      run_rows({args, first, n, Walk(sizes, strides, 0), nullptr, 0, false, streams});
    });
  }

  // Rows are walked along two sets of dimensions: those of the mask, and those in which its rows are shared.
  const MaskPartition partition = mask_partition(n_rows, n_cols, args.mask_rows);
  int64_t mask_sizes[4], sharing_sizes[4], row_strides[4];
  for (int64_t i = 3, stride = 1; i >= 0; --i) {
    const bool is_of_mask = args.mask_rows.strides[i] != 0;
    mask_sizes[i] = is_of_mask ? args.mask_rows.sizes[i] : 1;
    sharing_sizes[i] = is_of_mask ? 1 : args.mask_rows.sizes[i];
    row_strides[i] = stride;
    stride *= args.mask_rows.sizes[i];
  }
  // A task takes neighbouring rows of the mask, whose rows of scores are neighbours as a rule, as many as have their
  // sums in L1 and L2, and one part of the rows that share them.
  const int64_t mask_rows_per_task = clamp(partition.n_mask_rows / 64, 1, clamp(kTaskElements / n_cols, 1, n_rows));
  const int64_t tasks_per_part = (partition.n_mask_rows + mask_rows_per_task - 1) / mask_rows_per_task;
  const bool has_parts = partition.n_parts > 1;
  const int64_t sum_floats = has_parts ? partition.slot_floats : n_cols;
  const auto run_part = [&](int64_t task, float*) {
    const int64_t part = task / tasks_per_part, first = task % tasks_per_part * mask_rows_per_task;
    const int64_t n = smaller(mask_rows_per_task, partition.n_mask_rows - first);
    const int64_t begin = part * partition.rows_per_part;
    const int64_t end = smaller(begin + partition.rows_per_part, partition.n_sharing);
    float* sums = has_parts ? args.workspace + part * partition.n_mask_rows * sum_floats : args.dmask;
    const Walk of_mask(mask_sizes, row_strides, first);
    Walk sharing(sharing_sizes, row_strides, begin);
    for (int64_t s = begin; s < end; ++s, sharing.next()) {
      run_rows({args, sharing.offset(), n, of_mask, sums + first * sum_floats, sum_floats, s == begin, streams});
    }
  };
  const int64_t n_tasks = tasks_per_part * partition.n_parts;
  if (const int error = run_tasks(n_tasks, n_rows * n_cols, 16, run_part)) return error;
  if (!has_parts) return 0;

  const int64_t part_floats = partition.n_mask_rows * partition.slot_floats;
  return run_tasks(partition.n_mask_rows, partition.n_parts * part_floats, 16, [&](int64_t mask_row, float*) {
    const float* slots = args.workspace + mask_row * partition.slot_floats;
    for_columns<1>(0, n_cols, [&](int64_t c, auto lanes, int) {
      store(args.dmask + mask_row * n_cols + c, sum_slots(slots + c, part_floats, partition.n_parts), lanes);
    });
  });
}

}  // namespace onetrip::ONETRIP_LEVEL
