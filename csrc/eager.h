// Eager calls of operands that kernels can read as they are (operands.h says so): one function allocates what the
// kernel writes, with torch's own functions, launches it, and hands autograd what backward needs; another one does the
// same for the gradients. Included by bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <utility>

#include "arguments.h"
#include "dlpack.h"
#include "launch.h"
#include "operands.h"
#include "tensor_look.h"

namespace onetrip {
namespace {

// What calls use of torch. Not deleted: Python may have ended before.
struct Torch {
  TensorReader reader;
  py::object is_grad_enabled;  // torch.is_grad_enabled
  py::object empty_like;       // torch.empty_like
  py::object current_stream;   // of a GPU's index: its stream's address
  py::object raise_error;      // of the function's name, a tensor and an error code; does not return
  py::object dtypes[3];        // by DType
};
const Torch* torch = nullptr;

void use_torch(const py::type& tensor, const py::type& parameter, const py::object& is_grad_enabled,
               const py::object& empty_like, const py::object& current_stream, const py::object& raise_error,
               const py::tuple& dtypes) {
  delete torch;
  torch = new Torch{{types_of(tensor, parameter), tensor.attr("is_neg")},
                    is_grad_enabled,
                    empty_like,
                    current_stream,
                    raise_error,
                    {dtypes[0], dtypes[1], dtypes[2]}};
}

py::object checked(PyObject* made) {
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

PyObject* keyword_dtype() {
  static PyObject* const names = Py_BuildValue("(s)", "dtype");
  return names;
}

// A tensor shaped like x, which is contiguous and of the dtype `given`.
py::object empty_like(PyObject* x, DType given, DType dtype) {
  PyObject* const values[] = {x, torch->dtypes[static_cast<int>(dtype)].ptr()};
  return checked(PyObject_Vectorcall(torch->empty_like.ptr(), values, 1, given == dtype ? nullptr : keyword_dtype()));
}

// n numbers on the device of x, which is of the dtype `given`.
py::object empty_vector(PyObject* x, DType given, int64_t n, DType dtype) {
  static PyObject* const name = PyUnicode_InternFromString("new_empty");
  const py::int_ size(n);
  PyObject* const values[] = {x, size.ptr(), torch->dtypes[static_cast<int>(dtype)].ptr()};
  return checked(PyObject_VectorcallMethod(name, values, 2, given == dtype ? nullptr : keyword_dtype()));
}

py::object floats(PyObject* x, DType given, int64_t n) { return empty_vector(x, given, n, DType::kFloat32); }

dlpack::Tensor read_tensor(PyObject* object) {
  dlpack::Tensor tensor;
  if (!torch->reader.types.knows(object, &tensor)) throw py::type_error("an eager call needs tensors with memory");
  return tensor;
}

template <typename T = void>
T* address(PyObject* object) {
  if (object == Py_None) return nullptr;
  const dlpack::Tensor tensor = read_tensor(object);
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

int64_t elements(const dlpack::Tensor& tensor) {
  int64_t n = 1;
  for (int i = 0; i < tensor.n_dims; ++i) n *= tensor.sizes[i];
  return n;
}

// Sets the call's n_rows and n_cols to those of x, which is not empty. Returns x.
template <typename Call>
dlpack::Tensor read_rows(PyObject* object, Call& call) {
  const dlpack::Tensor x = read_tensor(object);
  call.n_cols = x.sizes[x.n_dims - 1];
  call.n_rows = elements(x) / call.n_cols;
  return x;
}

// The address of a tensor of n_elements of this dtype that lies where `like` does, as kernels can read it; null of
// anything else.
template <typename T = void>
const T* plain_address(PyObject* object, DType dtype, int64_t n_elements, const dlpack::Tensor& like) {
  dlpack::Tensor tensor;
  if (!torch->reader.types.knows(object, &tensor) || dtype_digit(tensor) != 1 + static_cast<int>(dtype)) return nullptr;
  if (tensor.device_type != like.device_type || tensor.device_index != like.device_index) return nullptr;
  if (elements(tensor) != n_elements || !is_contiguous(tensor) || is_negated(torch->reader, object)) return nullptr;
  return reinterpret_cast<const T*>(static_cast<const char*>(tensor.data) + tensor.byte_offset);
}

// x: as `tensor` was read.
template <auto cpu, auto cuda, typename Call>
void launch_on(const dlpack::Tensor& x, PyObject* tensor, const char* function, const Call& call) {
  void* stream = nullptr;
  const bool is_on_cpu = x.device_type == dlpack::kCpu;
  if (!is_on_cpu) {
    stream = PyLong_AsVoidPtr(torch->current_stream(x.device_index).ptr());
    if (!stream && PyErr_Occurred()) throw py::error_already_set();
  }
  int code = 0;
  {
    py::gil_scoped_release without_gil;
    code = is_on_cpu ? cpu(call) : cuda(call, x.device_index, stream);
  }
  if (code != 0) torch->raise_error(function, py::handle(tensor), code);
}

// What a call leaves. saved, non_differentiable: tuples for autograd; null: none.
struct Done {
  py::object result, saved, non_differentiable;
};

// What backward of a Function knows: what its forward has left in ctx, and the results' gradients (None: no gradient).
struct Given {
  PyObject* ctx;
  PyObject* rng;
  PyObject* const* grads;
  Py_ssize_t n_grads;
  py::object* saved;  // ctx.saved_tensors once they were asked for: hooks may give them only once

  PyObject* grad(Py_ssize_t i) const { return i < n_grads ? grads[i] : Py_None; }

  // An attribute that ctx may not have; null: it has not.
  py::object attribute(PyObject* name) const {
    const auto dict = checked(PyObject_GenericGetDict(ctx, nullptr));
    PyObject* const found = PyDict_GetItemWithError(dict.ptr(), name);
    if (!found && PyErr_Occurred()) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(found);
  }

  // By operand, whether its gradient is wanted.
  template <size_t n>
  std::array<bool, n> needs() const {
    static PyObject* const name = PyUnicode_InternFromString("needs_input_grad");
    const auto flags = checked(PyObject_GetAttr(ctx, name));
    std::array<bool, n> needs;
    for (size_t i = 0; i < n; ++i) needs[i] = PyTuple_GET_ITEM(flags.ptr(), i) == Py_True;
    return needs;
  }

  // The tensors that forward saved, in a tuple.
  PyObject* const* saved_tensors() const {
    static PyObject* const name = PyUnicode_InternFromString("saved_tensors");
    *saved = checked(PyObject_GetAttr(ctx, name));
    return PySequence_Fast_ITEMS(saved->ptr());
  }
};

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
    call.x = static_cast<const char*>(x.data) + x.byte_offset;
    call.residual = address(operands[1]);
    call.bias = address(operands[2]);
    call.weight = address(operands[3]);
    call.norm_bias = address(operands[4]);
    call.x_row_stride = call.residual_row_stride = call.n_cols;
    Arguments(&rng, 1).rng(call.dropout);
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
    if (defers_norm || !torch->reader.types.knows(like, &shape) || given.attribute(give_residual)) return {};
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
      Arguments(&given.rng, 1).rng(call.dropout);
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

// As softmax_native.py's forward.
struct EagerSoftmax {
  SoftmaxForward plan;
  SoftmaxBackward backward_plan;  // without the mask's gradient
  bool causal, stores_p;
  static constexpr Py_ssize_t kOperands = 2;

  // scores, mask.
  Done operator()(PyObject* const* operands, PyObject* rng, bool has_backward) const {
    SoftmaxForward call = plan;
    const dlpack::Tensor scores = read_rows(operands[0], call);
    call.scores = static_cast<const char*>(scores.data) + scores.byte_offset;
    call.scores_row_stride = call.n_cols;
    call.mask = address(operands[1]);
    if (causal) call.n_queries = scores.sizes[scores.n_dims - 2];
    Arguments(&rng, 1).rng(call.dropout);
    Done done;
    done.result = empty_like(operands[0], call.dtype, call.dtype);
    call.y = address(done.result.ptr());
    py::object p;
    if (stores_p) {
      p = empty_like(operands[0], call.dtype, call.dtype);
      call.p = address(p.ptr());
    }
    launch_on<softmax_forward_cpu, softmax_forward_cuda>(scores, operands[0], "softmax forward", call);
    if (has_backward) done.saved = py::make_tuple(p ? p : done.result);
    return done;
  }

  // As softmax_autograd.py's backward. Null where Python must look at the gradient, or the mask's is wanted.
  py::object backward(const Given& given) const {
    const auto [needs_scores, needs_mask] = given.needs<kOperands>();
    PyObject* const dy = given.grad(0);
    dlpack::Tensor shape;
    if (!needs_scores || needs_mask || !torch->reader.types.knows(dy, &shape)) return {};
    SoftmaxBackward call = backward_plan;
    read_rows(dy, call);
    const int64_t n = call.n_rows * call.n_cols;
    call.dy_row_stride = call.p_row_stride = call.n_cols;
    if (causal) call.n_queries = shape.sizes[shape.n_dims - 2];
    if (!(call.dy = plain_address(dy, call.dtype, n, shape))) return {};
    if (!(call.p = plain_address(given.saved_tensors()[0], call.dtype, n, shape))) return {};
    py::object dscores = empty_like(dy, call.dtype, call.dtype);
    call.dscores = address(dscores.ptr());
    launch_on<softmax_backward_cpu, softmax_backward_cuda>(shape, dy, "softmax backward", call);
    return py::make_tuple(std::move(dscores), py::none(), py::none());
  }
};

// A function of the operands, in a tuple, and rng. Returns the result.
template <typename Eager>
PyObject* call_eagerly(PyObject* eager, PyObject* const* values, Py_ssize_t n) {
  return returned([&] {
    if (n != 2 || !PyTuple_Check(values[0]) || PyTuple_GET_SIZE(values[0]) != Eager::kOperands)
      throw py::type_error("an eager call needs a tuple of operands, and rng");
    return state_of<Eager>(eager)(PySequence_Fast_ITEMS(values[0]), values[1], false).result.release().ptr();
  });
}

void set_attribute(PyObject* object, PyObject* name, PyObject* value) {
  if (PyObject_SetAttr(object, name, value) != 0) throw py::error_already_set();
}

// The forward of an autograd.Function: of ctx, the operands and `call`, a tuple of rng, a call_eagerly function, and
// what else backward asks ctx.call for. In place of that function None: then the Python function `otherwise` is called.
template <typename Eager>
PyObject* forward_eagerly(PyObject* otherwise, PyObject* const* values, Py_ssize_t n) {
  return returned([&]() -> PyObject* {
    PyObject* const call = n == Eager::kOperands + 2 ? values[n - 1] : nullptr;
    if (!call || !PyTuple_Check(call) || PyTuple_GET_SIZE(call) < 2)
      throw py::type_error("an eager forward needs ctx, operands and a tuple");
    PyObject* const function = PyTuple_GET_ITEM(call, 1);
    if (function == Py_None) return PyObject_Vectorcall(state_of<py::object>(otherwise).ptr(), values, n, nullptr);
    Done done = state_of_function<Eager>(function)(values + 1, PyTuple_GET_ITEM(call, 0), true);
    static PyObject* const to_save = PyUnicode_InternFromString("to_save");  // as ctx.save_for_backward sets it
    static PyObject* const non_differentiable = PyUnicode_InternFromString("non_differentiable");
    static PyObject* const materialize_grads = PyUnicode_InternFromString("materialize_grads");
    static PyObject* const name_of_call = PyUnicode_InternFromString("call");
    if (done.saved) set_attribute(values[0], to_save, done.saved.ptr());
    if (done.non_differentiable) set_attribute(values[0], non_differentiable, done.non_differentiable.ptr());
    if (PyTuple_Check(done.result.ptr())) set_attribute(values[0], materialize_grads, Py_False);
    set_attribute(values[0], name_of_call, call);
    return done.result.release().ptr();
  });
}

// The backward of an autograd.Function: of ctx and the results' gradients. Where this cannot compute, and with
// create_graph: otherwise(ctx, ctx.saved_tensors or None where they were not asked for, gradients).
template <typename Eager>
PyObject* backward_eagerly(PyObject* otherwise, PyObject* const* values, Py_ssize_t n) {
  return returned([&]() -> PyObject* {
    if (n < 1) throw py::type_error("an eager backward needs ctx and gradients");
    py::object saved = py::none();
    Given given{values[0], Py_None, values + 1, n - 1, &saved};
    static PyObject* const name_of_call = PyUnicode_InternFromString("call");
    const py::object kept = given.attribute(name_of_call);
    PyObject* const call = kept.ptr();
    PyObject* const function = call && PyTuple_Check(call) ? PyTuple_GET_ITEM(call, 1) : Py_None;
    if (function != Py_None && checked(PyObject_CallNoArgs(torch->is_grad_enabled.ptr())).ptr() == Py_False) {
      given.rng = PyTuple_GET_ITEM(call, 0);
      if (py::object found = state_of_function<Eager>(function).backward(given)) return found.release().ptr();
    }
    const auto grads = checked(PyTuple_New(n - 1));
    for (Py_ssize_t i = 1; i < n; ++i) PyTuple_SET_ITEM(grads.ptr(), i - 1, Py_NewRef(values[i]));
    PyObject* const arguments[] = {values[0], saved.ptr(), grads.ptr()};
    return PyObject_Vectorcall(state_of<py::object>(otherwise).ptr(), arguments, 3, nullptr);
  });
}

template <typename Eager>
py::object eager_forward(const py::object& otherwise) {
  return make_function<forward_eagerly<Eager>>(otherwise);
}

template <typename Eager>
py::object eager_backward(const py::object& otherwise) {
  return make_function<backward_eagerly<Eager>>(otherwise);
}

}  // namespace
}  // namespace onetrip
