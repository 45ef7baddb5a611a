// The stages that forward takes a row of row_norm through: see row_norm.cpp.
#pragma once
#include "dropout.h"
#include "row_norm_common.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

constexpr int64_t kNarrow = 64;  // columns of the narrowest rows in use, a head of attention

// What is summed of a row while it is read: its deviations from the mean of its first columns, so that its variance
// takes no second look. RMSNorm: from 0.
struct Deviations {
  Sums sums;
  float center = 0.0f;
};
constexpr int64_t kFirstColumns = 16;

// The mean of value(c, lanes) over the first columns of a row.
template <class Value>
ONETRIP_INLINE float first_mean(int64_t n_cols, Value value) {
  const int64_t n = smaller(n_cols, kFirstColumns);
  F sum = {};
  for_columns<1>(0, n, [&](int64_t c, auto lanes, int) { sum += value(c, lanes); });
  return sum_lanes(sum) * (1.0f / n);
}

struct Assembly {
  const void* x;
  const void* residual;
  const float* bias;
  void* z;  // null: not stored in z's dtype
  bool streams_z;
  float* values;  // z as float32; null: not needed
  const DropoutMask* mask;
  const uint16_t* bits;  // of column `begin`
  Norm norm;
};

// z of columns [begin, end) of a row.
template <class X, class R, class Z>
void assemble(const Assembly& row, int64_t begin, int64_t end, Deviations& deviations) {
  const X* x = static_cast<const X*>(row.x);
  const R* residual = static_cast<const R*>(row.residual);
  Z* z = static_cast<Z*>(row.z);
  const float* bias = row.bias;
  float* values = row.values;
  const uint16_t* bits = row.bits;
  const auto value = [&](int64_t c, auto lanes) __attribute__((always_inline)) {
    F v = load(x + c, lanes);
    if (bias) v += load(bias + c, lanes);
    if (bits) v = row.mask->apply(v, row.mask->kept(bits + (c - begin)));
    if (residual) v += load(residual + c, lanes);
    return v;
  };
  if (begin == 0 && row.norm == Norm::kLayer) deviations.center = first_mean(end, value);
  const float center = deviations.center;  // a copy, or every store would have it loaded again
  Sums sums[1] = {deviations.sums};
  sum_columns(begin, end, sums, [&](int64_t c, auto lanes, auto add) {
    const F v = store_rounded(z ? z + c : nullptr, value(c, lanes), lanes, row.streams_z);
    if (values) store(values + c, v, lanes);
    const F deviation = keep_lanes(v - center, lanes);
    add(deviation, deviation);
  });
  deviations.sums = sums[0];
}

struct Statistics {
  float mean = 0.0f, correction = 0.0f;  // the mean is their sum, to more digits than one float32 holds
  float rstd = 0.0f;
};

// Statistics of a row with these values. Where the mean of its first columns was so far from its own that the squares
// cost the variance a bit, or overflow, they are summed again, about the mean. In long sums the distance itself leaves
// more roundings than values do: a quarter of it is far.
ONETRIP_INLINE Statistics statistics(const float* values, Deviations deviations, int64_t n_cols,
                                     const RowNormForward& args) {
  constexpr float kLargest = 3.4028235e38f;
  const float per_column = 1.0f / n_cols, farness = n_cols > 65536 ? 16.0f : 1.0f;
  for (bool is_last = args.norm == Norm::kRms;; is_last = true) {
    const LaneSums sums = sum_lanes(deviations.sums.values, deviations.sums.products);
    // The deviations' own mean corrects both: exact where mean / std is 1e4 and more.
    const float correction = args.norm == Norm::kRms ? 0.0f : sums.a * per_column;
    float variance = sums.b * per_column - correction * correction;
    if (variance < 0.0f) variance = 0.0f;  // not a maximum: NaN has to pass
    const bool is_near = farness * correction * correction <= variance && variance <= kLargest;
    if (is_near || is_last) return {deviations.center, correction, 1.0f / __builtin_sqrtf(variance + args.eps)};
    const float mean = deviations.center + correction;
    deviations.center = mean - mean == 0.0f ? mean : 0.0f;  // not where the sum overflowed
    Sums again[1];
    sum_columns(0, n_cols, again, [&](int64_t c, auto lanes, auto add) {
      const F deviation = keep_lanes(load(values + c, lanes) - deviations.center, lanes);
      add(deviation, deviation);
    });
    deviations.sums = again[0];
  }
}

// How every row of a call is normalised.
struct Normalisation {
  const RowNormForward& args;
  const float *weight, *norm_bias;
  bool streams;
};

// What else is fetched while a row is normalised. Null: nothing.
struct NextRow {
  const char *x, *residual;
  int64_t x_size, residual_size;
};

