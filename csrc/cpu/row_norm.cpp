// z = residual + dropout(x + bias);  y = round(normalise(z)) * (weight + weight_offset) + norm_bias, and its gradients.
//
// Forward takes a row through three stages with float32 in between, templates over the dtypes that they meet:
// `assemble` (`read` where z is x) reads x and residual, rounds z once and sums it; `moments` takes the variance about
// the mean, from cache; `normalise` writes y. In between the row is x or z itself where that is float32, else a buffer
// of the thread. Memory sees each input read once and each output written once.
//
// Backward takes a block of rows through two: `project` reads dy and z and sums w*dy*n and w*dy of each row;
// `propagate` goes down the columns of the block, writes dx and dresidual, and adds to the parameter gradients, whose
// sums stay in registers for the rows of the block and in cache for the rows of the part. Reads dy, z, dz once, writes
// dx and dresidual once.
//
// Threads take tasks of consecutive rows. Backward's tasks are the parts of row_partition(), a function of the sizes
// alone, and the parts are added in order: no bit of a gradient depends on the number of threads or on which took what.
#include <cerrno>
#include <cstdlib>

#include "dropout.h"
#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

// Rows that backward takes at once, so that parameter gradients stay in registers for 4 of them at least; more rows of
// more columns fall out of L1 (4096 x 256 float32: 16 rows 0.72 ms, 4 rows 0.47).
constexpr int64_t kBlockElements = 1024, kMaxBlockRows = 16;
constexpr int64_t kNarrow = 64;  // columns of the narrowest rows in use, a head of attention
constexpr int kSumChains = 4;
constexpr int64_t kSumColumns = 2048;

// A parameter as float32 plus offset: the caller's own array where that is what it holds.
class Parameter {
 public:
  Parameter(const void* source, DType dtype, float offset, int64_t n) : values_(static_cast<const float*>(source)) {
    if (!source || (dtype == DType::kFloat32 && offset == 0.0f)) return;
    copy_ = static_cast<float*>(malloc(n * sizeof(float)));
    values_ = copy_;
    failed_ = !copy_;
    if (failed_) return;
    with_type(dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(source);
      for_columns<1>(0, n,
                     [&](int64_t c, auto lanes, int) { store(copy_ + c, load(from + c, lanes) + offset, lanes); });
    });
  }
  Parameter(const Parameter&) = delete;
  ~Parameter() { free(copy_); }
  const float* values() const { return values_; }
  bool failed() const { return failed_; }

 private:
  const float* values_;
  float* copy_ = nullptr;
  bool failed_ = false;
};

// Sums over a row of a and of a * b.
struct Sums {
  F values = {}, products = {};
};

// For every vector of [begin, end), body(column, lanes, add) calls add(a, b) once, and what it adds goes to the sums.
// Sums run in kSumChains chains that are folded every kSumColumns columns: in one long chain every addition rounds off
// the low bits that half-precision values have in common in the same direction, and the error grows with the width.
template <class Body>
ONETRIP_INLINE void sum_columns(int64_t begin, int64_t end, Sums& sums, Body body) {
  static_assert(kSumChains == 4, "added in pairs");
  F values = sums.values, products = sums.products;
  for (int64_t block = begin; block < end; block += kSumColumns) {
    F a_sum[kSumChains] = {}, ab_sum[kSumChains] = {};
    for_columns<kSumChains>(block, smaller(block + kSumColumns, end), [&](int64_t c, auto lanes, int chain) {
      body(c, lanes, [&](F a, F b) __attribute__((always_inline)) {
        a_sum[chain] += a;
        ab_sum[chain] = mul_add(a, b, ab_sum[chain]);
      });
    });
    values += (a_sum[0] + a_sum[1]) + (a_sum[2] + a_sum[3]);
    products += (ab_sum[0] + ab_sum[1]) + (ab_sum[2] + ab_sum[3]);
  }
  sums.values = values;
  sums.products = products;
}

struct Assembly {
  const void* x;
  const void* residual;
  const float* bias;
  void* z;  // null: not stored in z's dtype
  bool streams_z;
  float* values;  // z as float32; null: not needed
  const DropoutMask* mask;
  const uint32_t* words;  // of column `begin`
};

