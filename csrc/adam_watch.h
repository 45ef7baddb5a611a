// What an optimizer's steps rely on, looked at again at each: that parameters, their gradients and states are the
// tensors, and lie where they lay, that its tables (launch.h: AdamTensor) were made for. Asked of torch's C functions.
// Part of bindings.cpp.
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "dlpack.h"
#include "launch.h"

namespace onetrip {

// The types whose tensors have memory of their own, and their library's function.
struct TensorTypes {
  PyTypeObject *tensor, *parameter;
  int (*read)(void*, dlpack::Tensor*);

  // Whether it is a tensor of theirs that `read` knows, and has data.
  bool knows(PyObject* object, dlpack::Tensor* found) const {
    if (Py_TYPE(object) != tensor && Py_TYPE(object) != parameter) return false;
    if (read(object, found) != 0) {
      PyErr_Clear();
      return false;
    }
    return found->data != nullptr;
  }
};

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

// A plan keeps its parameters and states alive; here are their addresses only, in which a collector of reference cycles
// would see nothing.
class AdamWatch {
 public:
  // params: lists of parameters, those of each group, contiguous and of the slots in order. states: their dicts. Both,
  // and the tensors in them, outlive this object. tensors: address of the slots' AdamTensors on the host. `is_known`
  // says whether all could be read; if not, nothing is ever unchanged.
  AdamWatch(TensorTypes types, pybind11::object is_neg, const pybind11::list& params, const pybind11::list& states,
            int64_t tensors)
      : types_(types), is_neg_(std::move(is_neg)), tensors_(reinterpret_cast<AdamTensor*>(tensors)) {
    is_known_ = learn(params, states);
  }
  bool is_known() const { return is_known_; }

  // The parameters' gradients, a list, where all is as it was but, perhaps, where the gradients lie, which is then
  // written into the table (`moved` then); None where anything else has changed.
  pybind11::object gradients(const pybind11::list& params) {
    if (!is_known_ || !same_states()) return pybind11::none();
    auto grads = pybind11::reinterpret_steal<pybind11::list>(PyList_New(static_cast<Py_ssize_t>(params_.size())));
    if (!grads) throw pybind11::error_already_set();
    found_.clear();
    if (params.size() != group_sizes_.size()) return pybind11::none();
    size_t i = 0, group = 0;
    for (const pybind11::handle members : params) {
      if (!PyList_CheckExact(members.ptr()) || PyList_GET_SIZE(members.ptr()) != group_sizes_[group++])
        return pybind11::none();
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(members.ptr()); ++k, ++i) {
        if (i + kAhead < params_.size()) {
          fetch(params_[i + kAhead].hint);
          fetch(params_[i + kAhead].grad_hint);
        }
        PyObject* param = PyList_GET_ITEM(members.ptr(), k);
        dlpack::Tensor tensor;
        if (param != params_[i].object || !types_.knows(param, &tensor) || address(tensor) != params_[i].address ||
            !is_like(tensor, params_[i], params_[i].dtype))
          return pybind11::none();
        PyObject* grad = gradient(param);
        PyList_SET_ITEM(grads.ptr(), static_cast<Py_ssize_t>(i), grad);
        if (!types_.knows(grad, &tensor) || !is_like(tensor, params_[i], params_[i].grad_dtype) || is_negated(i, grad))
          return pybind11::none();
        params_[i].grad_hint = Hint(grad, tensor.sizes);
        found_.push_back(address(tensor));
      }
    }
    moved_ = false;
    for (i = 0; i < found_.size(); ++i) {
      moved_ = moved_ || tensors_[i].grad != found_[i];
      tensors_[i].grad = found_[i];
    }
    return grads;
  }
  bool moved() const { return moved_; }

 private:
  struct Dtype {
    uint8_t type_code, type_bits;
    uint16_t type_lanes;
  };
  // Where an object and the sizes of its tensor were seen. Only to be fetched: they may be gone.
  struct Hint {
    uintptr_t object, sizes;
    Hint(const void* object, const void* sizes)
        : object(reinterpret_cast<uintptr_t>(object)), sizes(reinterpret_cast<uintptr_t>(sizes)) {}
  };
  struct Param {
    PyObject* object;
    int64_t address;
    Dtype dtype, grad_dtype;
    int32_t device_type, device_index, n_dims;
    size_t first_size;  // in sizes_
    int64_t numel;
    Hint hint, grad_hint;
  };
  struct State {
    PyObject* dict;
    Py_ssize_t n;
    uintptr_t table;  // of its entries, three lines of memory; only to be fetched
  };
  struct Large {
    PyObject* object;
    int64_t address;
  };
  // What is looked at is scattered over memory: the object, whose references are counted, and torch's record of the
  // tensor, whose sizes (up to 5) lie in its midst. gradients() of 10,000 parameters of 100 elements, an AMD EPYC,
  // after another optimizer's step: 5.0 ms, 7.0 without.
  static constexpr size_t kAhead = 6;
  static void fetch(uintptr_t address) { __builtin_prefetch(reinterpret_cast<const void*>(address)); }
  static void fetch(const Hint& hint) {
    __builtin_prefetch(reinterpret_cast<const void*>(hint.object), 1);
    for (int line = -2; line <= 1; ++line) fetch(hint.sizes + line * 64);
  }
  static constexpr int64_t kLarge = 4096;  // elements of a moment; the tensors of smaller states are only kept alive

