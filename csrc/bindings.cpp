// The pybind11 module onetrip._native: plain numbers in, error codes out. Torch is met on the Python side only.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/adam.h"
#include "launch.h"

namespace py = pybind11;

namespace {

using onetrip::DType;
using onetrip::Norm;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// threshold = round(p * 2^32), half to even as in Python: p * 2^32 is exact in a double.
onetrip::Dropout dropout(double p) {
  return {static_cast<uint64_t>(std::nearbyint(p * 4294967296.0)), static_cast<float>(p < 1.0 ? 1.0 / (1.0 - p) : 0.0),
          0, 0, nullptr};
}

void set_rng(onetrip::Dropout& dropout, uint64_t seed, uint64_t offset, uintptr_t state) {
  dropout.seed = seed;
  dropout.offset = offset;
  dropout.state = pointer<const int64_t>(state);
}

#ifndef ONETRIP_WITH_CUDA
[[noreturn]] void no_cuda() { throw std::runtime_error("onetrip._native was built without CUDA"); }
#endif

// What a launcher gets: where to run, and the addresses and sizes of one call. What a plan fixes (dtypes, numbers) is
// in the launcher already: an eager call on a small tensor is mostly the price of its arguments.
py::cpp_function row_norm_forward(int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype,
                                  int norm_bias_dtype, int z_dtype, int n_dtype, int y_dtype, int norm, bool center_z,
                                  double eps, double weight_offset, double dropout_p) {
  onetrip::RowNormForward args{};
  args.x_dtype = DType(x_dtype);
  args.residual_dtype = DType(residual_dtype);
  args.bias_dtype = DType(bias_dtype);
  args.weight_dtype = DType(weight_dtype);
  args.norm_bias_dtype = DType(norm_bias_dtype);
  args.z_dtype = DType(z_dtype);
  args.n_dtype = DType(n_dtype);
  args.y_dtype = DType(y_dtype);
  args.norm = Norm(norm);
  args.center_z = center_z;
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dropout = dropout(dropout_p);
  return py::cpp_function(
      [args](int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t x,
             int64_t x_row_stride, uintptr_t residual, int64_t residual_row_stride, uintptr_t bias, uintptr_t weight,
             uintptr_t norm_bias, uintptr_t y, uintptr_t z, uintptr_t mean, uintptr_t rstd, uint64_t seed,
             uint64_t offset, uintptr_t state) {
        onetrip::RowNormForward call = args;
        call.n_rows = n_rows;
        call.n_cols = n_cols;
        call.x = pointer<const void>(x);
        call.x_row_stride = x_row_stride;
        call.residual = pointer<const void>(residual);
        call.residual_row_stride = residual_row_stride;
        call.bias = pointer<const void>(bias);
        call.weight = pointer<const void>(weight);
        call.norm_bias = pointer<const void>(norm_bias);
        call.y = pointer<void>(y);
        call.z = pointer<void>(z);
        call.mean = pointer<float>(mean);
        call.rstd = pointer<float>(rstd);
        set_rng(call.dropout, seed, offset, state);
        if (device < 0) return onetrip::row_norm_forward_cpu(call);
#ifdef ONETRIP_WITH_CUDA
        return onetrip::row_norm_forward_cuda(call, device, pointer<void>(stream));
#else
        no_cuda();
#endif
      },
      py::call_guard<py::gil_scoped_release>());
}

py::cpp_function row_norm_backward(int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype,
                                   int norm_bias_dtype, int z_dtype, int y_dtype, int norm, double weight_offset,
                                   double dropout_p) {
  onetrip::RowNormBackward args{};
  args.x_dtype = DType(x_dtype);
  args.residual_dtype = DType(residual_dtype);
  args.bias_dtype = DType(bias_dtype);
  args.weight_dtype = DType(weight_dtype);
  args.norm_bias_dtype = DType(norm_bias_dtype);
  args.z_dtype = DType(z_dtype);
  args.y_dtype = DType(y_dtype);
  args.norm = Norm(norm);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dropout = dropout(dropout_p);
  return py::cpp_function(
      [args](int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t dy,
             int64_t dy_row_stride, uintptr_t dz, int64_t dz_row_stride, uintptr_t z, int64_t z_row_stride,
             uintptr_t mean, uintptr_t rstd, uintptr_t weight, uintptr_t dx, uintptr_t dresidual, uintptr_t dbias,
             uintptr_t dweight, uintptr_t dnorm_bias, uintptr_t workspace, uint64_t seed, uint64_t offset,
             uintptr_t state) {
        onetrip::RowNormBackward call = args;
        call.n_rows = n_rows;
        call.n_cols = n_cols;
        call.dy = pointer<const void>(dy);
        call.dy_row_stride = dy_row_stride;
        call.dz = pointer<const void>(dz);
        call.dz_row_stride = dz_row_stride;
        call.z = pointer<const void>(z);
        call.z_row_stride = z_row_stride;
        call.mean = pointer<const float>(mean);
        call.rstd = pointer<const float>(rstd);
        call.weight = pointer<const void>(weight);
        call.dx = pointer<void>(dx);
        call.dresidual = pointer<void>(dresidual);
        call.dbias = pointer<void>(dbias);
        call.dweight = pointer<void>(dweight);
        call.dnorm_bias = pointer<void>(dnorm_bias);
        call.workspace = pointer<float>(workspace);
        set_rng(call.dropout, seed, offset, state);
        if (device < 0) return onetrip::row_norm_backward_cpu(call);
#ifdef ONETRIP_WITH_CUDA
        return onetrip::row_norm_backward_cuda(call, device, pointer<void>(stream));
#else
        no_cuda();
#endif
      },
      py::call_guard<py::gil_scoped_release>());
}

struct MaskPlan {
  onetrip::MaskType type;
  onetrip::MaskRows rows;
};

// layout: sizes slowest first, strides, at most 4 of each.
MaskPlan mask_plan(int type, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                   int64_t col_stride) {
  MaskPlan plan{onetrip::MaskType(type), {{1, 1, 1, 1}, {0, 0, 0, 0}, col_stride}};
  if (sizes.size() > 4 || sizes.size() != strides.size())
    throw std::invalid_argument("a mask has at most 4 dimensions");
  const size_t first = 4 - sizes.size();
  for (size_t i = 0; i < sizes.size(); ++i) {
    plan.rows.sizes[first + i] = sizes[i];
    plan.rows.strides[first + i] = strides[i];
  }
  return plan;
}

py::cpp_function softmax_forward(int dtype, double scale, double dropout_p, int mask_type,
                                 const std::vector<int64_t>& mask_sizes, const std::vector<int64_t>& mask_strides,
                                 int64_t mask_col_stride) {
  const MaskPlan mask_of = mask_plan(mask_type, mask_sizes, mask_strides, mask_col_stride);
  onetrip::SoftmaxForward args{};
  args.dtype = DType(dtype);
  args.scale = static_cast<float>(scale);
  args.mask_type = mask_of.type;
  args.mask_rows = mask_of.rows;
  args.dropout = dropout(dropout_p);
  return py::cpp_function(
      [args](int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t scores,
             int64_t scores_row_stride, uintptr_t mask, uintptr_t y, uintptr_t p, int64_t n_queries, uint64_t seed,
             uint64_t offset, uintptr_t state) {
        onetrip::SoftmaxForward call = args;
        call.n_rows = n_rows;
        call.n_cols = n_cols;
        call.scores = pointer<const void>(scores);
        call.scores_row_stride = scores_row_stride;
        call.mask = pointer<const void>(mask);
        call.y = pointer<void>(y);
        call.p = pointer<void>(p);
        call.n_queries = n_queries;
        set_rng(call.dropout, seed, offset, state);
        if (device < 0) return onetrip::softmax_forward_cpu(call);
#ifdef ONETRIP_WITH_CUDA
        return onetrip::softmax_forward_cuda(call, device, pointer<void>(stream));
#else
        no_cuda();
#endif
      },
      py::call_guard<py::gil_scoped_release>());
}

py::cpp_function softmax_backward(int dtype, double scale, double dropout_p, const std::vector<int64_t>& mask_sizes,
                                  const std::vector<int64_t>& mask_strides) {
  onetrip::SoftmaxBackward args{};
  args.dtype = DType(dtype);
  args.scale = static_cast<float>(scale);
  args.mask_rows = mask_plan(0, mask_sizes, mask_strides, 1).rows;
  args.has_dropout = dropout_p > 0.0;
  args.dropout_scale = dropout(dropout_p).scale;
  return py::cpp_function(
      [args](int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t dy,
             int64_t dy_row_stride, uintptr_t p, int64_t p_row_stride, uintptr_t dscores, uintptr_t dmask,
             uintptr_t workspace) {
        onetrip::SoftmaxBackward call = args;
        call.n_rows = n_rows;
        call.n_cols = n_cols;
        call.dy = pointer<const void>(dy);
        call.dy_row_stride = dy_row_stride;
        call.p = pointer<const void>(p);
        call.p_row_stride = p_row_stride;
        call.dscores = pointer<void>(dscores);
        call.dmask = pointer<float>(dmask);
        call.workspace = pointer<float>(workspace);
        if (device < 0) return onetrip::softmax_backward_cpu(call);
#ifdef ONETRIP_WITH_CUDA
        return onetrip::softmax_backward_cuda(call, device, pointer<void>(stream));
#else
        no_cuda();
#endif
      },
      py::call_guard<py::gil_scoped_release>());
}

int64_t softmax_workspace(int device, int64_t n_rows, int64_t n_cols, const std::vector<int64_t>& mask_sizes,
                          const std::vector<int64_t>& mask_strides) {
  const onetrip::MaskRows rows = mask_plan(0, mask_sizes, mask_strides, 1).rows;
  if (device < 0) return onetrip::softmax_workspace_cpu(n_rows, n_cols, rows);
#ifdef ONETRIP_WITH_CUDA
  return onetrip::softmax_workspace_cuda(n_rows, n_cols, rows);
#else
  no_cuda();
#endif
}

int64_t row_norm_workspace(int device, int64_t n_rows, int64_t n_cols, int n_wanted) {
  if (device < 0) return onetrip::row_norm_workspace_cpu(n_rows, n_cols, n_wanted);
#ifdef ONETRIP_WITH_CUDA
  return onetrip::row_norm_workspace_cuda(n_rows, n_cols, n_wanted);
#else
  no_cuda();
#endif
}

// (lr, beta1, beta2, eps, weight_decay, decoupled, maximize, address of lr or 0)
using AdamGroupNumbers = std::tuple<double, double, double, double, double, bool, bool, uintptr_t>;
// (param_dtype, grad_dtype, is_8bit, first_chunk, n_chunks)
using AdamKindNumbers = std::tuple<int, int, bool, int64_t, int64_t>;

int adam_step(int device, [[maybe_unused]] uintptr_t stream, uintptr_t tensors, uintptr_t chunks,
              const std::vector<AdamKindNumbers>& kinds, uintptr_t counters, int64_t n_counters,
              const std::vector<AdamGroupNumbers>& groups, uintptr_t scalars, uintptr_t grad_scale,
              uintptr_t found_inf) {
  std::vector<onetrip::AdamKind> kind_structs;
  for (const auto& [param_dtype, grad_dtype, is_8bit, first_chunk, n_chunks] : kinds)
    kind_structs.push_back({DType(param_dtype), DType(grad_dtype), is_8bit, first_chunk, n_chunks});
  std::vector<onetrip::AdamGroup> group_structs;
  for (const auto& [lr, beta1, beta2, eps, weight_decay, decoupled, maximize, lr_address] : groups)
    group_structs.push_back(
        {lr, beta1, beta2, eps, weight_decay, decoupled, maximize, pointer<const float>(lr_address)});
  const onetrip::AdamStep args{pointer<const onetrip::AdamTensor>(tensors),
                               pointer<const onetrip::AdamChunk>(chunks),
                               kind_structs.data(),
                               static_cast<int64_t>(kind_structs.size()),
                               pointer<const onetrip::AdamCounter>(counters),
                               n_counters,
                               group_structs.data(),
                               static_cast<int64_t>(group_structs.size()),
                               pointer<onetrip::AdamScalars>(scalars),
                               pointer<const float>(grad_scale),
                               pointer<const float>(found_inf)};
  if (device < 0) return onetrip::adam_step_cpu(args);
#ifdef ONETRIP_WITH_CUDA
  return onetrip::adam_step_cuda(args, device, pointer<void>(stream));
#else
  no_cuda();
#endif
}

py::tuple adam_code_maps() {
  constexpr auto signed_map = onetrip::make_code_map<onetrip::kSignedMagnitudes>(0);
  constexpr auto unsigned_map = onetrip::make_code_map<onetrip::kUnsignedMagnitudes>(1);
  const auto list = [](const float* values, int n) { return std::vector<float>(values, values + n); };
  return py::make_tuple(list(signed_map.value, onetrip::kSignedMagnitudes),
                        list(signed_map.threshold, onetrip::kSignedMagnitudes),
                        list(unsigned_map.value, onetrip::kUnsignedMagnitudes),
                        list(unsigned_map.threshold, onetrip::kUnsignedMagnitudes));
}

std::string cuda_unavailable_reason(int device) {
#ifdef ONETRIP_WITH_CUDA
  return onetrip::cuda_unavailable_reason(device);
#else
  (void)device;
  return "the native library was built without CUDA (nvcc was not found, or ONETRIP_CUDA=0)";
#endif
}

std::string cuda_error_string(int code) {
#ifdef ONETRIP_WITH_CUDA
  return onetrip::cuda_error_string(code);
#else
  (void)code;
  return "";
#endif
}

std::string cuda_architectures() {
#ifdef ONETRIP_WITH_CUDA
  return onetrip::cuda_architectures();
#else
  return "";
#endif
}

}  // namespace

