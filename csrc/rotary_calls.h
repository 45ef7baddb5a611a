// Rotations: launchers of the rotary family, which has its own form of arguments. Included by bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include "arguments.h"
#include "launch.h"

namespace onetrip {
namespace {

// Sequences share cos and sin of 2 dimensions (positions, columns), and of 3 with a first one of size 1.
RotaryStrides table_strides(Arguments strides, bool is_shared) {
  const int64_t batch = strides.left() == 3 ? strides.integer() : 0;
  return {is_shared ? 0 : batch, 0, strides.integer()};
}

// cos, sin, shape, strides of cos, of sin; then for q and for k: x, y, shape, strides of x, of y; None as x: none
// there.
void read_rotary(Rotary& call, Arguments& from) {
  from.read(call.cos, call.sin);
  Arguments table = from.group();
  const bool is_shared = table.left() == 2 || table.integer() == 1;
  table.integer();
  table.read(call.n_rotated);
  call.cos_strides = table_strides(from.group(), is_shared);
  call.sin_strides = table_strides(from.group(), is_shared);
  for (RotaryTensor& tensor : call.tensors) {
    from.read(tensor.x);
    if (!tensor.x) continue;
    from.read(tensor.y);
    from.read_group(call.n_batch, tensor.n_heads, call.n_positions, call.head_dim);
    for (RotaryStrides* strides : {&tensor.x_strides, &tensor.y_strides})
      from.group().read(strides->batch, strides->head, strides->position);
  }
}

PyObject* launch_rotary(PyObject* plan, PyObject* const* values, Py_ssize_t n) {
  return returned([&] {
    Rotary call = state_of<Rotary>(plan);
    Arguments from(values, n);
    read_rotary(call, from);
    from.end();
    py::gil_scoped_release without_gil;
    return rotary_cpu(call);
  });
}

py::object rotary(int dtype, int y_dtype, int table_dtype, bool interleaved, bool inverse) {
  Rotary args{};
  args.dtype = DType(dtype);
  args.y_dtype = DType(y_dtype);
  args.table_dtype = DType(table_dtype);
  args.interleaved = interleaved;
  args.inverse = inverse;
  return make_function<launch_rotary>(args);
}

}  // namespace
}  // namespace onetrip
