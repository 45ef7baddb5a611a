// Runs the CPU kernels of softmax over odd shapes, masks and strides in buffers of the exact size, each of its own, so
// that AddressSanitizer sees every access outside them; and compares the levels with each other. Prints the levels that
// ran; exits 1 on a difference.
#include "cpu_driver.h"

namespace {

using namespace onetrip;

enum class Sharing { kNone, kOneRow, kInnerRows, kOuterRows, kNoneShared };

struct Case {
  int64_t n_rows, n_cols;
  DType dtype;
  MaskType mask_type;
  Sharing sharing;  // which rows share a row of the mask; kNone: no mask
  int64_t col_stride;
  int64_t n_queries;
  uint32_t threshold;
  bool is_aligned;
};

// Two dimensions of rows: the first of n_outer, the second of the rest.
MaskRows mask_rows(const Case& c, int64_t n_outer) {
  const int64_t row = c.col_stride == 0 ? 1 : (c.n_cols - 1) * c.col_stride + 1, n_inner = c.n_rows / n_outer;
  MaskRows rows = {{1, 1, n_outer, n_inner}, {0, 0, 0, 0}, c.col_stride};
  if (c.sharing == Sharing::kInnerRows) rows.strides[2] = row;
  if (c.sharing == Sharing::kOuterRows) rows.strides[3] = row;
  if (c.sharing == Sharing::kNoneShared) rows.strides[2] = n_inner * row, rows.strides[3] = row;
  return rows;
}

std::vector<double> run(const Case& c) {
  const DType f = DType::kFloat32;
  const int64_t n = c.n_rows * c.n_cols, n_outer = c.n_rows % 3 == 0 ? 3 : 1;
  const MaskRows rows = mask_rows(c, n_outer);
  int64_t last = (c.n_cols - 1) * c.col_stride, n_mask_rows = 1;
  for (int i = 0; i < 4; ++i) {
    last += (rows.sizes[i] - 1) * rows.strides[i];
    if (rows.strides[i]) n_mask_rows *= rows.sizes[i];
  }
  Array scores(n, c.dtype, c.is_aligned), y(n, c.dtype, c.is_aligned), p(n, c.dtype, c.is_aligned),
      dy(n, c.dtype, c.is_aligned), dscores(n, c.dtype, c.is_aligned), dmask(n_mask_rows * c.n_cols, f, false);
  scores.fill(1), dy.fill(2);
  const bool is_bool = c.mask_type == MaskType::kBool, has_mask = c.sharing != Sharing::kNone;
  Array mask(last + 1, is_bool ? DType::kFloat32 : DType(c.mask_type), false);
  mask.fill(3);
  std::vector<uint8_t> keep(last + 1);
  for (int64_t i = 0; i <= last; ++i) keep[i] = i % 7 != 2;

  SoftmaxForward forward = {};
  forward.n_rows = c.n_rows, forward.n_cols = c.n_cols;
  forward.scores = scores.data(), forward.y = y.data(), forward.p = c.threshold ? p.data() : nullptr;
  forward.mask = !has_mask ? nullptr : is_bool ? keep.data() : mask.data();
  forward.scores_row_stride = c.n_cols;
  forward.dtype = c.dtype, forward.mask_type = c.mask_type, forward.mask_rows = rows;
  forward.n_queries = c.n_queries, forward.scale = 0.75f;
  forward.dropout = {c.threshold, 1.25f, 11, (uint64_t{1} << 32) + 3, nullptr};
  if (softmax_forward_cpu(forward) != 0) exit(1);

  Array workspace(softmax_workspace_cpu(c.n_rows, c.n_cols, rows), f, true);
  SoftmaxBackward backward = {};
  backward.n_rows = c.n_rows, backward.n_cols = c.n_cols;
  backward.dy = dy.data(), backward.p = c.threshold ? p.data() : y.data(), backward.dscores = dscores.data();
  backward.dmask = has_mask && !is_bool ? static_cast<float*>(dmask.data()) : nullptr;
  backward.workspace = static_cast<float*>(workspace.data());
  backward.dy_row_stride = backward.p_row_stride = c.n_cols;
  backward.dtype = c.dtype, backward.mask_rows = rows, backward.n_queries = c.n_queries, backward.scale = 0.75f;
  backward.has_dropout = c.threshold != 0, backward.dropout_scale = 1.25f;
  if (softmax_backward_cpu(backward) != 0) exit(1);

  std::vector<double> results;
  for (Array* output : {&y, &p, &dscores, &dmask}) {
    if ((output == &p && !forward.p) || (output == &dmask && !backward.dmask)) continue;
    for (double value : output->values()) results.push_back(value);
  }
  return results;
}

}  // namespace

int main() {
  const DType f = DType::kFloat32, b = DType::kBFloat16;
  std::vector<Case> cases;
  for (int64_t n_cols : {1, 3, 7, 15, 17, 33, 65, 127, 1031, 4099})
    for (int64_t n_rows : {1, 5, 33})
      for (DType dtype : {f, b})
        for (uint32_t threshold : {0u, 1u << 14}) {
          cases.push_back({n_rows, n_cols, dtype, MaskType::kFloat32, Sharing::kNone, 1, 0, threshold, false});
          cases.push_back({n_rows, n_cols, dtype, MaskType::kBool, Sharing::kInnerRows, 1, n_rows, threshold, false});
          cases.push_back({n_rows, n_cols, dtype, MaskType::kBool, Sharing::kNoneShared, 2, 0, threshold, false});
          cases.push_back({n_rows, n_cols, dtype, MaskType::kFloat32, Sharing::kOneRow, 1, 3, threshold, false});
          cases.push_back({n_rows, n_cols, dtype, MaskType::kBFloat16, Sharing::kOuterRows, 3, 0, threshold, false});
          cases.push_back({n_rows, n_cols, dtype, MaskType::kFloat32, Sharing::kNoneShared, 0, 2, threshold, false});
        }
  // Outputs that pass the caches.
  cases.push_back({2 * kStreamed / 1131 + 1, 1131, f, MaskType::kFloat32, Sharing::kInnerRows, 1, 0, 1u << 14, true});
  cases.push_back({4 * kStreamed / 1029 + 1, 1029, b, MaskType::kBool, Sharing::kOneRow, 1, 512, 0, false});
  // A bfloat16 may round to either side: 2^-7. Sums over many rows add up.
  return !levels_agree(cases, run, [](const Case& c) { return c.dtype == DType::kFloat32 ? 1e-4 : 1e-2; });
}