  static int64_t address(const dlpack::Tensor& tensor) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset);
  }
  static Dtype dtype(const dlpack::Tensor& tensor) { return {tensor.type_code, tensor.type_bits, tensor.type_lanes}; }
  // Contiguous, of the parameter's shape and device, and of this dtype.
  bool is_like(const dlpack::Tensor& tensor, const Param& param, const Dtype& dtype) const {
    return tensor.type_code == dtype.type_code && tensor.type_bits == dtype.type_bits &&
           tensor.type_lanes == dtype.type_lanes && tensor.device_type == param.device_type &&
           tensor.device_index == param.device_index && tensor.n_dims == param.n_dims &&
           std::equal(tensor.sizes, tensor.sizes + tensor.n_dims, sizes_.data() + param.first_size) &&
           is_contiguous(tensor);
  }
  // A new reference.
  static PyObject* gradient(PyObject* param) {
    static PyObject* const name = PyUnicode_InternFromString("grad");
    PyObject* grad = PyObject_GetAttr(param, name);
    if (!grad) throw pybind11::error_already_set();
    return grad;
  }
  // A lazy negation (torch's) is strided unless it has one element.
  bool is_negated(size_t i, PyObject* grad) const {
    return params_[i].numel == 1 && is_neg_(pybind11::handle(grad)).ptr() != Py_False;
  }

  bool learn(const pybind11::list& params, const pybind11::list& states) {
    dlpack::Tensor tensor;
    for (const pybind11::handle members : params) {
      group_sizes_.push_back(PyList_Size(members.ptr()));
      for (const pybind11::handle param : pybind11::reinterpret_borrow<pybind11::list>(members)) {
        if (!types_.knows(param.ptr(), &tensor) || !is_contiguous(tensor)) return false;
        Param known = {param.ptr(),           address(tensor), dtype(tensor), {}, tensor.device_type,
                       tensor.device_index,   tensor.n_dims,   sizes_.size(), 1,  Hint(param.ptr(), tensor.sizes),
                       Hint(nullptr, nullptr)};
        for (int k = 0; k < tensor.n_dims; ++k) known.numel *= tensor.sizes[k];
        sizes_.insert(sizes_.end(), tensor.sizes, tensor.sizes + tensor.n_dims);
        const auto grad = pybind11::reinterpret_steal<pybind11::object>(gradient(param.ptr()));
        if (!types_.knows(grad.ptr(), &tensor)) return false;
        known.grad_dtype = dtype(tensor);
        known.grad_hint = Hint(grad.ptr(), tensor.sizes);
        params_.push_back(known);
      }
    }
    for (const pybind11::handle state : states) {
      if (!PyDict_CheckExact(state.ptr())) return false;
      const auto table = reinterpret_cast<uintptr_t>(reinterpret_cast<const PyDictObject*>(state.ptr())->ma_keys);
      states_.push_back({state.ptr(), PyDict_GET_SIZE(state.ptr()), table});
      const size_t first = large_.size();
      int64_t most = 0;
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
        state_tensors_.push_back(value);
        if (!types_.knows(value, &tensor)) return false;
        int64_t numel = 1;
        for (int k = 0; k < tensor.n_dims; ++k) numel *= tensor.sizes[k];
        most = std::max(most, numel);
        large_.push_back({value, address(tensor)});
      }
      if (most < kLarge) large_.resize(first);
    }
    return true;
  }
  bool same_states() const {
    auto known = state_tensors_.begin();
    for (size_t i = 0; i < states_.size(); ++i) {
      const State& state = states_[i];
      if (i + kAhead < states_.size()) {
        const State& next = states_[i + kAhead];
        fetch(reinterpret_cast<uintptr_t>(next.dict));
        for (int line = 0; line < 3; ++line) fetch(next.table + line * 64);
      }
      if (PyDict_GET_SIZE(state.dict) != state.n) return false;
      PyObject *key, *value;
      for (Py_ssize_t at = 0; PyDict_Next(state.dict, &at, &key, &value); ++known)
        if (value != *known) return false;
    }
    dlpack::Tensor tensor;
    return std::all_of(large_.begin(), large_.end(), [&](const Large& state) {
      return types_.knows(state.object, &tensor) && address(tensor) == state.address;
    });
  }

  TensorTypes types_;
  pybind11::object is_neg_;
  AdamTensor* tensors_;
  bool is_known_ = false, moved_ = false;
  std::vector<Py_ssize_t> group_sizes_;
  std::vector<Param> params_;
  std::vector<int64_t> sizes_, found_;  // of all parameters; of this step's gradients
  std::vector<State> states_;
  std::vector<PyObject*> state_tensors_;
  std::vector<Large> large_;
};

}  // namespace onetrip
