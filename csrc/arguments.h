// How Python calls a launcher: arguments read by hand, exceptions handed over. Included by bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <exception>
#include <stdexcept>
#include <type_traits>

#include "dlpack.h"
#include "launch.h"
#include "tensor_look.h"

namespace onetrip {
namespace {

namespace py = pybind11;

// The tensors whose memory is read without calling their data_ptr(), which takes three times as long; see
// operands_reader.
TensorTypes tensor_types{};

// The arguments of one launch, read one after the other. What cannot be read is Python's error, thrown.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t n) : next_(values), end_(values + n) {}

  // The next arguments, each as what the place that it goes to is for.
  template <typename... Places>
  void read(Places&... places) {
    (read_one(places), ...);
  }

  // The same of the next argument, a tuple of as many.
  template <typename... Places>
  void read_group(Places&... places) {
    Arguments arguments = group();
    arguments.read(places...);
    arguments.end();
  }

  int64_t integer() { return checked(PyLong_AsLongLong(next())); }

  // The next argument, a tuple, as arguments of its own.
  Arguments group() {
    PyObject* value = next();
    if (!PyTuple_Check(value)) throw py::type_error("a launcher needs a tuple here");
    return Arguments(PySequence_Fast_ITEMS(value), PyTuple_GET_SIZE(value));
  }

  // The address of a tensor's data; of None: null. What is only read has memory; a workspace may be empty.
  template <typename T>
  T* tensor() {
    PyObject* value = next();
    if (value == Py_None) return nullptr;
    return reinterpret_cast<T*>(std::is_const_v<T> ? data_ptr_in_memory(value) : data_ptr(value));
  }

  // The same of a tensor; of a float null, and the number.
  template <typename T>
  T* tensor_or(float& number) {
    if (next_ != end_ && PyFloat_CheckExact(*next_))
      return number = static_cast<float>(PyFloat_AS_DOUBLE(next())), nullptr;
    return tensor<T>();
  }

  Py_ssize_t left() const { return end_ - next_; }

  void end() const {
    if (next_ != end_) throw py::type_error("a launcher got too many arguments");
  }

 private:
  void read_one(int64_t& to) { to = integer(); }
  template <typename T>
  void read_one(T*& to) {
    to = tensor<T>();
  }
  // None; a pair of ints, of which the low 64 bits count; or an int64 tensor of both.
  void read_one(Dropout& dropout) {
    PyObject* value = next();
    if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == 2) {
      dropout.seed = checked(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(value, 0)));
      dropout.offset = checked(PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(value, 1)));
    } else if (value != Py_None) {
      dropout.state = reinterpret_cast<const int64_t*>(data_ptr_in_memory(value));
    }
  }

  PyObject* next() {
    if (next_ == end_) throw py::type_error("a launcher got too few arguments");
    return *next_++;
  }

  template <typename Integer>
  static Integer checked(Integer value) {
    if (value == static_cast<Integer>(-1) && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static uintptr_t data_ptr(PyObject* tensor) {
    dlpack::Tensor known;
    if (tensor_types.knows(tensor, &known)) return reinterpret_cast<uintptr_t>(known.address());
    static PyObject* const name = PyUnicode_InternFromString("data_ptr");
    const auto address = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, name));
    if (!address) throw py::error_already_set();
    return checked(PyLong_AsUnsignedLongLong(address.ptr()));
  }

  static uintptr_t data_ptr_in_memory(PyObject* tensor) {
    const uintptr_t address = data_ptr(tensor);
    if (!address) throw std::invalid_argument("a launcher got a tensor without memory");
    return address;
  }

  PyObject *const *next_, *const *end_;
};

// What a function written for Python returns: the object or integer of body, or null after what it throws.
template <typename Body>
PyObject* returned(Body body) {
  try {
    if constexpr (std::is_same_v<decltype(body()), PyObject*>)
      return body();
    else
      return PyLong_FromLongLong(body());
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

using FastFunction = PyObject* (*)(PyObject* state, PyObject* const* values, Py_ssize_t n);

// A Python function that gets `state` and its arguments as they are. They are read by hand: an eager call on a small
// tensor is mostly the price of its arguments, and pybind11 takes 0.3 microseconds more for those of row_norm_forward.
template <FastFunction function, typename State>
py::object make_function(const State& state) {
  static PyMethodDef definition = {"native", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
                                   METH_FASTCALL, nullptr};
  const py::capsule kept(new State(state), [](void* kept) { delete static_cast<State*>(kept); });
  auto made = py::reinterpret_steal<py::object>(PyCFunction_New(&definition, kept.ptr()));
  if (!made) throw py::error_already_set();
  return made;
}

template <typename State>
const State& state_of(PyObject* kept) {
  return *static_cast<const State*>(PyCapsule_GetPointer(kept, nullptr));
}

// The state of a function that make_function made.
template <typename State>
const State& state_of_function(PyObject* function) {
  if (!PyCFunction_Check(function)) throw py::type_error("a function of the native library is needed here");
  return state_of<State>(PyCFunction_GET_SELF(function));
}

}  // namespace
}  // namespace onetrip