// z of columns [begin, end) of a row.
template <class X, class R, class Z>
void assemble(const Assembly& row, int64_t begin, int64_t end, Sums& sums) {
  const X* x = static_cast<const X*>(row.x);
  const R* residual = static_cast<const R*>(row.residual);
  Z* z = static_cast<Z*>(row.z);
  const float* bias = row.bias;
  float* values = row.values;
  const uint32_t* words = row.words;
  sum_columns(begin, end, sums, [&](int64_t c, auto lanes, auto add) {
    F v = load(x + c, lanes);
    if (bias) v += load(bias + c, lanes);
    if (words) v = row.mask->apply(v, words + (c - begin));
    if (residual) v += load(residual + c, lanes);
    v = store_rounded(z ? z + c : nullptr, v, lanes, row.streams_z);
    if (values) store(values + c, v, lanes);
    add(v, v);
  });
}

// The same where z is x: only its sums, and its float32 values where x is not float32.
template <class X>
ONETRIP_INLINE void read(const X* x, float* values, int64_t n_cols, Sums& sums) {
  sum_columns(0, n_cols, sums, [&](int64_t c, auto lanes, auto add) {
    const F v = load(x + c, lanes);
    if constexpr (!kIsFloat32<X>) store(values + c, v, lanes);
    add(v, v);
  });
}

struct Statistics {
  float mean = 0.0f, correction = 0.0f;  // the mean is their sum, to more digits than one float32 holds
  float rstd = 0.0f;
};

// Of a row whose sums are known. LayerNorm: variance about the first mean. The deviations' own mean corrects both:
// exact where mean / std is 1e4 and more.
ONETRIP_INLINE Statistics moments(const float* values, const Sums& row_sums, int64_t n_cols,
                                  const RowNormForward& args) {
  const float eps = args.eps, per_column = 1.0f / n_cols;
  if (args.norm == Norm::kRms) {
    return {0.0f, 0.0f, 1.0f / __builtin_sqrtf(sum_lanes(row_sums.products) * per_column + eps)};
  }
  const float mean = sum_lanes(row_sums.values) * per_column;
  Sums sums;
  sum_columns(0, n_cols, sums, [&](int64_t c, auto lanes, auto add) {
    const F deviation = keep_lanes(load(values + c, lanes) - mean, lanes);
    add(deviation, deviation);
  });
  const float correction = sum_lanes(sums.values) * per_column;
  float variance = sum_lanes(sums.products) * per_column - correction * correction;
  if (variance < 0.0f) variance = 0.0f;  // not a maximum: NaN has to pass
  return {mean, correction, 1.0f / __builtin_sqrtf(variance + eps)};
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

// y of a row whose z has been summed.
template <class Y, class N>
ONETRIP_INLINE void normalise(const Normalisation& norm, int64_t row, int64_t n_cols, const float* values,
                              const Sums& sums, const NextRow& next) {
  const RowNormForward& args = norm.args;
  const float *weight = norm.weight, *norm_bias = norm.norm_bias;
  const Statistics stats = moments(values, sums, n_cols, args);
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
    store_rounded(y + c, v, lanes, streams);
  });
}

template <class Y, class N>
void normalise_row(const Normalisation& norm, int64_t row, const float* values, const Sums& sums, const NextRow& next) {
  normalise<Y, N>(norm, row, norm.args.n_cols, values, sums, next);
}

// Rows whose z is x, in one call rather than two a row: 65536 x 64 float32 layer norm, 2 threads, 2.27 -> 1.73 ms,
// 4096 x 1024 1.55 -> 1.45.
template <class X, class Y, class N>
void normalise_rows(const Normalisation& norm, int64_t begin, int64_t end, float* buffer) {
  const RowNormForward& args = norm.args;
  const auto run = [&](int64_t n_cols) __attribute__((always_inline)) {
    for (int64_t row = begin; row < end; ++row) {
      const X* x = static_cast<const X*>(args.x) + row * args.x_row_stride;
      const float* values = buffer;
      if constexpr (kIsFloat32<X>) values = x;
      Sums sums;
      read(x, buffer, n_cols, sums);
      normalise<Y, N>(norm, row, n_cols, values, sums, {});
    }
  };
  // A constant lets the row stay in registers: 65536 x 64 float32 layer norm 1.43 ms in place of 1.73.
  if (args.n_cols == kNarrow) {
    run(kNarrow);
  } else {
    run(args.n_cols);
  }
}

constexpr int kTile = kWidth == 16 ? 4 : 2;  // vectors of each parameter gradient held in registers

