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

// 1 + DType; 0 of another one.
int64_t dtype_digit(const dlpack::Tensor& tensor) {
  using namespace dlpack;
  if (tensor.type_lanes != 1) return 0;
  if (tensor.type_code == kFloat && tensor.type_bits == 32) return 1 + static_cast<int>(DType::kFloat32);
  if (tensor.type_code == kFloat && tensor.type_bits == 16) return 1 + static_cast<int>(DType::kFloat16);
  if (tensor.type_code == kBFloat && tensor.type_bits == 16) return 1 + static_cast<int>(DType::kBFloat16);
  return 0;
}

// Code of x, residual and vectors (None: not there), or of one tuple of them, tensors of these two types and of DTypes
// on one device. The residual has x's shape, the vectors its columns. The code is 2 * (their dtype_digits in base 4, 0
// for None), + 1 where all are contiguous, not empty and not negated: kernels can read them as they are. It is -1 for
// all others.
int64_t operands_code(const TensorReader& reader, PyObject* const* values, Py_ssize_t n) {
  if (n == 1 && PyTuple_Check(values[0])) n = PyTuple_GET_SIZE(values[0]), values = PySequence_Fast_ITEMS(values[0]);
  dlpack::Tensor x{}, tensor{};
  bool is_plain = true;
  int64_t code = 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    code *= 4;
    if (i > 0 && values[i] == Py_None) continue;
    if (!reader.types.reads(values[i], &tensor)) return -1;
    if (i == 0) x = tensor;
    const int64_t digit = dtype_digit(tensor);
    const bool has_elements = tensor.n_elements() != 0;
    if (digit == 0 || tensor.n_dims == 0 || (!tensor.data && has_elements) || !tensor.is_on_device_of(x)) return -1;
    const bool is_vector = i > 1;
    if (tensor.n_dims != (is_vector ? 1 : x.n_dims)) return -1;
    for (int j = 1; j <= tensor.n_dims; ++j)
      if (tensor.sizes[tensor.n_dims - j] != x.sizes[x.n_dims - j]) return -1;
    code += digit;
    is_plain = is_plain && has_elements && is_contiguous(tensor) && !is_negated(reader, values[i]);
  }
  return 2 * code + is_plain;
}

int64_t stride_of(const dlpack::Tensor& tensor, int dim) {
  if (tensor.strides) return tensor.strides[dim];
  int64_t product = 1;
  for (int i = tensor.n_dims - 1; i > dim; --i) product *= tensor.sizes[i];
  return product;
}

// Code of q, k, cos and sin, tensors of these two types and of DTypes that rotary_embedding takes, none of them empty.
// It is 2 * (dtype_digits of q and cos in base 4), + 1 where none is negated and all last strides are 1: kernels can
// read them as they are. It is -1 for all others.
int64_t rotary_code(const TensorReader& reader, PyObject* const* values, Py_ssize_t n) {
  if (n != 4) throw py::type_error("rotary operands are q, k, cos and sin");
  dlpack::Tensor tensors[4];
  bool is_plain = true;
  for (int i = 0; i < 4; ++i) {
    dlpack::Tensor& tensor = tensors[i];
    if (!reader.types.reads(values[i], &tensor)) return -1;
    if (tensor.n_dims < 2 || dtype_digit(tensor) == 0 || !tensor.data || tensor.n_elements() == 0) return -1;
    if (!tensor.is_on_device_of(tensors[0])) return -1;
    is_plain = is_plain && stride_of(tensor, tensor.n_dims - 1) == 1 && !is_negated(reader, values[i]);
  }
  const auto& [q, k, cos, sin] = tensors;
  const auto same = [](const dlpack::Tensor& a, int i, const dlpack::Tensor& b, int j) {
    return a.sizes[i] == b.sizes[j];
  };
  if (q.n_dims != 4 || k.n_dims != 4 || !same(q, 0, k, 0) || !same(q, 2, k, 2) || !same(q, 3, k, 3)) return -1;
  if (cos.n_dims > 3 || sin.n_dims != cos.n_dims) return -1;
  for (int i = 0; i < cos.n_dims; ++i)
    if (!same(cos, i, sin, i)) return -1;
  const int64_t n_rotated = cos.sizes[cos.n_dims - 1];
  if (!same(cos, cos.n_dims - 2, q, 2) || n_rotated % 2 != 0 || n_rotated > q.sizes[3]) return -1;
  if (cos.n_dims == 3 && cos.sizes[0] != 1 && cos.sizes[0] != q.sizes[0]) return -1;
  if (dtype_digit(k) != dtype_digit(q) || dtype_digit(sin) != dtype_digit(cos)) return -1;
  return 2 * (4 * dtype_digit(q) + dtype_digit(cos)) + is_plain;
}

