// Calls of the row_norm family: see driver.h.
#include "driver.h"

namespace {

int run_forward(const Case& c) {
  onetrip::RowNormForward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.x = c.tensor("x"), args.residual = c.tensor("residual"), args.bias = c.tensor("bias");
  args.weight = c.tensor("weight"), args.norm_bias = c.tensor("norm_bias");
  args.y = c.tensor("y"), args.z = c.tensor("z");
  args.mean = reinterpret_cast<float*>(c.tensor("mean")), args.rstd = reinterpret_cast<float*>(c.tensor("rstd"));
  args.x_row_stride = c.integer("x_row_stride"), args.residual_row_stride = c.integer("residual_row_stride");
  args.x_dtype = c.dtype("x_dtype"), args.residual_dtype = c.dtype("residual_dtype"),
  args.bias_dtype = c.dtype("bias_dtype");
  args.weight_dtype = c.dtype("weight_dtype"), args.norm_bias_dtype = c.dtype("norm_bias_dtype");
  args.z_dtype = c.dtype("z_dtype"), args.n_dtype = c.dtype("n_dtype"), args.y_dtype = c.dtype("y_dtype");
  args.norm = static_cast<onetrip::Norm>(c.integer("norm"));
  args.center_z = c.integer("center_z") != 0;
  args.eps = c.number("eps"), args.weight_offset = c.number("weight_offset");
  args.dropout = dropout_of(c);
  return onetrip::row_norm_forward_cuda(args, c.device, nullptr);
}

int run_backward(const Case& c) {
  onetrip::RowNormBackward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.dy = c.tensor("dy"), args.dz = c.tensor("dz"), args.z = c.tensor("z"), args.weight = c.tensor("weight");
  args.mean = reinterpret_cast<const float*>(c.tensor("mean")),
  args.rstd = reinterpret_cast<const float*>(c.tensor("rstd"));
  args.dx = c.tensor("dx"), args.dresidual = c.tensor("dresidual");
  args.dbias = c.tensor("dbias"), args.dweight = c.tensor("dweight"), args.dnorm_bias = c.tensor("dnorm_bias");
  args.dy_row_stride = c.integer("dy_row_stride"), args.dz_row_stride = c.integer("dz_row_stride");
  args.z_row_stride = c.integer("z_row_stride");
  args.x_dtype = c.dtype("x_dtype"), args.residual_dtype = c.dtype("residual_dtype"),
  args.bias_dtype = c.dtype("bias_dtype");
  args.weight_dtype = c.dtype("weight_dtype"), args.norm_bias_dtype = c.dtype("norm_bias_dtype");
  args.z_dtype = c.dtype("z_dtype"), args.y_dtype = c.dtype("y_dtype");
  args.norm = static_cast<onetrip::Norm>(c.integer("norm"));
  args.weight_offset = c.number("weight_offset");
  args.dropout = dropout_of(c);
  onetrip::set_gpu_independent_sums(c.integer("gpu_independent") != 0);
  const int n_wanted = (args.dbias != nullptr) + (args.dweight != nullptr) + (args.dnorm_bias != nullptr);
  const int64_t n_floats = onetrip::row_norm_workspace_cuda(c.device, args.n_rows, args.n_cols, n_wanted);
  Tensor workspace(static_cast<size_t>(n_floats) * sizeof(float), 0);
  args.workspace = n_floats != 0 ? reinterpret_cast<float*>(workspace.data()) : nullptr;
  return onetrip::row_norm_backward_cuda(args, c.device, nullptr);
}

int launch(const Case& c) { return c.direction == "forward" ? run_forward(c) : run_backward(c); }

}  // namespace