struct BackwardBlock {
  int n_rows;
  const float *dy, *z, *weight;  // dy null: no gradient through the norm
  const void* dz;
  void *dx, *dresidual;
  int64_t dy_row_stride, z_row_stride, dz_row_stride, n_cols;
  const char *next_dy, *next_z;  // the rows of the next block, and their strides and elements in bytes
  int64_t next_dy_stride, next_z_stride, dy_size, z_size;
  float *dweight, *dnorm_bias, *dbias;                // sums of the part
  int64_t dweight_step, dnorm_bias_step, dbias_step;  // 1, or 0 where not wanted: then all columns fall on a dump
  bool streams;
  const DropoutMask* mask;  // null: no dropout
  struct Row {
    float mean, rstd;
    float mean_wdy_n, mean_wdy;
  } rows[kMaxBlockRows];
};

// Means of w*dy*n and w*dy over each row of the block, whose first is args' row `first`. Half-precision rows are left
// as float32 in the buffers.
template <class Y, class Z>
void project(const RowNormBackward& args, int64_t first, float* dy_buffer, float* z_buffer, BackwardBlock& block) {
  const int64_t n_cols = block.n_cols;
  const float* weight = block.weight;
  for (int k = 0; k < block.n_rows; ++k) {
    BackwardBlock::Row row;
    row.mean = args.mean ? args.mean[first + k] : 0.0f;
    row.rstd = args.rstd[first + k];
    const Y* dy = static_cast<const Y*>(args.dy) + (first + k) * args.dy_row_stride;
    const Z* z = static_cast<const Z*>(args.z) + (first + k) * args.z_row_stride;
    float* dy_values = dy_buffer + k * block.dy_row_stride;
    float* z_values = z_buffer + k * block.z_row_stride;
    Sums sums;
    sum_columns(0, n_cols, sums, [&](int64_t c, auto lanes, auto add) {
      F g = load(dy + c, lanes);
      const F v = load(z + c, lanes);
      if constexpr (!kIsFloat32<Y>) store(dy_values + c, g, lanes);
      if constexpr (!kIsFloat32<Z>) store(z_values + c, v, lanes);
      if (weight) g *= load(weight + c, lanes);
      add(g, keep_lanes((v - row.mean) * row.rstd, lanes));
    });
    const float per_column = 1.0f / n_cols;
    row.mean_wdy = args.norm == Norm::kRms ? 0.0f : sum_lanes(sums.values) * per_column;
    row.mean_wdy_n = sum_lanes(sums.products) * per_column;
    block.rows[k] = row;
  }
}

// kVectors vectors from column c down the rows of the block.
template <int kVectors, class X, class R, class D, class Lanes>
ONETRIP_INLINE void propagate_tile(const BackwardBlock& block, int64_t c, int64_t begin, Lanes lanes) {
  F weight[kVectors], dweight[kVectors] = {}, dnorm_bias[kVectors] = {}, dbias[kVectors] = {};
  for (int i = 0; i < kVectors; ++i)
    weight[i] = block.weight ? load(block.weight + c + i * kWidth, lanes) : splat(1.0f);
  for (int k = 0; k < block.n_rows; ++k) {
    const BackwardBlock::Row row = block.rows[k];
    const float* dy = block.dy + (k * block.dy_row_stride + c);
    const float* z = block.z + (k * block.z_row_stride + c);
    const D* dz = block.dz ? static_cast<const D*>(block.dz) + (k * block.dz_row_stride + c) : nullptr;
    X* dx = block.dx ? static_cast<X*>(block.dx) + (k * block.n_cols + c) : nullptr;
    R* dresidual = block.dresidual ? static_cast<R*>(block.dresidual) + (k * block.n_cols + c) : nullptr;
    const uint32_t* words = block.mask ? block.mask->row(k) + (c - begin) : nullptr;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      F g = {};
      if (block.dy) {
        // The hardware's prefetchers start anew on every page; 4096 x 1024 bf16 takes 2.8 ms with these, 3.4 without.
        __builtin_prefetch(block.next_dy + (k * block.next_dy_stride + (c + i * kWidth) * block.dy_size), 0, 2);
        __builtin_prefetch(block.next_z + (k * block.next_z_stride + (c + i * kWidth) * block.z_size), 0, 2);
        const F gradient = load(dy + i * kWidth, lanes);
        const F n = (load(z + i * kWidth, lanes) - row.mean) * row.rstd;
        dweight[i] = mul_add(gradient, n, dweight[i]);
        dnorm_bias[i] += gradient;
        g = gradient * weight[i] - row.mean_wdy;  // rounded as in project: a row of one column gives exactly 0
        g = mul_add(n, splat(-row.mean_wdy_n), g) * row.rstd;
      }
      if (dz) g += load(dz + i * kWidth, lanes);
      if (dresidual) store_rounded(dresidual + i * kWidth, g, lanes, block.streams);
      if (words) g = block.mask->apply(g, words + i * kWidth);
      if (dx) store_rounded(dx + i * kWidth, g, lanes, block.streams);
      dbias[i] += g;
    }
  }
  const auto add_to = [&](float* sums, int64_t step, const F* tile) {
    for (int i = 0; i < kVectors; ++i) {
      float* to = sums + (c + i * kWidth) * step;
      store(to, load(to, All{}) + tile[i], All{});  // a slot is padded to whole vectors
    }
  };
  add_to(block.dweight, block.dweight_step, dweight);
  add_to(block.dnorm_bias, block.dnorm_bias_step, dnorm_bias);
  add_to(block.dbias, block.dbias_step, dbias);
}

