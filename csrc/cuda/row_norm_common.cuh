// What forward and backward of row_norm share.
#pragma once
#include "dropout.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

// A row's statistics are means over n_cols; a row wider than 2^24 would be the first that float cannot count exactly.
__device__ __forceinline__ float mean_of(float sum, int64_t n_cols) { return sum / static_cast<float>(n_cols); }

}  // namespace onetrip