// y of a row.
template <class Y, class N>
ONETRIP_INLINE void normalise(const Normalisation& norm, int64_t row, int64_t n_cols, const float* values,
                              const Statistics& stats, const NextRow& next) {
  const RowNormForward& args = norm.args;
  const float *weight = norm.weight, *norm_bias = norm.norm_bias;
  if (args.mean) args.mean[row] = stats.mean + stats.correction;
  if (args.rstd) args.rstd[row] = stats.rstd;
  Y* y = static_cast<Y*>(args.y) + row * n_cols;
  float* centred = args.center_z && args.z ? static_cast<float*>(args.z) + row * n_cols : nullptr;
  const bool streams = norm.streams && is_line_aligned(y, centred);
  for_columns<4>(0, n_cols, [&](int64_t c, auto lanes, int) {
    if (next.x) __builtin_prefetch(next.x + c * next.x_size, 0, 2);
    if (next.residual) __builtin_prefetch(next.residual + c * next.residual_size, 0, 2);
    F v = (load(values + c, lanes) - stats.mean) - stats.correction;
    store_rounded(centred ? centred + c : nullptr, v, lanes, streams);
    v = round_to<N>(v * stats.rstd);
    if (weight) v *= load(weight + c, lanes);
    if (norm_bias) v += load(norm_bias + c, lanes);
    store_rounded(present(y + c), v, lanes, streams);
  });
}

// The same of a row whose deviations were summed.
template <class Y, class N>
void normalise_row(const Normalisation& norm, int64_t row, const float* values, const Deviations& deviations,
                   const NextRow& next) {
  const int64_t n_cols = norm.args.n_cols;
  normalise<Y, N>(norm, row, n_cols, values, statistics(values, deviations, n_cols, norm.args), next);
}

// The statistics of a narrow row wait for each other more than they compute: two rows at once fill the gaps. Wider
// ones would be read from more places than the hardware's prefetchers follow.
constexpr int kRowsAtOnce = kWidth == 16 ? 2 : 1;  // other levels have registers for the sums of one
constexpr int64_t kMaxColumnsAtOnce = 512;

// Rows whose z is x, in one call rather than two a row: 65536 x 64 float32 layer norm, 2 threads, 2.27 -> 1.73 ms,
// 4096 x 1024 1.55 -> 1.45.
template <class X, class Y, class N>
void normalise_rows(const Normalisation& norm, int64_t begin, int64_t end, float* buffer) {
  const RowNormForward& args = norm.args;
  const int64_t x_stride = args.x_row_stride, rows_ahead = rows_to_fetch_ahead(args.n_cols);
  const auto run = [&](int64_t n_cols) __attribute__((always_inline)) {
    const auto run_rows = [&](int64_t first, auto n_rows) __attribute__((always_inline)) {
      constexpr int kRows = decltype(n_rows)::value;
      const X* x = static_cast<const X*>(args.x) + first * x_stride;
      const X* next = norm.streams && first + rows_ahead + kRows <= args.n_rows ? x + rows_ahead * x_stride : nullptr;
      float center[kRows] = {};
      Sums sums[kRows];
      for (int row = 0; args.norm == Norm::kLayer && row < kRows; ++row) {
        center[row] = first_mean(n_cols, [&](int64_t c, auto lanes) { return load(x + row * x_stride + c, lanes); });
      }
      sum_columns(0, n_cols, sums, [&](int64_t c, auto lanes, auto add) {
        for (int row = 0; row < kRows; ++row) {
          const F v = load(x + row * x_stride + c, lanes);
          if constexpr (!kIsFloat32<X>) store(buffer + row * n_cols + c, v, lanes);
          const F deviation = keep_lanes(v - center[row], lanes);
          add(deviation, deviation, row);
        }
      });
      const float* values[kRows];
      Statistics stats[kRows];
      for (int row = 0; row < kRows; ++row) {
        values[row] = buffer + row * n_cols;
        if constexpr (kIsFloat32<X>) values[row] = x + row * x_stride;
        stats[row] = statistics(values[row], {sums[row], center[row]}, n_cols, args);
      }
      for (int row = 0; row < kRows; ++row) {
        normalise<Y, N>(norm, first + row, n_cols, values[row], stats[row],
                        {next ? reinterpret_cast<const char*>(next + row * x_stride) : nullptr, nullptr, sizeof(X), 0});
      }
    };
    int64_t row = begin;
    if (n_cols <= kMaxColumnsAtOnce) {
      for (; row + kRowsAtOnce <= end; row += kRowsAtOnce) run_rows(row, std::integral_constant<int, kRowsAtOnce>{});
    }
    for (; row < end; ++row) run_rows(row, std::integral_constant<int, 1>{});
  };
  // A constant lets the row stay in registers: 65536 x 64 float32 layer norm 1.43 ms in place of 1.73.
  if (args.n_cols == kNarrow) {
    run(kNarrow);
  } else {
    run(args.n_cols);
  }
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