// Looks at ignore_index, labels, and logits; or ignore_index, labels, hidden, weight and bias (None: none): whether
// they are tensors of these two types on the CPU, contiguous, not empty and not negated; labels of int64, each a class
// or ignore_index; the others of one DType; and their shapes fit. If so how many labels are not ignore_index. Else -1.
int64_t labels_code(const TensorReader& reader, PyObject* const* values, Py_ssize_t n) {
  if (n != 3 && n != 5)
    throw py::type_error("cross-entropy operands are ignore_index, labels and logits or three more");
  const int64_t ignore_index = PyLong_AsLongLong(values[0]);
  if (ignore_index == -1 && PyErr_Occurred()) return PyErr_Clear(), -1;
  const auto is_plain = [&](PyObject* object, dlpack::Tensor& tensor, int n_dims) {
    return reader.types.knows(object, &tensor) && tensor.device_type == dlpack::kCpu && tensor.n_dims == n_dims &&
           tensor.n_elements() != 0 && is_contiguous(tensor) && !is_negated(reader, object);
  };
  dlpack::Tensor labels{}, rows{}, weight{}, bias{};
  if (!reader.types.reads(values[1], &labels) || !is_plain(values[1], labels, labels.n_dims)) return -1;
  if (labels.type_code != dlpack::kInt || labels.type_bits != 64 || labels.type_lanes != 1) return -1;
  if (!is_plain(values[2], rows, labels.n_dims + 1) || dtype_digit(rows) == 0) return -1;
  int64_t n_classes = rows.sizes[labels.n_dims];
  for (int i = 0; i < labels.n_dims; ++i)
    if (labels.sizes[i] != rows.sizes[i]) return -1;
  if (n == 5) {
    if (!is_plain(values[3], weight, 2) || dtype_digit(weight) != dtype_digit(rows) || weight.sizes[1] != n_classes)
      return -1;
    n_classes = weight.sizes[0];
    if (values[4] != Py_None &&
        (!is_plain(values[4], bias, 1) || dtype_digit(bias) != dtype_digit(rows) || bias.sizes[0] != n_classes))
      return -1;
  }
  return kept_labels(static_cast<const int64_t*>(labels.address()), labels.n_elements(), n_classes, ignore_index);
}

// Code of scores and mask (None: none), tensors of these two types that softmax takes with causal (a bool). The mask is
// of bool or one of DTypes. The code is 2 * (8 * dtype_digit of scores + that of the mask: 0 for None, 4 for bool), + 1
// where kernels can read both as they are: neither empty nor negated, scores contiguous. It is -1 for all others.
int64_t scores_code(const TensorReader& reader, PyObject* const* values, Py_ssize_t n) {
  if (n != 3) throw py::type_error("softmax operands are scores, mask and causal");
  dlpack::Tensor scores{}, mask{};
  const auto reads = [&](PyObject* object, dlpack::Tensor& tensor) {
    return reader.types.reads(object, &tensor) && (tensor.data || tensor.n_elements() == 0);
  };
  if (!reads(values[0], scores) || scores.n_dims < (values[2] == Py_True ? 2 : 1)) return -1;
  const int64_t digit = dtype_digit(scores);
  bool is_plain = scores.n_elements() != 0 && is_contiguous(scores) && !is_negated(reader, values[0]);
  if (digit == 0) return -1;
  if (values[1] == Py_None) return 2 * (8 * digit) + is_plain;
  if (!reads(values[1], mask)) return -1;
  const int64_t mask_digit = mask.type_code == dlpack::kBool && mask.type_bits == 8 ? 4 : dtype_digit(mask);
  if (mask_digit == 0 || mask.n_dims > scores.n_dims || !mask.is_on_device_of(scores)) return -1;
  for (int i = 1; i <= mask.n_dims; ++i) {
    const int64_t size = mask.sizes[mask.n_dims - i];
    if (size != 1 && size != scores.sizes[scores.n_dims - i]) return -1;
  }
  is_plain = is_plain && mask.data && !is_negated(reader, values[1]);
  return 2 * (8 * digit + mask_digit) + is_plain;
}

// How tensors of these types are read; its `types.read` is null where their library has no such C function.
TensorReader reader_of(const py::type& tensor, const py::type& parameter) {
  TensorReader reader{
      {reinterpret_cast<PyTypeObject*>(tensor.ptr()), reinterpret_cast<PyTypeObject*>(parameter.ptr()), nullptr}, {}};
  if (!py::hasattr(tensor, dlpack::kAttribute)) return reader;
  const py::object capsule = tensor.attr(dlpack::kAttribute);
  const auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (!api) {
    PyErr_Clear();
  } else if (api->major_version == dlpack::kMajorVersion) {
    reader.types.read = api->tensor_from_object;
    reader.is_neg = tensor.attr("is_neg");
  }
  return reader;
}

template <auto code_of>
PyObject* read_operands(PyObject* reader, PyObject* const* values, Py_ssize_t n) {
  return returned([&] { return code_of(state_of<TensorReader>(reader), values, n); });
}

// A Python function of operands of these types: their code, by operands_code or one like it. None where they cannot be
// read.
template <auto code_of>
py::object operands_reader(const py::type& tensor, const py::type& parameter) {
  const TensorReader reader = reader_of(tensor, parameter);
  if (!reader.types.read) return py::none();
  tensor_types = reader.types;
  return make_function<read_operands<code_of>>(reader);
}

// None where tensors of these types cannot be read.
py::object tensor_look(const py::type& tensor, const py::type& parameter) {
  const TensorReader reader = reader_of(tensor, parameter);
  return reader.types.read ? py::cast(TensorLook(reader)) : py::none();
}

}  // namespace
}  // namespace onetrip
