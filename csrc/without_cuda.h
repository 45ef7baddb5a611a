// What the launchers of launch.h are in a library that is built without CUDA: errors. bindings.cpp includes this once.
#pragma once
#include <stdexcept>

#include "launch.h"

#ifndef ONETRIP_WITH_CUDA
namespace onetrip {
namespace {
[[noreturn]] void no_cuda() { throw std::runtime_error("onetrip._native was built without CUDA"); }
}  // namespace

int row_norm_forward_cuda(const RowNormForward&, int, void*) { no_cuda(); }
int row_norm_backward_cuda(const RowNormBackward&, int, void*) { no_cuda(); }
int64_t row_norm_workspace_cuda(int, int64_t, int64_t, int) { no_cuda(); }
void set_gpu_independent_sums(bool) {}
int softmax_forward_cuda(const SoftmaxForward&, int, void*) { no_cuda(); }
int softmax_backward_cuda(const SoftmaxBackward&, int, void*) { no_cuda(); }
int64_t softmax_workspace_cuda(int64_t, int64_t, const MaskRows&) { no_cuda(); }
int adam_step_cuda(const AdamStep&, int, void*) { no_cuda(); }
int adam_squares_cuda(const AdamSquares&, int, void*) { no_cuda(); }
const char* cuda_unavailable_reason(int) { return "the native library was built without CUDA: " ONETRIP_WITHOUT_CUDA; }
const char* cuda_error_string(int) { return ""; }
const char* cuda_architectures() { return ""; }

}  // namespace onetrip
#endif
