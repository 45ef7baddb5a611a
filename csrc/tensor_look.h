// What many tensors are and where they lie, in one call: an optimizer compares it with what its tables were made for.
// Part of bindings.cpp.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "dlpack.h"

namespace onetrip {

// The types whose tensors have memory of their own, and their library's function.
struct TensorTypes {
  PyTypeObject *tensor, *parameter;
  int (*read)(void*, dlpack::Tensor*);

  // Whether it is a tensor of theirs that `read` reads.
  bool reads(PyObject* object, dlpack::Tensor* found) const {
    if (Py_TYPE(object) != tensor && Py_TYPE(object) != parameter) return false;
    if (read(object, found) == 0) return true;
    PyErr_Clear();
    return false;
  }
  // The same, and it has data.
  bool knows(PyObject* object, dlpack::Tensor* found) const { return reads(object, found) && found->data != nullptr; }
};

// What tensors are read with.
struct TensorReader {
  TensorTypes types;
  pybind11::object is_neg;  // Tensor.is_neg
};

// Whether the tensor stands for the negative of its data (torch's lazy negation).
inline bool is_negated(const TensorReader& reader, PyObject* tensor) {
  PyObject* const answer = PyObject_Vectorcall(reader.is_neg.ptr(), &tensor, 1, nullptr);
  if (!answer) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(answer).ptr() != Py_False;
}

// Whether elements lie next to each other, in order.
inline bool is_contiguous(const dlpack::Tensor& tensor) {
  if (!tensor.strides) return true;
  int64_t stride = 1;
  for (int i = tensor.n_dims - 1; i >= 0; --i) {
    if (tensor.sizes[i] != 1 && tensor.strides[i] != stride) return false;
    stride *= tensor.sizes[i];
  }
  return true;
}

class TensorLook {
 public:
  explicit TensorLook(TensorReader reader) : reader_(std::move(reader)) {}

  // (layouts, addresses) of tensors, as bytes: 8 for each. A layout is a hash of dtype, device, sizes, and strides
  // where the tensor is not contiguous; an address is 0 where there is no memory. Both are 0 for None. None instead of
  // the pair where an object is no tensor of the types, or is one without memory of its own kind (sparse).
  pybind11::object operator()(const pybind11::list& tensors) const {
    Seen seen(tensors.size());
    if (!look(tensors.ptr(), 0, seen.n, &seen)) return pybind11::none();
    return seen.pair();
  }

  // (gradients, what is seen of params, what is seen of the gradients); None as above. Both are read block by block,
  // so that a parameter is still in the cache when its gradient is asked for.
  pybind11::object with_grads(const pybind11::list& params) const {
    static PyObject* const name = PyUnicode_InternFromString("grad");
    Seen of_params(params.size()), of_grads(params.size());
    pybind11::list grads(params.size());
    for (Py_ssize_t begin = 0; begin < of_params.n; begin += kBlock) {
      const Py_ssize_t end = std::min(begin + kBlock, of_params.n);
      if (!look(params.ptr(), begin, end, &of_params)) return pybind11::none();
      for (Py_ssize_t i = begin; i < end; ++i) {
        PyObject* grad = PyObject_GetAttr(PyList_GET_ITEM(params.ptr(), i), name);
        if (!grad) throw pybind11::error_already_set();
        PyList_SET_ITEM(grads.ptr(), i, grad);
      }
      if (!look(grads.ptr(), begin, end, &of_grads)) return pybind11::none();
    }
    return pybind11::make_tuple(grads, of_params.pair(), of_grads.pair());
  }

 private:
  static constexpr Py_ssize_t kBlock = 64, kAhead = 6;
  struct Seen {
    explicit Seen(size_t n) : n(static_cast<Py_ssize_t>(n)), layouts(n), addresses(n) {}
    pybind11::tuple pair() const { return pybind11::make_tuple(as_bytes(layouts), as_bytes(addresses)); }
    static pybind11::bytes as_bytes(const std::vector<uint64_t>& values) {
      return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(uint64_t)};
    }
    Py_ssize_t n;
    std::vector<uint64_t> layouts, addresses;
  };
  // torch keeps a tensor's record, 200 bytes, at the address that follows the head of its object. It is only
  // prefetched.
  void prefetch(PyObject* object) const {
    if (Py_TYPE(object) != reader_.types.tensor && Py_TYPE(object) != reader_.types.parameter) return;
    const char* record = *reinterpret_cast<const char* const*>(object + 1);
    for (int line = 0; line < 4; ++line) __builtin_prefetch(record + 64 * line);
  }
  bool look(PyObject* list, Py_ssize_t begin, Py_ssize_t end, Seen* seen) const {
    for (Py_ssize_t i = begin; i < end; ++i) {
      if (i + 2 * kAhead < end) __builtin_prefetch(PyList_GET_ITEM(list, i + 2 * kAhead));
      if (i + kAhead < end) prefetch(PyList_GET_ITEM(list, i + kAhead));
      PyObject* object = PyList_GET_ITEM(list, i);
      if (object == Py_None) continue;
      dlpack::Tensor tensor;
      if (!reader_.types.reads(object, &tensor)) return false;
      seen->layouts[i] = layout(tensor, object);
      seen->addresses[i] = tensor.data ? reinterpret_cast<uintptr_t>(tensor.address()) : 0;
    }
    return true;
  }
  static uint64_t mixed(uint64_t hash, int64_t value) {  // splitmix64's finalizer
    uint64_t x = hash * 0x9e3779b97f4a7c15 + static_cast<uint64_t>(value);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  uint64_t layout(const dlpack::Tensor& tensor, PyObject* object) const {
    const int64_t dtype = tensor.type_code | tensor.type_bits << 8 | tensor.type_lanes << 16;
    const int64_t device = static_cast<int64_t>(tensor.device_type) << 32 | tensor.device_index;
    uint64_t hash = mixed(mixed(1 + tensor.n_dims, dtype), device);
    for (int i = 0; i < tensor.n_dims; ++i) hash = mixed(hash, tensor.sizes[i]);
    if (!is_contiguous(tensor))
      for (int i = 0; i < tensor.n_dims; ++i) hash = mixed(hash, tensor.strides[i]);
    const int64_t numel = tensor.n_elements();
    // torch's lazy negation has other strides, except with one element.
    if (numel == 1 && is_negated(reader_, object)) hash = mixed(hash, -1);
    // torch's zero tensor (a derivative of a constant) has elements and no memory.
    if (numel != 0 && !tensor.data) hash = mixed(hash, -2);
    return hash | 1;  // 0 is None's
  }

  TensorReader reader_;
};

// Whether the values of the dicts, one dict after the other, are these objects. It reads no object.
inline bool same_values(const pybind11::list& dicts, const pybind11::list& values) {
  const Py_ssize_t n = PyList_GET_SIZE(values.ptr());
  Py_ssize_t i = 0;
  for (const pybind11::handle dict : dicts) {
    if (!PyDict_CheckExact(dict.ptr())) return false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(dict.ptr(), &at, &key, &value); ++i)
      if (i == n || value != PyList_GET_ITEM(values.ptr(), i)) return false;
  }
  return i == n;
}

}  // namespace onetrip
