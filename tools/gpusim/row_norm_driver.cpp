// Calls of the row_norm family: see driver.h.
#include "driver.h"

namespace {

int run_forward(const Case& c) {
  onetrip::RowNormForward args{};
  SET(n_rows), SET(n_cols);
  SET(x), SET(residual), SET(bias), SET(weight), SET(norm_bias);
  SET(y), SET(z), SET(mean), SET(rstd);
  SET(x_row_stride), SET(residual_row_stride);
  SET(x_dtype), SET(residual_dtype), SET(bias_dtype), SET(weight_dtype), SET(norm_bias_dtype);
  SET(z_dtype), SET(n_dtype), SET(y_dtype);
  SET(norm), SET(center_z), SET(eps), SET(weight_offset);
  SET_DROPOUT();
  return onetrip::row_norm_forward_cuda(args, c.device, nullptr);
}

int run_backward(const Case& c) {
  onetrip::RowNormBackward args{};
  SET(n_rows), SET(n_cols);
  SET(dy), SET(dz), SET(z), SET(weight), SET(mean), SET(rstd);
  SET(dx), SET(dresidual), SET(dbias), SET(dweight), SET(dnorm_bias);
  SET(dy_row_stride), SET(dz_row_stride), SET(z_row_stride);
  SET(x_dtype), SET(residual_dtype), SET(bias_dtype), SET(weight_dtype), SET(norm_bias_dtype);
  SET(z_dtype), SET(y_dtype);
  SET(norm), SET(weight_offset);
  SET_DROPOUT();
  onetrip::set_gpu_independent_sums(c.integer("gpu_independent") != 0);
  const int n_wanted = (args.dbias != nullptr) + (args.dweight != nullptr) + (args.dnorm_bias != nullptr);
  const Workspace workspace(onetrip::row_norm_workspace_cuda(c.device, args.n_rows, args.n_cols, n_wanted));
  args.workspace = workspace.floats();
  return onetrip::row_norm_backward_cuda(args, c.device, nullptr);
}

int launch(const Case& c) { return c.direction == "forward" ? run_forward(c) : run_backward(c); }

}  // namespace
