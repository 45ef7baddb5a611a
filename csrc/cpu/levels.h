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

// The kernels of a level. Adam has one more level than the others.
#define ONETRIP_DECLARE_ADAM(level)          \
  namespace level {                          \
  int adam_step(const AdamStep& args);       \
  int adam_squares(const AdamSquares& args); \
  }
#define ONETRIP_DECLARE_OTHERS(level)                 \
  namespace level {                                   \
  int row_norm_forward(const RowNormForward& args);   \
  int row_norm_backward(const RowNormBackward& args); \
  int softmax_forward(const SoftmaxForward& args);    \
  int softmax_backward(const SoftmaxBackward& args);  \
  int cross_entropy(const CrossEntropy& args);        \
  int add_to_sums(const AddToSums& args);             \
  int rotary(const Rotary& args);                     \
  int glu_forward(const GluForward& args);            \
  int glu_backward(const GluBackward& args);          \
  }
#define ONETRIP_DECLARE_KERNELS(level) ONETRIP_DECLARE_ADAM(level) ONETRIP_DECLARE_OTHERS(level)

ONETRIP_DECLARE_KERNELS(baseline)
ONETRIP_DECLARE_KERNELS(avx2)
ONETRIP_DECLARE_KERNELS(avx512)
ONETRIP_DECLARE_ADAM(avx512vbmi)

}  // namespace onetrip
