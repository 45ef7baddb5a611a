// Calls of softmax: see driver.h.
#include "driver.h"

namespace {

onetrip::MaskRows mask_rows_of(const Case& c) {
  onetrip::MaskRows args{};
  for (int k = 0; k < 4; ++k) {
    set(args.sizes[k], c, "mask_rows.sizes." + std::to_string(k));
    set(args.strides[k], c, "mask_rows.strides." + std::to_string(k));
  }
  set(args.col_stride, c, "mask_rows.col_stride");
  return args;
}

int run_forward(const Case& c) {
  onetrip::SoftmaxForward args{};
  SET(n_rows), SET(n_cols), SET(n_queries);
  SET(scores), SET(mask), SET(y), SET(p);
  SET(scores_row_stride), SET(dtype), SET(mask_type), SET(scale);
  args.mask_rows = mask_rows_of(c);
  SET_DROPOUT();
  return onetrip::softmax_forward_cuda(args, c.device, nullptr);
}

int run_backward(const Case& c) {
  onetrip::SoftmaxBackward args{};
  SET(n_rows), SET(n_cols), SET(n_queries);
  SET(dy), SET(p), SET(dscores), SET(dmask);
  SET(dy_row_stride), SET(p_row_stride), SET(dtype), SET(scale);
  args.mask_rows = mask_rows_of(c);
  args.has_dropout = c.integer("dropout.threshold") != 0;
  args.dropout_scale = c.number("dropout.scale");
  const Workspace workspace(
      args.dmask != nullptr ? onetrip::softmax_workspace_cuda(args.n_rows, args.n_cols, args.mask_rows) : 0);
  args.workspace = workspace.floats();
  return onetrip::softmax_backward_cuda(args, c.device, nullptr);
}

int launch(const Case& c) { return c.direction == "forward" ? run_forward(c) : run_backward(c); }

}  // namespace
