// Eager calls of row_norm, forward and backward.
#pragma once
#include <utility>

#include "function.h"

namespace onetrip {
namespace {

// As python_pkg/onetrip/ops/row_norm_native.py's forward. Statistics take one tensor: where z is centred, rstd follows
// it; else rstd follows mean. Its place is None then.
struct EagerRowNorm {
  RowNormForward plan;
  RowNormBackward backward_plan;  // with the dtypes of all operands
  bool stores_z, stores_stats, returns_z, defers_norm;
  static constexpr Py_ssize_t kOperands = 5;

  // x, residual, bias, weight, norm_bias.
  Done operator()(PyObject* const* operands, PyObject* rng, bool has_backward) const {
    RowNormForward call = plan;
    const dlpack::Tensor x = read_rows(operands[0], call);
    const DType dtype = call.x_dtype;
    call.x = x.address();
    call.residual = address(operands[1]);
    call.bias = address(operands[2]);
    call.weight = address(operands[3]);
    call.norm_bias = address(operands[4]);
    call.x_row_stride = call.residual_row_stride = call.n_cols;
    Arguments(&rng, 1).read(call.dropout);
    py::object y, z, mean = py::none(), rstd = py::none();
    if (call.norm != Norm::kNone) {
      y = empty_like(operands[0], dtype, call.y_dtype);
      call.y = address(y.ptr());
    }
    const bool stats_follow_z = stores_z && call.center_z;
    if (stores_z) {
      z = stats_follow_z ? floats(operands[0], dtype, call.n_rows * (call.n_cols + 1))
                         : empty_like(operands[0], dtype, call.z_dtype);
      call.z = address(z.ptr());
      if (stats_follow_z) call.rstd = static_cast<float*>(call.z) + call.n_rows * call.n_cols;
    }
    if (stores_stats && !stats_follow_z) {
      const bool has_mean = call.norm == Norm::kLayer;
      py::object& stats = has_mean ? mean : rstd;
      stats = floats(operands[0], dtype, (1 + has_mean) * call.n_rows);
      call.rstd = address<float>(stats.ptr());
      if (has_mean) call.mean = std::exchange(call.rstd, call.rstd + call.n_rows);
    }
    launch_on<row_norm_forward_cpu, row_norm_forward_cuda>(x, operands[0], "row_norm forward", call);
    Done done;
    done.result = y ? y : z;
    if (returns_z) done.result = py::make_tuple(y, z);
    if (has_backward && y)
      done.saved =
          py::make_tuple(z ? z : py::reinterpret_borrow<py::object>(operands[0]), mean, rstd, py::handle(operands[3]));
    if (defers_norm) done.non_differentiable = py::make_tuple(y);
    done.takes_no_gradient = true;
    return done;
  }

