// Eager calls of operands that kernels can read as they are (operands.h says so): one function allocates what the
// kernel writes, with torch's own functions, launches it, and hands autograd what backward needs. Included by
// bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <utility>

#include "arguments.h"
#include "dlpack.h"
#include "launch.h"
#include "tensor_look.h"

namespace onetrip {
namespace {

// What calls use of torch. Not deleted: Python may have ended before.
struct Torch {
  TensorTypes types;
  py::object empty_like;      // torch.empty_like
  py::object current_stream;  // of a GPU's index: its stream's address
  py::object raise_error;     // of the function's name, a tensor and an error code; does not return
  py::object dtypes[3];       // by DType
};
const Torch* torch = nullptr;

void use_torch(const TensorTypes& types, const py::object& empty_like, const py::object& current_stream,
               const py::object& raise_error, const py::tuple& dtypes) {
  delete torch;
  torch = new Torch{types, empty_like, current_stream, raise_error, {dtypes[0], dtypes[1], dtypes[2]}};
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

// n float32 numbers on the device of x.
py::object floats(PyObject* x, DType given, int64_t n) {
  static PyObject* const name = PyUnicode_InternFromString("new_empty");
  const py::int_ size(n);
  PyObject* const values[] = {x, size.ptr(), torch->dtypes[static_cast<int>(DType::kFloat32)].ptr()};
  return checked(PyObject_VectorcallMethod(name, values, 2, given == DType::kFloat32 ? nullptr : keyword_dtype()));
}

dlpack::Tensor read_tensor(PyObject* object) {
  dlpack::Tensor tensor;
  if (!torch->types.knows(object, &tensor)) throw py::type_error("an eager call needs tensors with memory");
  return tensor;
}

template <typename T = void>
T* address(PyObject* object) {
  if (object == Py_None) return nullptr;
  const dlpack::Tensor tensor = read_tensor(object);
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
}

// Sets the call's n_rows and n_cols to those of x. Returns x.
template <typename Call>
dlpack::Tensor read_rows(PyObject* object, Call& call) {
  const dlpack::Tensor x = read_tensor(object);
  call.n_rows = 1;
  for (int i = 0; i < x.n_dims - 1; ++i) call.n_rows *= x.sizes[i];
  call.n_cols = x.sizes[x.n_dims - 1];
  return x;
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

// As python_pkg/onetrip/ops/row_norm_native.py's forward. Statistics take one tensor: where z is centred, rstd follows
// it; else rstd follows mean. Its place is None then.
struct EagerRowNorm {
  RowNormForward plan;
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
};

// As softmax_native.py's forward.
struct EagerSoftmax {
  SoftmaxForward plan;
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

template <typename Eager>
py::object eager_forward(const py::object& otherwise) {
  return make_function<forward_eagerly<Eager>>(otherwise);
}

}  // namespace
}  // namespace onetrip
