// The rest of the CUDA runtime that the native library asks for, where it is linked with the simulator: one Hopper card
// (cudasim.cpp), whose launches a capture of the device of torch_device.cpp keeps.
#include <dlfcn.h>

#include "cudasim.h"

namespace {

__attribute__((constructor)) void find_capture() {
  cudasim::capture = reinterpret_cast<cudasim::Capture>(dlsym(RTLD_DEFAULT, "cudasim_capture"));
}

}  // namespace

extern "C" {
cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
const char* CUDARTAPI cudaGetErrorString(cudaError_t) { return "the simulator refused a launch"; }
}
