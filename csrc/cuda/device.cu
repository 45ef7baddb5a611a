// What this build and this machine can run.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>

#include "../launch.h"

#ifndef ONETRIP_CUDA_ARCHS_BUILT
#error "define ONETRIP_CUDA_ARCHS_BUILT as the architectures compiled for, such as \"8.0 9.0 12.0+PTX\""
#endif

namespace onetrip {
namespace {

// A cubin runs on GPUs of its own major version and at least its minor one; PTX is compiled on any later GPU.
bool built_for(int major, int minor) {
  for (const char* cursor = ONETRIP_CUDA_ARCHS_BUILT; *cursor != '\0';) {
    char* end = nullptr;
    const long built_major = std::strtol(cursor, &end, 10);
    const long built_minor = *end == '.' ? std::strtol(end + 1, &end, 10) : 0;
    const bool has_ptx = *end == '+';
    if (built_major == major && built_minor <= minor) return true;
    if (has_ptx && (built_major < major || (built_major == major && built_minor <= minor))) return true;
    while (*end != '\0' && *end != ' ') ++end;
    while (*end == ' ') ++end;
    cursor = end;
  }
  return false;
}

}  // namespace

const char* cuda_unavailable_reason(int device) {
  static thread_local char reason[256];
  int n_devices = 0;
  cudaError_t status = cudaGetDeviceCount(&n_devices);
  if (status != cudaSuccess) {
    std::snprintf(reason, sizeof reason, "no usable CUDA device: %s", cudaGetErrorString(status));
    return reason;
  }
  if (device < 0 || device >= n_devices) {
    std::snprintf(reason, sizeof reason, "no CUDA device %d: this machine has %d", device, n_devices);
    return reason;
  }
  int major = 0, minor = 0;
  status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status != cudaSuccess) {
    std::snprintf(reason, sizeof reason, "CUDA device %d does not answer: %s", device, cudaGetErrorString(status));
    return reason;
  }
  if (!built_for(major, minor)) {
    std::snprintf(reason, sizeof reason, "CUDA device %d has compute capability %d.%d, this build has kernels for %s",
                  device, major, minor, ONETRIP_CUDA_ARCHS_BUILT);
    return reason;
  }
  return "";
}

const char* cuda_error_string(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

const char* cuda_architectures() { return ONETRIP_CUDA_ARCHS_BUILT; }

}  // namespace onetrip
