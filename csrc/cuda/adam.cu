// Adam on NVIDIA GPUs: the launches. The kernels are in adam_step.cuh; the contract is launch.h.
#include "adam_step.cuh"

#define ONETRIP_ADAM_GRADIENTS(F) F(float) F(__half) F(__nv_bfloat16)
#ifndef ONETRIP_ADAM_TYPES
#define ONETRIP_ADAM_TYPES_OF(F, P) F(P, float) F(P, __half) F(P, __nv_bfloat16)
#define ONETRIP_ADAM_TYPES(F)     \
  ONETRIP_ADAM_TYPES_OF(F, float) \
  ONETRIP_ADAM_TYPES_OF(F, __half) ONETRIP_ADAM_TYPES_OF(F, __nv_bfloat16)
#endif

namespace onetrip {

constexpr int kFewGroups = 4, kManyGroups = 64;  // a launch that prepares

namespace {

template <int kGroups>
cudaError_t launch_prepare(const AdamStep& args, int64_t first_group, int64_t n_groups, cudaStream_t stream) {
  constexpr int kThreads = 128;
  AdamGroups<kGroups> groups{};
  for (int64_t i = 0; i < n_groups; ++i) groups.group[i] = args.groups[first_group + i];
  const auto kernel = adam_prepare_kernel<kGroups>;
  return ONETRIP_LAUNCH(kernel, grid_of_rows(args.n_counters, kThreads), dim3(kThreads), 0, stream, groups, first_group,
                        n_groups, args.counters, args.n_counters, args.grad_scale, args.found_inf, args.scalars);
}

template <typename P, typename G>
cudaError_t launch_kind(const AdamStep& args, const AdamKind& kind, int n_multiprocessors, cudaStream_t stream) {
  constexpr bool kHasOthers = sizeof(P) == 2;
  const bool other = kind.rounding != AdamRounding::kNearest;
  const bool stochastic = kind.rounding == AdamRounding::kStochastic;
  if ((other && !kHasOthers) || (stochastic && DTypeOf<P>::value != DType::kBFloat16)) return cudaErrorNotSupported;
  const auto nearest = kind.is_8bit ? adam_step_kernel<P, G, 8, false> : adam_step_kernel<P, G, 32, false>;
  const auto kernel = !other         ? nearest
                      : kind.is_8bit ? adam_step_kernel<P, G, 8, kHasOthers>
                                     : adam_step_kernel<P, G, 32, kHasOthers>;
  const dim3 grid(static_cast<unsigned>(at_most(kind.n_chunks, int64_t{n_multiprocessors} * kAdamBlocks)));
  return ONETRIP_LAUNCH(kernel, grid, dim3(kAdamThreads), 0, stream, args.tensors, args.chunks + kind.first_chunk,
                        static_cast<uint32_t>(kind.n_chunks), args.scalars, kind.rounding);
}

cudaError_t launch_kind_of(const AdamStep& args, const AdamKind& kind, int n_multiprocessors, cudaStream_t stream) {
#define ONETRIP_KIND(P, G)                                                             \
  if (kind.param_dtype == DTypeOf<P>::value && kind.grad_dtype == DTypeOf<G>::value) { \
    return launch_kind<P, G>(args, kind, n_multiprocessors, stream);                   \
  }
  ONETRIP_ADAM_TYPES(ONETRIP_KIND)
  return cudaErrorNotSupported;
}

template <typename G>
cudaError_t launch_squares(const AdamSquares& args, const AdamKind& kind, int n_multiprocessors, cudaStream_t stream) {
  constexpr int kBlocks = 4;  // an SM
  const dim3 grid(static_cast<unsigned>(at_most(kind.n_chunks, int64_t{n_multiprocessors} * kBlocks)));
  const auto kernel = adam_squares_kernel<G>;
  return ONETRIP_LAUNCH(kernel, grid, dim3(kAdamThreads), 0, stream, args.tensors, args.chunks + kind.first_chunk,
                        static_cast<uint32_t>(kind.n_chunks), args.sums + kind.first_chunk);
}

cudaError_t launch_squares_of(const AdamSquares& args, const AdamKind& kind, int n_multiprocessors,
                              cudaStream_t stream) {
#define ONETRIP_SQUARES(G) \
  if (kind.grad_dtype == DTypeOf<G>::value) return launch_squares<G>(args, kind, n_multiprocessors, stream);
  ONETRIP_ADAM_GRADIENTS(ONETRIP_SQUARES)
  return cudaErrorNotSupported;
}

}  // namespace

int adam_step_cuda(const AdamStep& args, int device, void* stream_address) {
  if (args.n_counters == 0) return cudaSuccess;
  return on_device(device, [&](const DeviceInfo& info) {
    cudaError_t status = cudaSuccess;
    const auto stream = static_cast<cudaStream_t>(stream_address);
    for (int64_t first = 0; first < args.n_groups && status == cudaSuccess; first += kManyGroups) {
      const int64_t left = args.n_groups - first;
      status = left <= kFewGroups ? launch_prepare<kFewGroups>(args, first, left, stream)
                                  : launch_prepare<kManyGroups>(args, first, at_most(left, kManyGroups), stream);
    }
    for (int64_t i = 0; i < args.n_kinds && status == cudaSuccess; ++i) {
      if (args.kinds[i].n_chunks > 0) status = launch_kind_of(args, args.kinds[i], info.n_multiprocessors, stream);
    }
    return status;
  });
}

int adam_squares_cuda(const AdamSquares& args, int device, void* stream_address) {
  return on_device(device, [&](const DeviceInfo& info) {
    cudaError_t status = cudaSuccess;
    for (int64_t i = 0; i < args.n_kinds && status == cudaSuccess; ++i) {
      if (args.kinds[i].n_chunks > 0) {
        status =
            launch_squares_of(args, args.kinds[i], info.n_multiprocessors, static_cast<cudaStream_t>(stream_address));
      }
    }
    return status;
  });
}

}  // namespace onetrip