template <class X, class R, class D>
void propagate(const BackwardBlock& block, int64_t begin, int64_t end) {
  int64_t c = begin;
  for (; c + kTile * kWidth <= end; c += kTile * kWidth) propagate_tile<kTile, X, R, D>(block, c, begin, All{});
  for (; c + kWidth <= end; c += kWidth) propagate_tile<1, X, R, D>(block, c, begin, All{});
  if (c < end) propagate_tile<1, X, R, D>(block, c, begin, First{static_cast<int>(end - c)});
}

// to = sum of the parts' slots, in order.
template <class T>
void add_parts(const float* slots, int64_t part_floats, int64_t n_parts, void* to, int64_t begin, int64_t end) {
  for_columns<1>(begin, end, [&](int64_t c, auto lanes, int) {
    store_rounded(static_cast<T*>(to) + c, sum_slots(slots + c, part_floats, n_parts), lanes);
  });
}

}  // namespace

int row_norm_forward(const RowNormForward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_rows <= 0 || n_cols <= 0) return 0;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, n_cols);
  const Parameter weight(args.weight, args.weight_dtype, args.weight_offset, n_cols);
  const Parameter norm_bias(args.norm_bias, args.norm_bias_dtype, 0.0f, n_cols);
  if (bias.failed() || weight.failed() || norm_bias.failed()) return ENOMEM;

  const bool has_norm = args.norm != Norm::kNone, has_dropout = args.dropout.threshold != 0;
  const bool is_z_float32 = args.z_dtype == DType::kFloat32;
  const bool stores_z = args.z && !args.center_z;
  const bool is_z_x = has_norm && !stores_z && !bias.values() && !args.residual && !has_dropout &&
                      (is_z_float32 || args.z_dtype == args.x_dtype);

  const DType residual_dtype = args.residual ? args.residual_dtype : args.x_dtype;
  const auto assemble_row = with_type(args.x_dtype, [&](auto x) {
    return with_type(residual_dtype, [&](auto r) {
      return with_type(args.z_dtype, [&](auto z) { return &assemble<decltype(x), decltype(r), decltype(z)>; });
    });
  });
  const auto normalise_one = with_type(args.y_dtype, [&](auto y) {
    return with_type(args.n_dtype, [](auto n) { return &normalise_row<decltype(y), decltype(n)>; });
  });
  const auto normalise_all = with_type(args.x_dtype, [&](auto x) {
    return with_type(args.y_dtype, [&](auto y) {
      return with_type(args.n_dtype, [](auto n) { return &normalise_rows<decltype(x), decltype(y), decltype(n)>; });
    });
  });

  // Narrow rows draw their random words several rows at a time, wide ones some columns at a time.
  const bool draws_columns = has_dropout && n_cols > DropoutMask::kColumns;
  const int64_t rows_per_draw = clamp(DropoutMask::kColumns / n_cols, 1, DropoutMask::kMaxRows);
  const int64_t cols_per_draw = draws_columns ? DropoutMask::kColumns : n_cols;
  const int64_t rows_per_task = round_up(clamp(kTaskElements / n_cols, 1, n_rows), rows_per_draw);
  const int64_t row_floats = round_up(n_cols, 16);
  const int64_t x_size = size_of(args.x_dtype), residual_size = size_of(args.residual_dtype);
  const bool streams = n_rows * n_cols * size_of(has_norm ? args.y_dtype : args.z_dtype) >= kStreamBytes;
  const Normalisation norm = {args, weight.values(), norm_bias.values(), streams};
  // Reads are spread over what computes: the next row's x comes while this row's words are drawn, its residual while
  // this row is normalised. 4096 x 1024 float32, p = 0.1, 2 threads: 2.51 ms, 2.71 with both in the latter; one thread
  // without either 5.4 against 4.1.
  const bool draws_rows_singly = has_dropout && rows_per_draw == 1;

  const auto run_row = [&](int64_t row, DropoutMask& mask, int row_of_draw, float* buffer) {
    const void* x = at(args.x, row * args.x_row_stride, args.x_dtype);
    const void* residual = at(args.residual, row * args.residual_row_stride, args.residual_dtype);
    const char* next_x = streams ? static_cast<const char*>(x) + args.x_row_stride * x_size : nullptr;
    const char* next_residual =
        streams && residual ? static_cast<const char*>(residual) + args.residual_row_stride * residual_size : nullptr;
    void* z = stores_z ? at(args.z, row * n_cols, args.z_dtype) : nullptr;
    const bool streams_z = streams && is_line_aligned(z, nullptr);
    const float* values = buffer;
    Sums sums;
    Assembly assembly = {x, residual, bias.values(), z, streams_z, has_norm ? buffer : nullptr, &mask, nullptr};
    if (z && is_z_float32 && !streams_z) {  // the stored z serves as the row
      assembly.z = nullptr;
      values = assembly.values = static_cast<float*>(z);
    }
    for (int64_t begin = 0; begin < n_cols; begin += cols_per_draw) {
      const int64_t end = smaller(begin + cols_per_draw, n_cols);
      if (draws_rows_singly) {
        mask.fill(row, 1, begin, end, n_cols, {next_x ? next_x + begin * x_size : nullptr, x_size});
      }
      if (has_dropout) assembly.words = mask.row(row_of_draw);
      assemble_row(assembly, begin, end, sums);
    }
    if (has_norm) {
      normalise_one(norm, row, values, sums,
                    {draws_rows_singly ? nullptr : next_x, next_residual, x_size, residual_size});
    }
  };
  const auto run_task = [&](int64_t task, float* buffer) {
    const int64_t task_begin = task * rows_per_task, task_end = smaller(n_rows, task_begin + rows_per_task);
    if (is_z_x) return normalise_all(norm, task_begin, task_end, buffer);
    DropoutMask mask(args.dropout, reinterpret_cast<uint32_t*>(buffer + row_floats));
    for (int64_t first = task_begin; first < task_end; first += rows_per_draw) {
      const int n = static_cast<int>(smaller(rows_per_draw, task_end - first));
      if (has_dropout && !draws_rows_singly) mask.fill(first, n, 0, n_cols, n_cols);
      for (int k = 0; k < n; ++k) run_row(first + k, mask, k, buffer);
    }
  };
  const int64_t n_tasks = (n_rows + rows_per_task - 1) / rows_per_task;
  return run_tasks(n_tasks, n_rows * n_cols, row_floats + DropoutMask::kWords, run_task);
}

