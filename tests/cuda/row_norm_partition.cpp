// Arguments: MULTIPROCESSORS MAJOR [ROWS COLS]..., a GPU with as many clusters as its multiprocessors have room for.
// Prints of each shape what row_norm's backward makes of it: parts, rows a part and groups of a part on this GPU; the
// same for any GPU; and the floats of workspace for three sums.
#define ONETRIP_ROW_NORM_PAIRS(F)
#include "cuda/row_norm.cu"
#undef gridDim  // of the simulator

#include <cstdio>
#include <cstdlib>

namespace {

int n_multiprocessors, major, carveout;

}  // namespace

const cudasim::Gpu& cudasim::gpu_in_use() { std::abort(); }

extern "C" {
cudaError_t CUDARTAPI cudaSetDevice(int) { return cudaSuccess; }
cudaError_t CUDARTAPI cudaGetLastError() { return cudaSuccess; }
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount           ? n_multiprocessors
           : attribute == cudaDevAttrComputeCapabilityMajor      ? major
           : attribute == cudaDevAttrClusterLaunch && major >= 9 ? 1
                                                                 : 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = 12040;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) carveout = value;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->sharedSizeBytes = 1;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* config) {
  if (carveout != cudaSharedmemCarveoutMaxShared) std::abort();  // as many as its shared memory has room for
  *clusters = n_multiprocessors / static_cast<int>(config->gridDim.x);
  return cudaSuccess;
}
}

int main(int, char** arguments) {
  n_multiprocessors = std::atoi(arguments[1]), major = std::atoi(arguments[2]);
  return onetrip::on_device(0, [&](const onetrip::DeviceInfo& info) {
    for (char** size = arguments + 3; size[0] != nullptr; size += 2) {
      const int64_t n_rows = std::atoll(size[0]), n_cols = std::atoll(size[1]);
      for (const bool any_gpu : {false, true}) {
        const auto partition = onetrip::backward_partition(n_rows, n_cols, info, any_gpu);
        std::printf("%d %d %d ", partition.n_parts, partition.rows_per_part, partition.n_groups);
      }
      std::printf("%lld\n", static_cast<long long>(onetrip::row_norm_workspace_cuda(0, n_rows, n_cols, 3)));
    }
    return cudaSuccess;
  });
}
