// Operands of a call checked at once, by their headers alone: what ops/ would check one by one in Python. Included by
// bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "dlpack.h"
#include "launch.h"
#include "tensor_look.h"

namespace onetrip {
namespace {

// What `operands` asks tensors with: the types that it knows, and their library's function.
struct TensorReader {
  TensorTypes types;
  py::object is_neg;  // Tensor.is_neg
};

bool is_empty(const dlpack::Tensor& tensor) {
  for (int i = 0; i < tensor.n_dims; ++i)
    if (tensor.sizes[i] == 0) return true;
  return false;
}

// Whether the tensor stands for the negative of its data (torch's lazy negation).
bool is_negated(const TensorReader& reader, PyObject* tensor) {
  const auto answer = py::reinterpret_steal<py::object>(PyObject_Vectorcall(reader.is_neg.ptr(), &tensor, 1, nullptr));
  if (!answer) throw py::error_already_set();
  return answer.ptr() != Py_False;
}

// 1 + DType; 0 of another one.
int64_t dtype_digit(const dlpack::Tensor& tensor) {
  using namespace dlpack;
  if (tensor.type_lanes != 1) return 0;
  if (tensor.type_code == kFloat && tensor.type_bits == 32) return 1 + static_cast<int>(DType::kFloat32);
  if (tensor.type_code == kFloat && tensor.type_bits == 16) return 1 + static_cast<int>(DType::kFloat16);
  if (tensor.type_code == kBFloat && tensor.type_bits == 16) return 1 + static_cast<int>(DType::kBFloat16);
  return 0;
}

// Of x, residual and vectors (None: not there): whether they are tensors of these two types and of DTypes, on one
// device, the residual of x's shape, the vectors of its columns. If so 2 * (their dtype_digits in base 4, 0 for None) +
// 1 where all are contiguous, not empty and not negated: kernels can read them as they are. Else -1.
int64_t operands_code(const TensorReader& reader, PyObject* const* values, Py_ssize_t n) {
  dlpack::Tensor x{}, tensor{};
  bool is_plain = true;
  int64_t code = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    code *= 4;
    if (i > 0 && values[i] == Py_None) continue;
    if (Py_TYPE(values[i]) != reader.types.tensor && Py_TYPE(values[i]) != reader.types.parameter) return -1;
    if (reader.types.read(values[i], &tensor) != 0) {
      PyErr_Clear();
      return -1;
    }
    if (i == 0) x = tensor;
    const int64_t digit = dtype_digit(tensor);
    const bool has_elements = !is_empty(tensor);
    if (digit == 0 || tensor.n_dims == 0 || (!tensor.data && has_elements) || tensor.device_type != x.device_type ||
        tensor.device_index != x.device_index)
      return -1;
    const bool is_vector = i > 1;
    if (tensor.n_dims != (is_vector ? 1 : x.n_dims)) return -1;
    for (int j = 1; j <= tensor.n_dims; ++j)
      if (tensor.sizes[tensor.n_dims - j] != x.sizes[x.n_dims - j]) return -1;
    code += digit;
    is_plain = is_plain && has_elements && is_contiguous(tensor) && !is_negated(reader, values[i]);
  }
  return 2 * code + is_plain;
}

PyObject* operands(PyObject* reader, PyObject* const* values, Py_ssize_t n) {
  if (n == 1 && PyTuple_Check(values[0])) n = PyTuple_GET_SIZE(values[0]), values = PySequence_Fast_ITEMS(values[0]);
  return returned([&] { return operands_code(state_of<TensorReader>(reader), values, n); });
}

// How tensors of these types are read; its `read` is null where their library has no such C function.
TensorTypes types_of(const py::type& tensor, const py::type& parameter) {
  TensorTypes types{reinterpret_cast<PyTypeObject*>(tensor.ptr()), reinterpret_cast<PyTypeObject*>(parameter.ptr()),
                    nullptr};
  if (!py::hasattr(tensor, dlpack::kAttribute)) return types;
  const py::object capsule = tensor.attr(dlpack::kAttribute);
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (!api) {
    PyErr_Clear();
  } else if (api->major_version == dlpack::kMajorVersion) {
    types.read = api->tensor_from_object;
  }
  return types;
}

// operands for these types; None where they cannot be read.
py::object operands_reader(const py::type& tensor, const py::type& parameter) {
  const TensorTypes types = types_of(tensor, parameter);
  if (types.read) tensor_types = types;
  return types.read ? make_function<operands>(TensorReader{types, tensor.attr("is_neg")}) : py::none();
}

// None where tensors of these types cannot be read.
py::object tensor_look(const py::type& tensor, const py::type& parameter) {
  const TensorTypes types = types_of(tensor, parameter);
  return types.read ? py::cast(TensorLook(types, tensor.attr("is_neg"))) : py::none();
}

}  // namespace
}  // namespace onetrip
