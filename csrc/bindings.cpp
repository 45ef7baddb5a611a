// The pybind11 module onetrip._native: plain numbers in, error codes out. Torch is met on the Python side only.
#include <pybind11/pybind11.h>

#include <cmath>
#include <stdexcept>
#include <string>

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
onetrip::Dropout dropout(double p, uint64_t seed, uint64_t offset, uintptr_t state) {
  return {static_cast<uint64_t>(std::nearbyint(p * 4294967296.0)), static_cast<float>(p < 1.0 ? 1.0 / (1.0 - p) : 0.0),
          seed, offset, pointer<const int64_t>(state)};
}

#ifndef ONETRIP_WITH_CUDA
[[noreturn]] void no_cuda() { throw std::runtime_error("onetrip._native was built without CUDA"); }
#endif

int row_norm_forward(int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t x,
                     uintptr_t residual, uintptr_t bias, uintptr_t weight, uintptr_t norm_bias, uintptr_t y,
                     uintptr_t z, uintptr_t mean, uintptr_t rstd, int64_t x_row_stride, int64_t residual_row_stride,
                     int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype, int norm_bias_dtype,
                     int z_dtype, int n_dtype, int y_dtype, int norm, bool center_z, double eps, double weight_offset,
                     double dropout_p, uint64_t seed, uint64_t offset, uintptr_t state) {
  const onetrip::RowNormForward args{n_rows,
                                     n_cols,
                                     pointer<const void>(x),
                                     pointer<const void>(residual),
                                     pointer<const void>(bias),
                                     pointer<const void>(weight),
                                     pointer<const void>(norm_bias),
                                     pointer<void>(y),
                                     pointer<void>(z),
                                     pointer<float>(mean),
                                     pointer<float>(rstd),
                                     x_row_stride,
                                     residual_row_stride,
                                     DType(x_dtype),
                                     DType(residual_dtype),
                                     DType(bias_dtype),
                                     DType(weight_dtype),
                                     DType(norm_bias_dtype),
                                     DType(z_dtype),
                                     DType(n_dtype),
                                     DType(y_dtype),
                                     Norm(norm),
                                     center_z,
                                     static_cast<float>(eps),
                                     static_cast<float>(weight_offset),
                                     dropout(dropout_p, seed, offset, state)};
  if (device < 0) return onetrip::row_norm_forward_cpu(args);
#ifdef ONETRIP_WITH_CUDA
  return onetrip::row_norm_forward_cuda(args, device, pointer<void>(stream));
#else
  no_cuda();
#endif
}

int row_norm_backward(int device, [[maybe_unused]] uintptr_t stream, int64_t n_rows, int64_t n_cols, uintptr_t dy,
                      uintptr_t dz, uintptr_t z, uintptr_t mean, uintptr_t rstd, uintptr_t weight, uintptr_t dx,
                      uintptr_t dresidual, uintptr_t dbias, uintptr_t dweight, uintptr_t dnorm_bias,
                      uintptr_t workspace, int64_t dy_row_stride, int64_t dz_row_stride, int64_t z_row_stride,
                      int x_dtype, int residual_dtype, int bias_dtype, int weight_dtype, int norm_bias_dtype,
                      int z_dtype, int y_dtype, int norm, double weight_offset, double dropout_p, uint64_t seed,
                      uint64_t offset, uintptr_t state) {
  const onetrip::RowNormBackward args{n_rows,
                                      n_cols,
                                      pointer<const void>(dy),
                                      pointer<const void>(dz),
                                      pointer<const void>(z),
                                      pointer<const float>(mean),
                                      pointer<const float>(rstd),
                                      pointer<const void>(weight),
                                      pointer<void>(dx),
                                      pointer<void>(dresidual),
                                      pointer<void>(dbias),
                                      pointer<void>(dweight),
                                      pointer<void>(dnorm_bias),
                                      pointer<float>(workspace),
                                      dy_row_stride,
                                      dz_row_stride,
                                      z_row_stride,
                                      DType(x_dtype),
                                      DType(residual_dtype),
                                      DType(bias_dtype),
                                      DType(weight_dtype),
                                      DType(norm_bias_dtype),
                                      DType(z_dtype),
                                      DType(y_dtype),
                                      Norm(norm),
                                      static_cast<float>(weight_offset),
                                      dropout(dropout_p, seed, offset, state)};
  if (device < 0) return onetrip::row_norm_backward_cpu(args);
#ifdef ONETRIP_WITH_CUDA
  return onetrip::row_norm_backward_cuda(args, device, pointer<void>(stream));
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

// Arguments are those of the structs in launch.h, in their order: addresses as integers (0: null), dtypes and norms as
// their codes, strides in elements. device -1 is the CPU. Launches release the GIL. They return 0 or the device's error
// code.
PYBIND11_MODULE(_native, module) {
  module.doc() = "Native kernels of onetrip: addresses, sizes, strides and a stream in, error codes out.";
  module.def("row_norm_forward", &row_norm_forward, py::call_guard<py::gil_scoped_release>());
  module.def("row_norm_backward", &row_norm_backward, py::call_guard<py::gil_scoped_release>());
  module.def("row_norm_workspace", &row_norm_workspace, "Floats of workspace that row_norm_backward needs.");
  module.def("cpu_level", &onetrip::cpu_level, "The instruction set that CPU kernels use: avx512, avx2 or baseline.");
  module.def("set_cpu_level", &onetrip::set_cpu_level, "Force a lower level; False where it is not there.");
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason,
             "Why this build cannot run on the CUDA device; \"\" if it can.");
  module.def("cuda_error_string", &cuda_error_string, "Name and text of a CUDA error code.");
  module.def("cuda_architectures", &cuda_architectures, "Compute capabilities built for; \"\" without CUDA.");
}
