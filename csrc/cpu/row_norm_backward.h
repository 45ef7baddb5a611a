// The stages that backward takes a block of rows of row_norm through: see row_norm.cpp.
#pragma once
#include "dropout.h"
#include "row_norm_common.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// Backward takes about this many elements at once, but kMinBlockRows to kMaxBlockRows rows: the more rows, the rarer
// are the sums of parameter gradients read and written; dy and z are read again from L1 or L2. 8192 x 512 float32, 2
// threads: 1024 elements 1.85 ms, 4096 1.74.
constexpr int64_t kBlockElements = 4096, kMinBlockRows = 4, kMaxBlockRows = 16;
static_assert(kBlockElements <= DropoutMask::kWholeRows && kMinBlockRows <= DropoutMask::kMaxSplitRows &&
                  kMaxBlockRows <= DropoutMask::kMaxRows,
              "the mask of a block is drawn whole, or by columns where it has the fewest rows");
constexpr int kTile = 4;  // vectors of each parameter gradient held in registers

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
    float minus_mean_wdy_n, mean_wdy;
  } rows[kMaxBlockRows];
};

// Means of w*dy*n and w*dy over each row of the block, whose first is args' row `first`. Half-precision rows are left
// as float32 in the buffers. Fetches dy of the next block; propagate fetches its z: memory is busy in both stages.
// 16384 x 256 float32 from memory, 2 threads: 1.5 ms, 1.8 with both in propagate.
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
    const char* next_dy = block.next_dy + k * block.next_dy_stride;
    Sums sums[1];
    sum_columns(0, n_cols, sums, [&](int64_t c, auto lanes, auto add) {
      __builtin_prefetch(next_dy + c * sizeof(Y), 0, 2);
      F g = load(dy + c, lanes);
      const F v = load(z + c, lanes);
      if constexpr (!kIsFloat32<Y>) store(dy_values + c, g, lanes);
      if constexpr (!kIsFloat32<Z>) store(z_values + c, v, lanes);
      if (weight) g *= load(weight + c, lanes);
      add(g, keep_lanes((v - row.mean) * row.rstd, lanes));
    });
    const float per_column = 1.0f / n_cols;
    const LaneSums wdy = sum_lanes(sums[0].values, sums[0].products);
    row.mean_wdy = args.norm == Norm::kRms ? 0.0f : wdy.a * per_column;
    row.minus_mean_wdy_n = -(wdy.b * per_column);
    block.rows[k] = row;
  }
}

// kVectors vectors from column c down the rows of the block. kIsNorm: nothing but a norm and its parameters.
template <int kVectors, bool kIsNorm, class X, class R, class D, class Lanes>
ONETRIP_INLINE void propagate_tile(const BackwardBlock& block, int64_t c, int64_t begin, Lanes lanes) {
  // Copies, and pointers that step from row to row: every store would have what lies in the block loaded again.
  const bool streams = block.streams, has_dy = kIsNorm || block.dy;
  const int n_rows = block.n_rows;
  const int64_t dy_stride = block.dy_row_stride, z_stride = block.z_row_stride, dz_stride = block.dz_row_stride;
  const int64_t n_cols = block.n_cols, next_z_stride = block.next_z_stride, z_step = kWidth * block.z_size;
  const float *dy = has_dy ? block.dy + c : nullptr, *z = has_dy ? block.z + c : nullptr;
  const char* next_z = has_dy ? block.next_z + c * block.z_size : nullptr;
  const D* dz = !kIsNorm && block.dz ? static_cast<const D*>(block.dz) + c : nullptr;
  X* dx = kIsNorm || block.dx ? static_cast<X*>(block.dx) + c : nullptr;
  R* dresidual = !kIsNorm && block.dresidual ? static_cast<R*>(block.dresidual) + c : nullptr;
  F weight[kVectors], dweight[kVectors] = {}, dnorm_bias[kVectors] = {}, dbias[kVectors] = {};
  for (int i = 0; i < kVectors; ++i)
    weight[i] = block.weight ? load(block.weight + c + i * kWidth, lanes) : splat(1.0f);
  for (int k = 0; k < n_rows; ++k) {
    const BackwardBlock::Row row = block.rows[k];
    const uint16_t* bits = !kIsNorm && block.mask ? block.mask->row(k) + (c - begin) : nullptr;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      F g = {};
      if (has_dy) {
        // The hardware's prefetchers start anew on every page; 4096 x 1024 bf16 takes 2.8 ms with these, 3.4 without.
        __builtin_prefetch(next_z + i * z_step, 0, 2);
        const F gradient = load(dy + i * kWidth, lanes);
        const F n = (load(z + i * kWidth, lanes) - row.mean) * row.rstd;
        dweight[i] = mul_add(gradient, n, dweight[i]);
        dnorm_bias[i] += gradient;
        g = gradient * weight[i] - row.mean_wdy;  // rounded as in project: a row of one column gives exactly 0
        g = mul_add(n, splat(row.minus_mean_wdy_n), g) * row.rstd;
      }
      if (dz) g += load(dz + i * kWidth, lanes);
      if (dresidual) store_rounded(dresidual + i * kWidth, g, lanes, streams);
      if (bits) g = block.mask->apply(g, block.mask->kept(bits + i * kWidth));
      if (kIsNorm) {
        store_rounded(present(dx) + i * kWidth, g, lanes, streams);
      } else if (dx) {
        store_rounded(dx + i * kWidth, g, lanes, streams);
      }
      if (!kIsNorm) dbias[i] += g;
    }
    if (has_dy) dy += dy_stride, z += z_stride, next_z += next_z_stride;
    if (dz) dz += dz_stride;
    if (dx) dx += n_cols;
    if (dresidual) dresidual += n_cols;
  }
  const auto add_to = [&](float* sums, int64_t step, const F* tile) {
    for (int i = 0; i < kVectors; ++i) {
      float* to = sums + (c + i * kWidth) * step;
      store(to, load(to, All{}) + tile[i], All{});  // a slot is padded to whole vectors
    }
  };
  add_to(block.dweight, block.dweight_step, dweight);
  add_to(block.dnorm_bias, block.dnorm_bias_step, dnorm_bias);
  if (!kIsNorm) add_to(block.dbias, block.dbias_step, dbias);
}

template <bool kIsNorm, class X, class R, class D>
void propagate(const BackwardBlock& block, int64_t begin, int64_t end) {
  int64_t c = begin;
  for (; c + kTile * kWidth <= end; c += kTile * kWidth)
    propagate_tile<kTile, kIsNorm, X, R, D>(block, c, begin, All{});
  for (; c + kWidth <= end; c += kWidth) propagate_tile<1, kIsNorm, X, R, D>(block, c, begin, All{});
  if (c < end) propagate_tile<1, kIsNorm, X, R, D>(block, c, begin, First{static_cast<int>(end - c)});
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