  // As row_norm_autograd.py's input_gradients and backward: the operands' gradients, and None for the call. Null where
  // Python must look at the gradients, or at who shares them.
  py::object backward(const Given& given) const {
    const bool has_norm = plan.norm != Norm::kNone;
    PyObject* const dy = has_norm ? given.grad(0) : Py_None;
    PyObject* const dz = given.grad(has_norm ? 1 : 0);
    const bool has_dy = dy != Py_None;
    PyObject* const like = has_dy ? dy : dz;
    dlpack::Tensor shape;
    static PyObject* const give_residual = PyUnicode_InternFromString("give_residual");
    static PyObject* const left = PyUnicode_InternFromString("left");
    if (defers_norm || !torch->reader.types.knows(like, &shape)) return {};
    if (given.attribute(give_residual)) return {};
    if (const py::object gradients = given.attribute(left); gradients && PyDict_GET_SIZE(gradients.ptr())) return {};
    RowNormBackward call = backward_plan;
    read_rows(like, call);
    const int64_t n_rows = call.n_rows, n_cols = call.n_cols, n = n_rows * n_cols;
    call.dy_row_stride = call.dz_row_stride = call.z_row_stride = n_cols;
    if (has_dy && !(call.dy = plain_address(dy, call.y_dtype, n, shape))) return {};
    if (dz != Py_None && !(call.dz = plain_address(dz, call.z_dtype, n, shape))) return {};
    auto [needs_x, needs_residual, needs_bias, needs_weight, needs_norm_bias] = given.needs<kOperands>();

    // The gradient of z is the residual's too, and x's without dropout. Where y has none it is dz.
    const bool has_dropout = call.dropout.threshold != 0;
    py::object dx, dresidual, dbias, dweight, dnorm_bias;
    if (!has_dy) {
      if ((needs_x && call.x_dtype != call.z_dtype) || (needs_residual && call.residual_dtype != call.z_dtype))
        return {};
      if (needs_x && !has_dropout) dx = py::reinterpret_borrow<py::object>(dz);
      if (needs_residual) dresidual = py::reinterpret_borrow<py::object>(dz);
      needs_weight = needs_norm_bias = false;
    } else if (!read_saved(given.saved_tensors(), shape, call)) {
      return {};
    }
    const bool shares = has_dy && !has_dropout && needs_x && needs_residual && call.x_dtype == call.residual_dtype;
    const bool computes_x = needs_x && !dx, computes_residual = needs_residual && !dresidual && !shares;
    if (!computes_x) call.x_dtype = call.z_dtype;
    if (!computes_residual) call.residual_dtype = call.z_dtype;
    const DType dtype = has_dy ? call.y_dtype : call.z_dtype;
    if (computes_x) call.dx = address((dx = empty_like(like, dtype, call.x_dtype)).ptr());
    if (computes_residual) call.dresidual = address((dresidual = empty_like(like, dtype, call.residual_dtype)).ptr());
    if (shares) dresidual = dx;
    int n_sums = 0;
    const auto sum = [&](bool is_wanted, DType of, void*& to) {
      if (!is_wanted) return py::object();
      ++n_sums;
      py::object made = empty_vector(like, dtype, n_cols, of);
      to = address(made.ptr());
      return made;
    };
    dbias = sum(needs_bias, call.bias_dtype, call.dbias);
    dweight = sum(needs_weight, call.weight_dtype, call.dweight);
    dnorm_bias = sum(needs_norm_bias, call.norm_bias_dtype, call.dnorm_bias);
    if (computes_x || computes_residual || n_sums) {
      const int64_t n_floats = shape.device_type == dlpack::kCpu
                                   ? row_norm_workspace_cpu(n_rows, n_cols, n_sums)
                                   : row_norm_workspace_cuda(shape.device_index, n_rows, n_cols, n_sums);
      py::object workspace;
      if (n_floats) call.workspace = address<float>((workspace = floats(like, dtype, n_floats)).ptr());
      Arguments(&given.rng, 1).read(call.dropout);
      launch_on<row_norm_backward_cpu, row_norm_backward_cuda>(shape, like, "row_norm backward", call);
    }
    const auto or_none = [](py::object& made) { return made ? std::move(made) : py::none(); };
    return py::make_tuple(or_none(dx), or_none(dresidual), or_none(dbias), or_none(dweight), or_none(dnorm_bias),
                          py::none());
  }

 private:
  // z, mean, rstd and weight as forward has saved them. False where hooks made something else of them.
  static bool read_saved(PyObject* const* saved, const dlpack::Tensor& shape, RowNormBackward& call) {
    PyObject *const z = saved[0], *const mean = saved[1], *const rstd = saved[2], *const weight = saved[3];
    const int64_t n_rows = call.n_rows, n = n_rows * call.n_cols;
    const bool follows_mean = mean != Py_None, follows_z = !follows_mean && rstd == Py_None;
    if (!(call.z = plain_address(z, call.z_dtype, follows_z ? n + n_rows : n, shape))) return false;
    if (follows_z) {
      call.rstd = static_cast<const float*>(call.z) + n;
    } else if (!follows_mean) {
      call.rstd = plain_address<float>(rstd, DType::kFloat32, n_rows, shape);
    } else if ((call.mean = plain_address<float>(mean, DType::kFloat32, 2 * n_rows, shape))) {
      call.rstd = call.mean + n_rows;
    }
    if (!call.rstd) return false;
    if (weight != Py_None) call.weight = plain_address(weight, call.weight_dtype, call.n_cols, shape);
    return weight == Py_None || call.weight;
  }
};

// launcher, backward: of row_norm_forward and row_norm_backward. Which outputs are stored; whether z is returned with
// y; whether y has no gradient.
py::object row_norm_eager(const py::object& launcher, const py::object& backward, bool stores_z, bool stores_stats,
                          bool returns_z, bool defers_norm) {
  const auto& plan = state_of_function<RowNormForward>(launcher.ptr());
  const auto& backward_plan = state_of_function<RowNormBackward>(backward.ptr());
  return make_function<call_eagerly<EagerRowNorm>>(
      EagerRowNorm{plan, backward_plan, stores_z, stores_stats, returns_z, defers_norm});
}

}  // namespace
}  // namespace onetrip