int row_norm_backward(const RowNormBackward& args) {
  const int64_t n_rows = args.n_rows, n_cols = args.n_cols;
  if (n_cols <= 0) return 0;
  const Parameter weight(args.weight, args.weight_dtype, args.weight_offset, n_cols);
  if (weight.failed()) return ENOMEM;
  const auto project_block = with_type(args.y_dtype, [&](auto y) {
    return with_type(args.z_dtype, [](auto z) { return &project<decltype(y), decltype(z)>; });
  });
  const auto propagate_block = with_type(args.x_dtype, [&](auto x) {
    return with_type(args.dresidual ? args.residual_dtype : args.x_dtype, [&](auto r) {
      return with_type(args.z_dtype, [](auto d) { return &propagate<decltype(x), decltype(r), decltype(d)>; });
    });
  });

  const RowPartition partition = row_partition(n_rows, n_cols);
  struct Sum {
    void* to;
    DType dtype;
    int slot;  // among those wanted
  };
  Sum sums[] = {{args.dbias, args.bias_dtype, 0},
                {args.dweight, args.weight_dtype, 0},
                {args.dnorm_bias, args.norm_bias_dtype, 0}};
  int n_wanted = 0;
  for (Sum& sum : sums) sum.slot = sum.to ? n_wanted++ : 0;
  const int64_t part_floats = n_wanted * partition.slot_floats;

  const bool has_dropout = args.dropout.threshold != 0;
  const int64_t rows_per_block = clamp(kBlockElements / n_cols, DropoutMask::kMaxSplitRows, kMaxBlockRows);
  const bool draws_columns = has_dropout && rows_per_block * n_cols > DropoutMask::kWholeRows;
  const int64_t cols_per_draw = draws_columns ? DropoutMask::kColumns : n_cols;
  const int64_t row_floats = round_up(n_cols, 16), block_floats = rows_per_block * row_floats;
  const bool streams = n_rows * n_cols * size_of(args.dx ? args.x_dtype : args.residual_dtype) >= kStreamBytes &&
                       n_cols % 32 == 0 && is_line_aligned(args.dx, args.dresidual);
  const bool copies_dy = args.dy && args.y_dtype != DType::kFloat32;
  const bool copies_z = args.dy && args.z_dtype != DType::kFloat32;

  const auto run_part = [&](int64_t part, float* buffer) {
    float* dump = buffer;
    float* dy_copy = dump + 16;
    float* z_copy = dy_copy + copies_dy * block_floats;
    DropoutMask mask(args.dropout, reinterpret_cast<uint32_t*>(z_copy + copies_z * block_floats));
    memset(dump, 0, 16 * sizeof(float));
    float* slots = args.workspace + part * part_floats;
    if (n_wanted) memset(slots, 0, part_floats * sizeof(float));
    const auto slot = [&](int i) { return sums[i].to ? slots + sums[i].slot * partition.slot_floats : dump; };

    BackwardBlock block = {};
    block.weight = weight.values();
    block.dy_row_stride = copies_dy ? row_floats : args.dy_row_stride;
    block.z_row_stride = copies_z ? row_floats : args.z_row_stride;
    block.dz_row_stride = args.dz_row_stride;
    block.dy_size = size_of(args.y_dtype), block.z_size = size_of(args.z_dtype);
    block.next_dy_stride = args.dy_row_stride * block.dy_size;
    block.next_z_stride = args.z_row_stride * block.z_size;
    block.n_cols = n_cols;
    block.dbias = slot(0), block.dweight = slot(1), block.dnorm_bias = slot(2);
    block.dbias_step = args.dbias != nullptr, block.dweight_step = args.dweight != nullptr;
    block.dnorm_bias_step = args.dnorm_bias != nullptr;
    block.streams = streams;
    block.mask = has_dropout ? &mask : nullptr;
    const int64_t part_end = smaller(n_rows, (part + 1) * partition.rows_per_part);
    for (int64_t first = part * partition.rows_per_part; first < part_end; first += rows_per_block) {
      block.n_rows = static_cast<int>(smaller(rows_per_block, part_end - first));
      const void* dy = at(args.dy, first * args.dy_row_stride, args.y_dtype);
      const void* z = at(args.z, first * args.z_row_stride, args.z_dtype);
      block.next_dy = static_cast<const char*>(dy) + block.n_rows * block.next_dy_stride;
      block.next_z = static_cast<const char*>(z) + block.n_rows * block.next_z_stride;
      block.dy = copies_dy ? dy_copy : static_cast<const float*>(dy);
      block.z = copies_z ? z_copy : static_cast<const float*>(z);
      block.dz = at(args.dz, first * args.dz_row_stride, args.z_dtype);
      block.dx = at(args.dx, first * n_cols, args.x_dtype);
      block.dresidual = at(args.dresidual, first * n_cols, args.residual_dtype);
      if (args.dy) project_block(args, first, dy_copy, z_copy, block);
      for (int64_t begin = 0; begin < n_cols; begin += cols_per_draw) {
        const int64_t end = smaller(begin + cols_per_draw, n_cols);
        if (has_dropout) mask.fill(first, block.n_rows, begin, end, n_cols);
        propagate_block(block, begin, end);
      }
    }
  };
  const int64_t buffer_floats = 16 + (copies_dy + copies_z) * block_floats + DropoutMask::kWords;
  if (const int error = run_tasks(partition.n_parts, n_rows * n_cols, buffer_floats, run_part)) return error;

  const int64_t cols_per_task = 256;
  return run_tasks((n_cols + cols_per_task - 1) / cols_per_task, partition.n_parts * part_floats, 16,
                   [&](int64_t task, float*) {
                     const int64_t begin = task * cols_per_task, end = smaller(begin + cols_per_task, n_cols);
                     for (const Sum& sum : sums) {
                       if (!sum.to) continue;
                       const float* slots = args.workspace + sum.slot * partition.slot_floats;
                       with_type(sum.dtype, [&](auto type) {
                         add_parts<decltype(type)>(slots, part_floats, partition.n_parts, sum.to, begin, end);
                       });
                     }
                   });
}

}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
