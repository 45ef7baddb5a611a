// The rest of the CUDA runtime that the native library asks for, where it is linked with the simulator: one GPU, whose
// launches a capture of the device of torch_device.cpp keeps.
#include <dlfcn.h>

#include <cstdlib>

#include "cudasim.h"

namespace {

// As an H100, or what ONETRIP_FAKE_GPU_CAPABILITY says: 7 as a V100, 8 as an A100.
int use_the_gpu() {
  const char* capability = std::getenv("ONETRIP_FAKE_GPU_CAPABILITY");
  const int major = capability != nullptr ? std::atoi(capability) : 9;
  cudasim::capture = reinterpret_cast<cudasim::Capture>(dlsym(RTLD_DEFAULT, "cudasim_capture"));
  return cudasim::use_gpu(major >= 9   ? cudasim::Gpu{227 * 1024, 1024, true, true}
                          : major == 8 ? cudasim::Gpu{163 * 1024, 1024, false, true}
                                       : cudasim::Gpu{96 * 1024, 0, false, false});
}

}  // namespace

extern "C" {
// The first that the library asks.
cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  static const int device = use_the_gpu();
  *count = device + 1;
  return cudaSuccess;
}
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "the simulator rejected a launch"; }
}
