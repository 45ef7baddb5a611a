// The kernels of each CPU level, and what they share with dispatch.cpp. Only plain functions: an inline one here could
// be emitted by the AVX-512 file and be linked into the baseline.
#pragma once
#include "../launch.h"

namespace onetrip {

// Consecutive rows whose parameter gradients are summed together, by one thread, before the parts are added in order.
struct RowPartition {
  int64_t rows_per_part, n_parts;
  int64_t slot_floats;  // n_cols rounded up to whole cache lines: a part's sums of one parameter gradient
};
RowPartition row_partition(int64_t n_rows, int64_t n_cols);

// How the gradient of a mask is summed: the rows that share a row of the mask are cut into n_parts of rows_per_part.
// With one part its sum is the gradient; else each part has a slot of the workspace, and the slots are added in order.
struct MaskPartition {
  int64_t n_mask_rows, n_sharing;  // rows of the mask that differ, and rows of scores that share each
  int64_t rows_per_part, n_parts;  // of n_sharing
  int64_t slot_floats;             // n_cols rounded up to whole cache lines
};
MaskPartition mask_partition(int64_t n_rows, int64_t n_cols, const MaskRows& mask_rows);

// The kernels of a level, as F(level, name, arguments). Adam has one more level than the others.
#define ONETRIP_ADAM(F, level) F(level, adam_step, AdamStep) F(level, adam_squares, AdamSquares)
#define ONETRIP_OTHERS(F, level)               \
  F(level, row_norm_forward, RowNormForward)   \
  F(level, row_norm_backward, RowNormBackward) \
  F(level, softmax_forward, SoftmaxForward)    \
  F(level, softmax_backward, SoftmaxBackward)  \
  F(level, cross_entropy, CrossEntropy)        \
  F(level, add_to_sums, AddToSums)             \
  F(level, rotary, Rotary) F(level, glu_forward, GluForward) F(level, glu_backward, GluBackward)
#define ONETRIP_KERNELS(F, level) ONETRIP_ADAM(F, level) ONETRIP_OTHERS(F, level)

#define ONETRIP_DECLARE(level, name, Args) \
  namespace level {                        \
  int name(const Args& args);              \
  }
ONETRIP_KERNELS(ONETRIP_DECLARE, baseline)
ONETRIP_KERNELS(ONETRIP_DECLARE, avx2)
ONETRIP_KERNELS(ONETRIP_DECLARE, avx512)
ONETRIP_ADAM(ONETRIP_DECLARE, avx512vbmi)

}  // namespace onetrip
