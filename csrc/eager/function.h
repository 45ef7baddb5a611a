// Eager calls of operands that kernels can read as they are (operands.h says so): one function allocates what the
// kernel writes, with torch's own functions, launches it, and hands autograd what backward needs; another one does the
// same for the gradients. Included by bindings.cpp alone.
#pragma once
#include <string>

#include "call.h"

namespace onetrip {
namespace {

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
    if (done.takes_no_gradient || PyTuple_Check(done.result.ptr()))
      set_attribute(values[0], materialize_grads, Py_False);
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

// Defines FAMILY_eager_forward and FAMILY_eager_backward.
template <typename Eager>
void define_eager(py::module_& module, const std::string& family) {
  module.def((family + "_eager_forward").c_str(), &make_function<forward_eagerly<Eager>, py::object>,
             "The forward of an autograd.Function, from the Python function for operands that are not plain.");
  module.def((family + "_eager_backward").c_str(), &make_function<backward_eagerly<Eager>, py::object>,
             "Its backward, from the Python function for gradients that are not plain.");
}

}  // namespace
}  // namespace onetrip
