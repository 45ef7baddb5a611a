// Eager calls of glu, forward and backward.
#pragma once
#include <array>
#include <optional>
#include <utility>

#include "function.h"

namespace onetrip {
namespace {

// As glu_native.py's forward. Plain gate, up and bias are contiguous, and gate's dtype is the result's.
struct EagerGlu {
  GluForward plan;
  GluBackward backward_plan;
  bool is_packed, gate_is_first;  // packed: gate holds both halves
  bool saves_result;              // in place of gate
  py::object kernels;             // forward, backward and the plan they take, in place of the native ones; or None
  static constexpr Py_ssize_t kOperands = 3;

  // gate, up, bias.
  Done operator()(PyObject* const* operands, PyObject* rng, bool has_backward) const {
    Done done;
    if (kernels.is_none()) {
      done.result = computed(operands, rng);
    } else {
      const py::tuple given = py::make_tuple(py::handle(operands[0]), py::handle(operands[1]), py::handle(operands[2]));
      done.result = called(0, {given.ptr(), kernel(2), rng});
    }
    if (has_backward)
      done.saved = py::make_tuple(saves_result ? done.result : py::reinterpret_borrow<py::object>(operands[0]),
                                  py::handle(operands[1]), py::handle(operands[2]));
    return done;
  }

  // As glu_autograd.py's backward. Null where Python must look at the gradient or at what was saved.
  py::object backward(const Given& given) const {
    PyObject* const dy = given.grad(0);
    dlpack::Tensor shape;
    if (!torch->reader.types.knows(dy, &shape)) return {};
    GluBackward call = backward_plan;
    read_rows(dy, call);
    const int64_t n = call.n_rows * call.n_cols;
    PyObject* const* const saved = given.saved_tensors();
    PyObject *const gate = saved[0], *const up = saved[1], *const bias = saved[2];
    if (!(call.dy = plain_address(dy, call.dtype, n, shape))) return {};
    if (!(call.gate = plain_address(gate, call.dtype, is_packed ? 2 * n : n, shape))) return {};
    if (up != Py_None && !(call.up = plain_address(up, call.dtype, n, shape))) return {};
    if (bias != Py_None && !(call.bias = plain_address(bias, call.bias_dtype, call.n_cols, shape))) return {};
    PyObject* const rng = saves_result ? Py_None : given.rng;
    const auto needs = given.needs<kOperands>();
    py::object gradients[kOperands];
    if (kernels.is_none()) {
      compute(call, shape, saved, dy, rng, needs, gradients);
    } else {
      const py::tuple wants = py::make_tuple(needs[0], needs[1], needs[2]);
      const py::tuple found = called(1, {dy, given.saved->ptr(), kernel(2), wants.ptr(), rng});
      for (int i = 0; i < kOperands; ++i) gradients[i] = found[i];
    }
    return py::make_tuple(gradients[0], gradients[1], gradients[2], py::none());
  }

 private:
  PyObject* kernel(Py_ssize_t i) const { return PyTuple_GET_ITEM(kernels.ptr(), i); }

  template <size_t n>
  py::object called(Py_ssize_t i, PyObject* const (&values)[n]) const {
    return checked(PyObject_Vectorcall(kernel(i), values, n, nullptr));
  }

  py::object computed(PyObject* const* operands, PyObject* rng) const {
    GluForward call = plan;
    const dlpack::Tensor gate = read_rows(operands[0], call);
    call.gate_row_stride = call.up_row_stride = call.n_cols;
    if (is_packed) call.n_cols /= 2;
    py::object y = is_packed ? empty_half(operands[0], gate) : empty_like(operands[0], call.dtype, call.dtype);
    call.gate = address(operands[0]);
    call.up = address(operands[1]);
    split(call.gate, call.up, call.n_cols);
    call.bias = address(operands[2]);
    call.y = address(y.ptr());
    Arguments(&rng, 1).read(call.dropout);
    launch_on<glu_forward_cpu, no_cuda_kernel<GluForward>>(gate, operands[0], "glu forward", call);
    return y;
  }

  void compute(GluBackward& call, const dlpack::Tensor& shape, PyObject* const* saved, PyObject* dy, PyObject* rng,
               const std::array<bool, kOperands>& needs, py::object (&gradients)[kOperands]) const {
    const auto made = [&](bool is_wanted, PyObject* like) {
      return is_wanted ? empty_like(like, call.dtype, call.dtype) : py::none();
    };
    gradients[0] = made(needs[0], saved[0]);
    gradients[1] = made(needs[1], dy);
    gradients[2] = py::none();
    call.dgate = address(gradients[0].ptr());
    call.dup = address(gradients[1].ptr());
    py::object workspace;
    if (needs[2]) {
      gradients[2] = empty_vector(dy, call.dtype, call.n_cols, call.bias_dtype);
      call.dbias = address(gradients[2].ptr());
      workspace = floats(dy, call.dtype, glu_workspace_cpu(call.n_rows, call.n_cols));
      call.workspace = address<float>(workspace.ptr());
    }
    if (saves_result) call.bias = nullptr;
    call.dy_row_stride = call.n_cols;
    call.gate_row_stride = call.up_row_stride = call.dgate_row_stride = call.dup_row_stride =
        is_packed ? 2 * call.n_cols : call.n_cols;
    split(call.gate, call.up, call.n_cols);
    split(call.dgate, call.dup, call.n_cols);
    Arguments(&rng, 1).read(call.dropout);
    launch_on<glu_backward_cpu, no_cuda_kernel<GluBackward>>(shape, dy, "glu backward", call);
  }

  // The first column of each half, or of the even and the odd columns, where gate holds both.
  template <typename T>
  void split(T*& gate, T*& up, int64_t n_cols) const {
    if (!is_packed || !gate) return;
    const int64_t first = plan.clamped.interleaved ? 1 : n_cols;
    up = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(gate) + first * (plan.dtype == DType::kFloat32 ? 4 : 2));
    if (!gate_is_first) std::swap(gate, up);
  }

  // A tensor of its shape, but for half of the columns.
  static py::object empty_half(PyObject* packed, const dlpack::Tensor& shape) {
    const py::tuple sizes(shape.n_dims);
    for (int i = 0; i < shape.n_dims; ++i) {
      py::object size = checked(PyLong_FromLongLong(shape.sizes[i] / (i == shape.n_dims - 1 ? 2 : 1)));
      PyTuple_SET_ITEM(sizes.ptr(), i, size.release().ptr());
    }
    static PyObject* const name = PyUnicode_InternFromString("new_empty");
    PyObject* const values[] = {packed, sizes.ptr()};
    return checked(PyObject_VectorcallMethod(name, values, 2, nullptr));
  }
};

// launcher, backward: of glu_forward and glu_backward. gate_is_first: None, or of a gate that holds both halves.
// kernels: None, or forward and backward of another backend (reference/glu.py has their arguments) and the plan.
py::object glu_eager(const py::object& launcher, const py::object& backward, const std::optional<bool>& gate_is_first,
                     bool saves_result, const py::object& kernels) {
  const auto& plan = state_of_function<GluForward>(launcher.ptr());
  const auto& backward_plan = state_of_function<GluBackward>(backward.ptr());
  return make_function<call_eagerly<EagerGlu>>(
      EagerGlu{plan, backward_plan, gate_is_first.has_value(), gate_is_first.value_or(true), saves_result, kernels});
}

}  // namespace
}  // namespace onetrip
