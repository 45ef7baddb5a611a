// What eager calls of every family share: tensors of torch read and made, kernels launched.
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <stdexcept>

#include "../arguments.h"
#include "../dlpack.h"
#include "../launch.h"
#include "../operands.h"
#include "../tensor_look.h"

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
  torch = new Torch{reader_of(tensor, parameter),     is_grad_enabled, empty_like, current_stream, raise_error,
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
  return static_cast<T*>(read_tensor(object).address());
}

// Sets the call's n_rows and n_cols to those of x, which is not empty. Returns x.
template <typename Call>
dlpack::Tensor read_rows(PyObject* object, Call& call) {
  const dlpack::Tensor x = read_tensor(object);
  call.n_cols = x.sizes[x.n_dims - 1];
  call.n_rows = x.n_elements() / call.n_cols;
  return x;
}

// The address of a tensor of n_elements of this dtype that lies where `like` does, as kernels can read it; null of
// anything else.
template <typename T = void>
const T* plain_address(PyObject* object, DType dtype, int64_t n_elements, const dlpack::Tensor& like) {
  dlpack::Tensor tensor;
  if (!torch->reader.types.knows(object, &tensor) || dtype_digit(tensor) != 1 + static_cast<int>(dtype)) return nullptr;
  if (!tensor.is_on_device_of(like)) return nullptr;
  if (tensor.n_elements() != n_elements || !is_contiguous(tensor) || is_negated(torch->reader, object)) return nullptr;
  return static_cast<const T*>(tensor.address());
}

// In place of the CUDA launcher of a family that has none: Triton serves it there.
template <typename Call>
int no_cuda_kernel(const Call&, int, void*) {
  throw std::runtime_error("this operator has no CUDA C++ kernel");
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
  bool takes_no_gradient = false;  // backward may be called with None for all results
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

}  // namespace
}  // namespace onetrip
