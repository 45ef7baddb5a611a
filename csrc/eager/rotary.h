// Eager calls of rotary, forward and backward.
#pragma once
#include <utility>

#include "function.h"

namespace onetrip {
namespace {

// As rotary_native.py's rotate, for q, k, cos and sin of this code (rotary_code).
struct EagerRotary {
  Rotary plan;
  int64_t code, code_of_gradients;
  py::object kernel;  // rotate, its plan and that of gradients, in place of the native kernel; or None
  static constexpr Py_ssize_t kOperands = 4;

  // q, k, cos, sin. rng: None.
  Done operator()(PyObject* const* operands, PyObject*, bool has_backward) const {
    Done done;
    done.result = rotated(operands, false);
    if (has_backward) done.saved = py::make_tuple(py::handle(operands[2]), py::handle(operands[3]));
    return done;
  }

  // The transposed rotation. Null where Python must look at the gradients or at what was saved.
  py::object backward(const Given& given) const {
    PyObject* const* const saved = given.saved_tensors();
    PyObject* const operands[] = {given.grad(0), given.grad(1), saved[0], saved[1]};
    if (rotary_code(torch->reader, operands, kOperands) != code_of_gradients) return {};
    const py::tuple gradients = rotated(operands, true);
    return py::make_tuple(gradients[0], gradients[1], py::none(), py::none(), py::none());
  }

 private:
  py::tuple rotated(PyObject* const* operands, bool inverse) const {
    if (!kernel.is_none()) {
      const py::tuple given = py::make_tuple(py::handle(operands[0]), py::handle(operands[1]), py::handle(operands[2]),
                                             py::handle(operands[3]));
      PyObject* const values[] = {given.ptr(), PyTuple_GET_ITEM(kernel.ptr(), inverse ? 2 : 1)};
      return checked(PyObject_Vectorcall(PyTuple_GET_ITEM(kernel.ptr(), 0), values, 2, nullptr));
    }
    Rotary call = plan;
    call.inverse = inverse;
    if (inverse) std::swap(call.dtype, call.y_dtype);
    const py::object q = empty_adjacent(operands[0], call), k = empty_adjacent(operands[1], call);
    PyObject* const tensors[] = {operands[0], operands[1], operands[2], operands[3], q.ptr(), k.ptr()};
    launch_on<rotary_cpu, no_cuda_kernel<Rotary>>(read(tensors, call), operands[0], "rotary_embedding", call);
    return py::make_tuple(q, k);
  }

  // As empty_like, but for tensors whose values overlap, of which that can give columns that are not adjacent.
  static py::object empty_adjacent(PyObject* x, const Rotary& call) {
    static PyObject* const contiguous = PyUnicode_InternFromString("contiguous");
    py::object made = empty_like(x, call.dtype, call.y_dtype);
    const dlpack::Tensor tensor = read_tensor(made.ptr());
    if (stride_of(tensor, tensor.n_dims - 1) == 1) return made;
    return checked(PyObject_CallMethodNoArgs(made.ptr(), contiguous));
  }

  // q, k, cos, sin and both results. Returns q.
  static dlpack::Tensor read(PyObject* const (&tensors)[6], Rotary& call) {
    dlpack::Tensor found[6];
    for (int i = 0; i < 6; ++i) found[i] = read_tensor(tensors[i]);
    const auto& [q, k, cos, sin, q_out, k_out] = found;
    const auto strides = [](const dlpack::Tensor& tensor, bool has_heads) -> RotaryStrides {
      const bool is_shared = tensor.n_dims == 2 || tensor.sizes[0] == 1;
      return {is_shared ? 0 : stride_of(tensor, 0), has_heads ? stride_of(tensor, 1) : 0,
              stride_of(tensor, tensor.n_dims - 2)};
    };
    call.cos = cos.address(), call.sin = sin.address();
    call.cos_strides = strides(cos, false), call.sin_strides = strides(sin, false);
    call.n_rotated = cos.sizes[cos.n_dims - 1];
    call.n_batch = q.sizes[0], call.n_positions = q.sizes[2], call.head_dim = q.sizes[3];
    call.tensors[0] = {q.address(), q_out.address(), q.sizes[1], strides(q, true), strides(q_out, true)};
    call.tensors[1] = {k.address(), k_out.address(), k.sizes[1], strides(k, true), strides(k_out, true)};
    return q;
  }
};

// launcher: of rotary, not inverse. code, code_of_gradients: of the operands, and with gradients in place of q and k,
// by rotary_reader. kernel: None, or rotate of another backend (reference/rotary.py has its arguments) and both plans.
py::object rotary_eager(const py::object& launcher, int64_t code, int64_t code_of_gradients, const py::object& kernel) {
  const auto& plan = state_of_function<Rotary>(launcher.ptr());
  return make_function<call_eagerly<EagerRotary>>(EagerRotary{plan, code, code_of_gradients, kernel});
}

}  // namespace
}  // namespace onetrip
