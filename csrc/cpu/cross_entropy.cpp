// Cross-entropy of rows of logits with their labels, and the gradient, written over the logits where that is wanted.
//
// A row takes two passes. The first finds the largest value and the sum of exponentials, a block of columns at a time:
// the block comes from memory once and its exponentials from the first-level cache; sums so far are rescaled where a
// block has a larger value (Milakov & Gimelshein 2018). The second computes the probabilities again and writes the
// gradient; the row, 128 KB of 32000 float32, is in the second-level cache by then. Memory sees logits read once and
// the gradient written once. With the statistics of an earlier forward pass the first pass is left out.
//
// With a soft cap the values are kept as float32 in a buffer of the thread between the passes: tanh is computed once.
#include "levels.h"
#include "math.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

constexpr float kInfinity = __builtin_inff(), kNaN = __builtin_nanf(""),
                kLowest = -1000.0f;  // e^kLowest is 0, and 0 * kLowest not NaN
constexpr int kChains = 4;
constexpr int64_t kBlockColumns = 1024;  // 4 KB of float32

template <class T, bool kCapped, class Lanes>
ONETRIP_INLINE F value_at(const CrossEntropy& args, const T* logits, Lanes lanes) {
  const F v = load(logits, lanes) * args.scale;
  if constexpr (kCapped) return splat(args.softcap) * hyperbolic_tangent(v / splat(args.softcap));
  return v;
}

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

// What the first pass finds of a row: the largest value t, log(sum exp(t - largest)), the mean of t and the entropy of
// the probabilities (both where wanted).
struct RowSums {
  float largest, log_sum, mean, entropy;
};

// values: the buffer that keeps the row where capped. kAll: mean and entropy are wanted.
template <class T, bool kCapped, bool kAll>
ONETRIP_INLINE RowSums sum_row(const CrossEntropy& args, const T* logits, float* values) {
  float largest = -kInfinity;
  F exponentials = {}, products = {}, plain = {};  // sums of e = exp(t - largest), of e * (t - largest), of t
  for (int64_t block = 0; block < args.n_cols; block += kBlockColumns) {
    const int64_t end = smaller(block + kBlockColumns, args.n_cols);
    F tops[kChains];
    for (F& top : tops) top = splat(-kInfinity);
    for_columns<kChains>(block, end, [&](int64_t c, auto lanes, int chain) {
      const F t = value_at<T, kCapped>(args, logits + c, lanes);
      if constexpr (kCapped) store(values + c, t, All{});
      tops[chain] = larger_number(fill_lanes(t, lanes, -kInfinity), tops[chain]);
    });
    const float top = largest_lane(larger_number(larger_number(tops[0], tops[1]), larger_number(tops[2], tops[3])));
    if (top > largest) {
      if (largest != -kInfinity) {
        const F step = splat(largest - top), factor = exp_nonpositive(step);
        if constexpr (kAll) products = factor * mul_add(exponentials, step, products);
        exponentials *= factor;
      }
      largest = top;
    }
    const F shift = splat(largest == -kInfinity ? 0.0f : largest);
    F sums[kChains] = {}, weighted[kChains] = {}, totals[kChains] = {};
    for_columns<kChains>(block, end, [&](int64_t c, auto lanes, int chain) {
      F t;
      if constexpr (kCapped) {
        t = load(values + c, All{});
      } else {
        t = value_at<T, false>(args, logits + c, lanes);
      }
      const F below = fill_lanes(t, lanes, -kInfinity) - shift;
      const F e = exp_nonpositive(below);
      sums[chain] += e;
      if constexpr (kAll) {
        weighted[chain] = mul_add(e, larger_number(splat(kLowest), below), weighted[chain]);
        totals[chain] += t;
      }
    });
    exponentials += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if constexpr (kAll) {
      products += (weighted[0] + weighted[1]) + (weighted[2] + weighted[3]);
      plain += (totals[0] + totals[1]) + (totals[2] + totals[3]);
    }
  }
  const float sum = sum_lanes(exponentials), log_sum = __builtin_logf(sum);
  RowSums row{largest, log_sum, 0.0f, 0.0f};
  if constexpr (kAll) {
    row.mean = sum_lanes(plain) / static_cast<float>(args.n_cols);
    row.entropy = log_sum - sum_lanes(products) / sum;
  }
  return row;
}

// The gradient of a row is (p * (of_p + of_p_log_p * log p) + of_all) * dt, and of_label * dt more at the label;
// dt = 1 - (t / softcap)^2 where capped, else 1. The scale of the logits is a factor of each.
struct Factors {
  float of_p, of_p_log_p, of_all, of_label;
};

ONETRIP_INLINE Factors factors_of(const CrossEntropy& args, int64_t i, const RowSums& row) {
  const float weight = args.weights[i * args.weight_stride] * args.scale;
  const float entropy_weight = args.entropy_weights ? args.entropy_weights[i] * args.scale : 0.0f;
  const float lse = row.largest + row.log_sum;
  return {weight * (1.0f + 2.0f * args.lse_square_scale * lse) - entropy_weight * row.entropy, -entropy_weight,
          -weight * args.label_smoothing / static_cast<float>(args.n_cols), -weight * (1.0f - args.label_smoothing)};
}

template <bool kCapped, bool kEntropy>
ONETRIP_INLINE F gradient(const CrossEntropy& args, const Factors& factors, F t, F largest, F log_sum) {
  const F log_p = (t - largest) - log_sum;
  F of_p = splat(factors.of_p);
  if constexpr (kEntropy) of_p = mul_add(larger_number(splat(kLowest), log_p), splat(factors.of_p_log_p), of_p);
  F g = mul_add(exp_nonpositive(log_p), of_p, splat(factors.of_all));
  if constexpr (kCapped) {
    const F u = t / splat(args.softcap);
    g *= 1.0f - u * u;
  }
  return g;
}

