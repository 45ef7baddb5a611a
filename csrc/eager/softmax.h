// Eager calls of softmax, forward and backward.
#pragma once
#include <utility>

#include "function.h"

namespace onetrip {
namespace {

// As softmax_native.py's forward.
struct EagerSoftmax {
  SoftmaxForward plan;
  SoftmaxBackward backward_plan;  // without the mask's gradient
  bool causal, stores_p;
  static constexpr Py_ssize_t kOperands = 2;

  // scores, mask.
  Done operator()(PyObject* const* operands, PyObject* rng, bool has_backward) const {
    SoftmaxForward call = plan;
    const dlpack::Tensor scores = read_rows(operands[0], call);
    call.scores = scores.address();
    call.scores_row_stride = call.n_cols;
    call.mask = address(operands[1]);
    if (causal) call.n_queries = scores.sizes[scores.n_dims - 2];
    Arguments(&rng, 1).read(call.dropout);
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

  // As softmax_autograd.py's backward. Null where Python must look at the gradient, or the mask's is wanted.
  py::object backward(const Given& given) const {
    const auto [needs_scores, needs_mask] = given.needs<kOperands>();
    PyObject* const dy = given.grad(0);
    dlpack::Tensor shape;
    if (!needs_scores || needs_mask || !torch->reader.types.knows(dy, &shape)) return {};
    SoftmaxBackward call = backward_plan;
    read_rows(dy, call);
    const int64_t n = call.n_rows * call.n_cols;
    call.dy_row_stride = call.p_row_stride = call.n_cols;
    if (causal) call.n_queries = shape.sizes[shape.n_dims - 2];
    if (!(call.dy = plain_address(dy, call.dtype, n, shape))) return {};
    if (!(call.p = plain_address(given.saved_tensors()[0], call.dtype, n, shape))) return {};
    py::object dscores = empty_like(dy, call.dtype, call.dtype);
    call.dscores = address(dscores.ptr());
    launch_on<softmax_backward_cpu, softmax_backward_cuda>(shape, dy, "softmax backward", call);
    return py::make_tuple(std::move(dscores), py::none(), py::none());
  }
};

// launcher, backward: of softmax_forward and softmax_backward.
py::object softmax_eager(const py::object& launcher, const py::object& backward, bool causal, bool stores_p) {
  const auto& plan = state_of_function<SoftmaxForward>(launcher.ptr());
  const auto& backward_plan = state_of_function<SoftmaxBackward>(backward.ptr());
  return make_function<call_eagerly<EagerSoftmax>>(EagerSoftmax{plan, backward_plan, causal, stores_p});
}

}  // namespace
}  // namespace onetrip