// Operators come in two steps: from what a plan fixes (dtypes and norms as their codes, numbers) to a launcher, and
// from one call's addresses (integers, 0: null), each followed by its row stride in elements, to a launch. device -1 is
// the CPU. Launches release the GIL. They return 0 or the device's error code.
PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of onetrip: addresses, sizes, strides and a stream in, error codes out.";
  module.def("row_norm_forward", &row_norm_forward, "A launcher of the forward pass, for these dtypes and numbers.");
  module.def("row_norm_backward", &row_norm_backward, "A launcher of the backward pass, for these dtypes and numbers.");
  module.def("row_norm_workspace", &row_norm_workspace, "Floats of workspace that row_norm_backward needs.");
  module.def("softmax_forward", &softmax_forward, "A launcher of the forward pass, for this dtype, mask and numbers.");
  module.def("softmax_backward", &softmax_backward,
             "A launcher of the backward pass, for this dtype, mask and numbers.");
  module.def("softmax_workspace", &softmax_workspace, "Floats of workspace that the mask's gradient needs.");
  module.def("adam_step", &adam_step, py::call_guard<py::gil_scoped_release>(),
             "One step over all parameters: tables by address (csrc/launch.h), kinds and groups as lists of tuples.");
  module.def("adam_code_maps", &adam_code_maps,
             "Magnitudes and thresholds of the signed map, then of the unsigned one, as the kernels use them.");
  module.def("cpu_level", &onetrip::cpu_level, "The instruction set that CPU kernels use: avx512, avx2 or baseline.");
  module.def("set_cpu_level", &onetrip::set_cpu_level, "Force a lower level; False where it is not there.");
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason,
             "Why this build cannot run on the CUDA device; \"\" if it can.");
  module.def("cuda_error_string", &cuda_error_string, "Name and text of a CUDA error code.");
  module.def("cuda_architectures", &cuda_architectures, "Compute capabilities built for; \"\" without CUDA.");
}