// kKept: the values of the first pass are in the buffer. next: a row to be fetched meanwhile.
template <class T, bool kCapped, bool kEntropy, bool kKept>
ONETRIP_INLINE void store_gradient(const CrossEntropy& args, const Factors& factors, const RowSums& row,
                                   const T* logits, const float* values, int64_t label, T* dlogits, const T* next,
                                   bool streams) {
  const F largest = splat(row.largest), log_sum = splat(row.log_sum);
  const F t_label = splat(value_at<T, kCapped>(args, logits + label, First{1})[0]);
  for_columns<kChains>(0, args.n_cols, [&](int64_t c, auto lanes, int) {
    __builtin_prefetch(next + c, 0, 3);
    F t;
    if constexpr (kCapped && kKept) {
      t = load(values + c, All{});
    } else {
      t = value_at<T, kCapped>(args, logits + c, lanes);
    }
    store_rounded(dlogits + c, gradient<kCapped, kEntropy>(args, factors, t, largest, log_sum), lanes, streams);
  });
  F g = gradient<kCapped, kEntropy>(args, factors, t_label, largest, log_sum);
  F of_label = splat(factors.of_label);
  if constexpr (kCapped) {
    const F u = t_label / splat(args.softcap);
    of_label *= 1.0f - u * u;
  }
  store_rounded(dlogits + label, g + of_label, First{1});
}

template <class T, bool kCapped>
void cross_entropy_rows(const CrossEntropy& args, int64_t first_row, int64_t end_row, bool streams, float* values) {
  const bool wants_all = args.label_smoothing != 0.0f || args.entropy || args.entropy_weights;
  for (int64_t i = first_row; i < end_row; ++i) {
    const T* logits = static_cast<const T*>(args.logits) + i * args.logits_row_stride;
    T* dlogits = args.dlogits ? static_cast<T*>(args.dlogits) + i * args.n_cols : nullptr;
    const int64_t label = args.labels[i];
    const bool is_ignored = label == args.ignore_index, is_valid = label >= 0 && label < args.n_cols;
    RowSums row{0.0f, 0.0f, 0.0f, 0.0f};
    float loss = 0.0f;
    if (is_ignored) {
      if (dlogits) memset(dlogits, 0, args.n_cols * sizeof(T));
    } else if (!is_valid) {
      row = {kNaN, kNaN, kNaN, kNaN};
      loss = kNaN;
      if (dlogits)
        for (int64_t c = 0; c < args.n_cols; ++c) store_rounded(dlogits + c, splat(kNaN), First{1});
    } else {
      if (args.has_stats) {
        row.largest = args.stats[2 * i], row.log_sum = args.stats[2 * i + 1];
      } else if (wants_all) {
        row = sum_row<T, kCapped, true>(args, logits, values);
      } else {
        row = sum_row<T, kCapped, false>(args, logits, values);
      }
      const float t = value_at<T, kCapped>(args, logits + label, First{1})[0];
      const float lse = row.largest + row.log_sum, smoothing = args.label_smoothing;
      loss = (1.0f - smoothing) * (row.log_sum - (t - row.largest)) + args.lse_square_scale * lse * lse;
      if (smoothing != 0.0f) loss += smoothing * (row.log_sum - (row.mean - row.largest));
      if (dlogits) {
        const Factors factors = factors_of(args, i, row);
        const T* next = i + 1 < end_row ? logits + args.logits_row_stride : logits;
        const auto store = [&](auto has_entropy, auto is_kept) __attribute__((always_inline)) {
          store_gradient<T, kCapped, has_entropy.value, is_kept.value>(args, factors, row, logits, values, label,
                                                                       dlogits, next, streams);
        };
        if (args.entropy_weights) {
          store(Constant<true>{}, Constant<true>{});
        } else if (args.has_stats) {
          store(Constant<false>{}, Constant<false>{});
        } else {
          store(Constant<false>{}, Constant<true>{});
        }
      }
    }
    if (args.loss) args.loss[i] = loss;
    if (args.entropy) args.entropy[i] = row.entropy;
    if (args.stats && !args.has_stats) args.stats[2 * i] = row.largest, args.stats[2 * i + 1] = row.log_sum;
  }
}

}  // namespace

int cross_entropy(const CrossEntropy& args) {
  if (args.n_rows <= 0 || args.n_cols <= 0) return 0;
  return with_type(args.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t rows_per_task = clamp(kTaskElements / args.n_cols, 1, args.n_rows);
    const int64_t n_tasks = (args.n_rows + rows_per_task - 1) / rows_per_task;
    const int64_t row_bytes = args.n_cols * static_cast<int64_t>(sizeof(T));
    const bool streams = args.dlogits && args.dlogits != args.logits && args.n_rows * row_bytes >= kStreamBytes &&
                         row_bytes % 64 == 0 && is_line_aligned(args.dlogits, args.dlogits);
    const bool is_capped = args.softcap != 0.0f;
    return run_tasks(n_tasks, args.n_rows * args.n_cols, is_capped ? args.n_cols + kWidth : kWidth,
                     [&](int64_t task, float* values) {
                       const int64_t first = task * rows_per_task, end = smaller(first + rows_per_task, args.n_rows);
                       if (is_capped) {
                         cross_entropy_rows<T, true>(args, first, end, streams, values);
                       } else {
                         cross_entropy_rows<T, false>(args, first, end, streams, values);
                       }
                     });
  });
}

}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
