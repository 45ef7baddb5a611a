// Calls of softmax: see driver.h.
#include "driver.h"

namespace {

onetrip::MaskRows mask_rows_of(const Case& c) {
  onetrip::MaskRows rows{};
  for (int k = 0; k < 4; ++k) {
    const std::string number = std::to_string(k);
    rows.sizes[k] = c.integer("mask_rows.sizes." + number);
    rows.strides[k] = c.integer("mask_rows.strides." + number);
  }
  rows.col_stride = c.integer("mask_rows.col_stride");
  return rows;
}

int run_forward(const Case& c) {
  onetrip::SoftmaxForward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.scores = c.tensor("scores"), args.mask = c.tensor("mask");
  args.y = c.tensor("y"), args.p = c.tensor("p");
  args.scores_row_stride = c.integer("scores_row_stride");
  args.dtype = c.dtype("dtype");
  args.mask_type = static_cast<onetrip::MaskType>(c.integer("mask_type"));
  args.mask_rows = mask_rows_of(c);
  args.n_queries = c.integer("n_queries");
  args.scale = c.number("scale");
  args.dropout = dropout_of(c);
  return onetrip::softmax_forward_cuda(args, c.device, nullptr);
}

int run_backward(const Case& c) {
  onetrip::SoftmaxBackward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.dy = c.tensor("dy"), args.p = c.tensor("p");
  args.dscores = c.tensor("dscores"), args.dmask = reinterpret_cast<float*>(c.tensor("dmask"));
  args.dy_row_stride = c.integer("dy_row_stride"), args.p_row_stride = c.integer("p_row_stride");
  args.dtype = c.dtype("dtype");
  args.mask_rows = mask_rows_of(c);
  args.n_queries = c.integer("n_queries");
  args.scale = c.number("scale");
  args.has_dropout = c.integer("dropout.threshold") != 0;
  args.dropout_scale = c.number("dropout.scale");
  const int64_t n_floats =
      args.dmask != nullptr ? onetrip::softmax_workspace_cuda(args.n_rows, args.n_cols, args.mask_rows) : 0;
  Tensor workspace(static_cast<size_t>(n_floats) * sizeof(float), 0);
  args.workspace = n_floats != 0 ? reinterpret_cast<float*>(workspace.data()) : nullptr;
  return onetrip::softmax_backward_cuda(args, c.device, nullptr);
}

int launch(const Case& c) { return c.direction == "forward" ? run_forward(c) : run_backward(c); }

}  // namespace
