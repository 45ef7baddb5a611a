// Cross-entropy of rows of logits with their labels, and the gradient, written over the logits where that is wanted.
//
// A row takes three passes: the largest value; the sum of the exponentials of what lies below it; the gradient. The
// first brings the row from memory, or finds it prefetched by the row before; the others find it in the second-level
// cache (128 KB of 32000 float32). Memory sees logits read once and the gradient written once. The third pass computes
// no exponentials: the second keeps them, as float32 in a buffer of the thread. With the statistics of an earlier
// forward pass, and where they would not stay in the cache, it computes them, to the same bits.
//
// With a soft cap, a scale or an entropy the values are kept in the buffer instead: tanh is computed once.
#include "levels.h"
#include "master_weight.h"
#include "math.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

constexpr float kNaN = __builtin_nanf(""), kLowest = -1000.0f;  // e^kLowest is 0, and 0 * kLowest not NaN
constexpr int64_t kBlockColumns = 4096;  // are summed before they are added to the sum of the row
constexpr int64_t kKeptColumns = 65536;  // 256 KB of exponentials

// What a pass reads of a row: the logits, or what an earlier pass has kept in the buffer, in the order in which
// for_columns_of gives the columns of T.
template <class T>
struct Logits {
  static constexpr bool kAreExponentials = false, kAreValues = false;
  const T* row;
  template <class Lanes>
  ONETRIP_INLINE auto at(int64_t c, Lanes lanes) const {
    return load(row + c, lanes);
  }
};
struct Kept {
  const float* row;
  template <class Lanes>
  ONETRIP_INLINE F at(int64_t c, Lanes) const {
    return load(row + c, All{});
  }
  ONETRIP_INLINE Pair at(int64_t c, Both) const { return {load(row + c, All{}), load(row + c + kWidth, All{})}; }
};
struct Exponentials : Kept {
  static constexpr bool kAreExponentials = true, kAreValues = false;
};
struct Values : Kept {
  static constexpr bool kAreExponentials = false, kAreValues = true;
};

ONETRIP_INLINE void keep(float* to, F v) { store(to, v, All{}); }
ONETRIP_INLINE void keep(float* to, Pair v) { keep(to, v.even), keep(to + kWidth, v.odd); }

ONETRIP_INLINE Pair fill_lanes(Pair v, Both, float) { return v; }
ONETRIP_INLINE void add(F* chains, F v) { *chains += v; }
ONETRIP_INLINE void add(F* chains, Pair v) { chains[0] += v.even, chains[1] += v.odd; }

ONETRIP_INLINE F value_of(const CrossEntropy& args, F logits) {
  const F t = logits * args.scale;
  return args.softcap == 0.0f ? t : splat(args.softcap) * hyperbolic_tangent(t / splat(args.softcap));
}

template <class T>
ONETRIP_INLINE void keep_values(const CrossEntropy& args, const T* logits, float* kept) {
  for_columns_of<kChains, T>(0, args.n_cols, [&](int64_t c, auto lanes, int) {
    keep(kept + c, map([&](F v) { return value_of(args, v); }, load(logits + c, lanes)));
  });
}

// What the first passes find of a row: the largest value t, log(sum exp(t - largest)), the mean of t - largest, and the
// entropy of the probabilities (of values only). A mean of t itself would lose the digits of a common offset.
struct RowSums {
  float largest, log_sum, mean_below, entropy;
};

