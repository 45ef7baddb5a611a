// The runtime calls that launchers make: devices of every kind that a test asks for, on which everything succeeds.
#include <map>

#include "cudasim.h"

namespace {

std::vector<cudasim::Gpu> known_gpus;  // that launchers have been told of: a device is one of them
size_t current_gpu = 0;

}  // namespace

namespace cudasim {

int use_gpu(const Gpu& gpu) {
  current_gpu = 0;
  while (current_gpu < known_gpus.size() && !(known_gpus[current_gpu] == gpu)) ++current_gpu;
  if (current_gpu == known_gpus.size()) known_gpus.push_back(gpu);
  return static_cast<int>(current_gpu);
}
const Gpu& gpu_in_use() { return known_gpus.at(current_gpu); }

}  // namespace cudasim

extern "C" {
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = static_cast<int>(current_gpu);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  return device == static_cast<int>(current_gpu) ? cudaSuccess : cudaErrorInvalidDevice;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  const cudasim::Gpu& gpu = known_gpus.at(static_cast<size_t>(device));
  const std::map<cudaDeviceAttr, int> values = {
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.shared_limit},
      {cudaDevAttrReservedSharedMemoryPerBlock, gpu.reserved_shared},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, gpu.shared_limit + gpu.reserved_shared},
      {cudaDevAttrMultiProcessorCount, 2},  // few, so that blocks come to take more than one piece of the work
      {cudaDevAttrComputeCapabilityMajor, gpu.has_clusters ? 9
                                          : gpu.has_copies ? 8
                                                           : 7},
      {cudaDevAttrComputeCapabilityMinor, 0},
      {cudaDevAttrClusterLaunch, gpu.has_clusters ? 1 : 0},
  };
  const auto found = values.find(attribute);
  if (found == values.end()) return cudaErrorInvalidValue;
  *value = found->second;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  const bool fits =
      attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value <= cudasim::gpu_in_use().shared_limit;
  return fits ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = cudaFuncAttributes{};
  const int has_body = cudasim::gpu_in_use().has_copies ? 1 : 0;  // of a kernel that needs them
  attributes->sharedSizeBytes =
      static_cast<size_t>(cudasim::static_shared != nullptr ? cudasim::static_shared(kernel) : has_body);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) {
  *clusters = 2;
  return cudaSuccess;
}
}
