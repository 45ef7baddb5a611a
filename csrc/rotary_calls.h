// Rotations: launchers of the rotary family, which has its own form of arguments. Included by bindings.cpp alone.
#pragma once
#include <pybind11/pybind11.h>

#include <optional>
#include <utility>

#include "arguments.h"
#include "dlpack.h"
#include "launch.h"
#include "operands.h"
#include "tensor_look.h"

namespace onetrip {
namespace {

// A rotation of tensors that rotary_operands knows, which say all of it.
struct RotaryOfTensors {
  Rotary call;
  TensorTypes types;
};

// cos, sin, q, its result, k, its result.
Rotary read_tensors(const RotaryOfTensors& plan, PyObject* const* values, Py_ssize_t n) {
  dlpack::Tensor found[6];
  if (n != 6) throw py::type_error("a launcher needs six tensors");
  for (int i = 0; i < 6; ++i)
    if (!plan.types.knows(values[i], &found[i])) throw py::type_error("a launcher needs tensors");
  const auto data = [&](int i) { return static_cast<char*>(found[i].data) + found[i].byte_offset; };
  const auto strides = [&](int i, bool has_heads) -> RotaryStrides {
    const dlpack::Tensor& tensor = found[i];
    const bool is_shared = tensor.n_dims == 2 || tensor.sizes[0] == 1;
    return {is_shared ? 0 : stride_of(tensor, 0), has_heads ? stride_of(tensor, 1) : 0,
            stride_of(tensor, tensor.n_dims - 2)};
  };
  Rotary call = plan.call;
  call.cos = data(0), call.sin = data(1);
  call.cos_strides = strides(0, false), call.sin_strides = strides(1, false);
  call.n_rotated = found[0].sizes[found[0].n_dims - 1];
  const int64_t* sizes = found[2].sizes;
  call.n_batch = sizes[0], call.n_positions = sizes[2], call.head_dim = sizes[3];
  for (int i = 0; i < 2; ++i) {
    const int x = 2 + 2 * i, y = x + 1;
    call.tensors[i] = {data(x), data(y), found[x].sizes[1], strides(x, true), strides(y, true)};
  }
  return call;
}

// Sequences share cos and sin of 2 dimensions (positions, columns), and of 3 with a first one of size 1.
RotaryStrides table_strides(Arguments strides, bool is_shared) {
  const int64_t batch = strides.left() == 3 ? strides.integer() : 0;
  return {is_shared ? 0 : batch, 0, strides.integer()};
}

RotaryStrides row_strides(Arguments strides) {
  const int64_t batch = strides.integer(), head = strides.integer();
  return {batch, head, strides.integer()};
}

// cos, sin, shape, strides of cos, of sin; then for q and for k: x, y, shape, strides of x, of y; None as x: none
// there.
void read_rotary(Rotary& call, Arguments& from) {
  call.cos = from.tensor<const void>();
  call.sin = from.tensor<const void>();
  Arguments table = from.group();
  const bool is_shared = table.left() == 2 || table.integer() == 1;
  table.integer();
  call.n_rotated = table.integer();
  call.cos_strides = table_strides(from.group(), is_shared);
  call.sin_strides = table_strides(from.group(), is_shared);
  for (RotaryTensor& tensor : call.tensors) {
    tensor.x = from.tensor<const void>();
    if (!tensor.x) continue;
    tensor.y = from.tensor<void>();
    Arguments shape = from.group();
    call.n_batch = shape.integer();
    tensor.n_heads = shape.integer();
    call.n_positions = shape.integer();
    call.head_dim = shape.integer();
    tensor.x_strides = row_strides(from.group());
    tensor.y_strides = row_strides(from.group());
  }
}

PyObject* launch_rotary_of_tensors(PyObject* plan, PyObject* const* values, Py_ssize_t n) {
  return returned([&] {
    const Rotary call = read_tensors(state_of<RotaryOfTensors>(plan), values, n);
    py::gil_scoped_release without_gil;
    return rotary_cpu(call);
  });
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

// types: Tensor and Parameter, where the launcher is for tensors that rotary_operands knows.
py::object rotary(int dtype, int table_dtype, bool interleaved, bool inverse,
                  const std::optional<std::pair<py::type, py::type>>& types) {
  Rotary args{};
  args.dtype = DType(dtype);
  args.table_dtype = DType(table_dtype);
  args.interleaved = interleaved;
  args.inverse = inverse;
  if (!types) return make_function<launch_rotary>(args);
  return make_function<launch_rotary_of_tensors>(RotaryOfTensors{args, types_of(types->first, types->second)});
}

}  // namespace
}  // namespace onetrip