// kept: where exponentials are to be kept, or null. next: a row to be prefetched meanwhile.
template <class T, bool kKeeps, class Source>
ONETRIP_INLINE RowSums sum_row(const CrossEntropy& args, Source source, float* kept, const T* next) {
  F tops[kChains];
  for (F& top : tops) top = splat(-kInfinity);
  for_columns_of<kChains, T>(0, args.n_cols, [&](int64_t c, auto lanes, int chain) {
    const auto t = fill_lanes(source.at(c, lanes), lanes, -kInfinity);
    F* top = tops + chain;
    map([&](F v) { return *top = larger_number(v, *top), ++top, v; }, t);
  });
  const float largest = largest_of_chains(tops);
  const F shift = splat(largest == -kInfinity ? 0.0f : largest);
  F exponentials = {}, products = {}, plain = {};  // sums of e = exp(below), of e * below, of below = t - largest
  for (int64_t block = 0; block < args.n_cols; block += kBlockColumns) {
    F sums[kChains] = {}, weighted[kChains] = {}, totals[kChains] = {};
    for_columns_of<kChains, T>(
        block, smaller(block + kBlockColumns, args.n_cols), [&](int64_t c, auto lanes, int chain) {
          __builtin_prefetch(next + c, 0, 3);
          const auto all = map([&](F v) { return v - shift; }, source.at(c, lanes));
          const auto below = fill_lanes(all, lanes, -kInfinity);
          const auto e = map([&](F v) { return exp_nonpositive_for<T>(v); }, below);
          if constexpr (kKeeps) keep(kept + c, e);
          add(sums + chain, e);
          add(totals + chain, fill_lanes(all, lanes, 0.0f));
          if constexpr (Source::kAreValues)
            add(weighted + chain, map([&](F p, F v) { return p * larger_number(splat(kLowest), v); }, e, below));
        });
    exponentials += sum_chains(sums), plain += sum_chains(totals), products += sum_chains(weighted);
  }
  const float sum = sum_lanes(exponentials), log_sum = __builtin_logf(sum);
  return {largest, log_sum, sum_lanes(plain) / static_cast<float>(args.n_cols), log_sum - sum_lanes(products) / sum};
}

// The gradient of a row is (exp(t - largest) * (of_e + of_e_log_p * log p) + of_all) * dt, and of_label * dt more at
// the label; dt = 1 - (t / softcap)^2 where capped, else 1. The scale of the logits is a factor of each.
struct Factors {
  float of_e, of_e_log_p, of_all, of_label;
};

ONETRIP_INLINE Factors factors_of(const CrossEntropy& args, int64_t i, const RowSums& row) {
  const auto scaled = [&](float given) {
    given *= args.scale;
    return given == given ? given : kNaN;  // of NaNs the one that store_rounded of a pair takes
  };
  const float weight = scaled(args.weights ? args.weights[i * args.weight_stride] : args.weight);
  const float entropy_weight = args.entropy_weights ? scaled(args.entropy_weights[i]) : 0.0f;
  const float lse = row.largest + row.log_sum;
  const float inverse_sum = exp_nonpositive(splat(-row.log_sum))[0];
  const float of_p = weight * (1.0f + 2.0f * args.lse_square_scale * lse) - entropy_weight * row.entropy;
  return {of_p * inverse_sum, -entropy_weight * inverse_sum,
          -weight * args.label_smoothing / static_cast<float>(args.n_cols), -weight * (1.0f - args.label_smoothing)};
}

// next: a row to be prefetched meanwhile, where the first passes have not done so.
template <class T, class Source>
ONETRIP_INLINE void store_gradient(const CrossEntropy& args, const Factors& factors, const RowSums& row, Source source,
                                   T* dlogits, float t_label, int64_t label, const T* next, bool streams) {
  const F largest = splat(row.largest), log_sum = splat(row.log_sum), of_all = splat(factors.of_all);
  const F of_e = splat(factors.of_e), of_e_log_p = splat(factors.of_e_log_p);
  const auto slope = [&](F t) __attribute__((always_inline)) {
    if (args.softcap == 0.0f) return splat(1.0f);
    const F u = t / splat(args.softcap);
    return 1.0f - u * u;
  };
  const auto gradient = [&](F t) __attribute__((always_inline)) {
    const F below = t - largest, e = exp_nonpositive_for<T>(below);
    if constexpr (!Source::kAreValues) return mul_add(e, of_e, of_all);
    const F log_p = larger_number(splat(kLowest), below - log_sum);
    return mul_add(e, mul_add(log_p, of_e_log_p, of_e), of_all) * slope(t);
  };
  for_columns_of<kChains, T>(0, args.n_cols, [&](int64_t c, auto lanes, int) {
    if constexpr (Source::kAreExponentials) {
      store_rounded(dlogits + c, map([&](F e) { return mul_add(e, of_e, of_all); }, source.at(c, lanes)), lanes,
                    streams);
    } else {
      __builtin_prefetch(next + c, 0, 3);
      store_rounded(dlogits + c, map(gradient, source.at(c, lanes)), lanes, streams);
    }
  });
  F of_label = splat(factors.of_label);
  if constexpr (Source::kAreValues) of_label *= slope(splat(t_label));
  store_rounded(dlogits + label, gradient(splat(t_label)) + of_label, First{1});
}

// kIsPlain: t are the logits, and no entropy is wanted.
template <class T, bool kIsPlain>
void cross_entropy_rows(const CrossEntropy& args, int64_t first_row, int64_t end_row, bool streams, float* kept) {
  const bool keeps = args.dlogits && args.n_cols <= kKeptColumns;
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
      const T* next = i + 1 < end_row ? logits + args.logits_row_stride : logits;
      if constexpr (!kIsPlain) keep_values(args, logits, kept);
      const float t = value_of(args, load(logits + label, First{1}))[0];
      if (args.has_stats) {
        row.largest = args.stats[2 * i], row.log_sum = args.stats[2 * i + 1];
      } else if constexpr (!kIsPlain) {
        row = sum_row<T, false>(args, Values{{kept}}, nullptr, next);
      } else if (keeps) {
        row = sum_row<T, true>(args, Logits<T>{logits}, kept, next);
      } else {
        row = sum_row<T, false>(args, Logits<T>{logits}, nullptr, next);
      }
      const float lse = row.largest + row.log_sum, smoothing = args.label_smoothing;
      loss = (1.0f - smoothing) * (row.log_sum - (t - row.largest)) + args.lse_square_scale * lse * lse;
      if (smoothing != 0.0f) loss += smoothing * (row.log_sum - row.mean_below);
      if (dlogits) {
        const Factors factors = factors_of(args, i, row);
        const auto store_from = [&](auto source) __attribute__((always_inline)) {
          store_gradient<T>(args, factors, row, source, dlogits, t, label, next, streams);
        };
        if constexpr (!kIsPlain) {
          store_from(Values{{kept}});
        } else if (keeps && !args.has_stats) {
          store_from(Exponentials{{kept}});
        } else {
          store_from(Logits<T>{logits});
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
    const bool is_plain = args.softcap == 0.0f && args.scale == 1.0f && !args.entropy && !args.entropy_weights;
    return run_tasks(n_tasks, args.n_rows * args.n_cols, args.n_cols + 2 * kWidth, [&](int64_t task, float* kept) {
      const int64_t first = task * rows_per_task, end = smaller(first + rows_per_task, args.n_rows);
      if (is_plain) {
        cross_entropy_rows<T, true>(args, first, end, streams, kept);
      } else {
        cross_entropy_rows<T, false>(args, first, end, streams, kept);
      }
    });
  });
}

int add_to_sums(const AddToSums& args) {
  constexpr int64_t kTaskTerms = kTaskElements * 4;
  auto* nearest = static_cast<BFloat16*>(args.nearest);
  const auto* terms = static_cast<const BFloat16*>(args.terms);
  return run_tasks((args.n + kTaskTerms - 1) / kTaskTerms, args.n, kWidth, [&](int64_t task, float*) {
    const int64_t end = smaller((task + 1) * kTaskTerms, args.n);
    for_columns<2>(task * kTaskTerms, end, [&](int64_t c, auto lanes, int) {
      F before = load(nearest + c, lanes);
      if (!args.is_first) {
        const S rest = __builtin_convertvector((Signed16)load_bits(args.rest + c, lanes), S);
        before = join(load_bits(nearest + c, lanes), rest, 16, BFloat16{});
      }
      H sum;
      S rest;
      split(before + load(terms + c, lanes), 16, sum, rest, BFloat16{});
      store(nearest + c, sum, lanes);
      store(args.rest + c, __builtin_convertvector(rest, H), lanes);
    });
  });
}

}  // namespace onetrip::ONETRIP_LEVEL
