// What launchers of every family share: grids of rows, the choice of vector access, the current device.
#pragma once
#include "vec.cuh"

namespace onetrip {

// Blocks are counted over the grid's x and y: a grid's x alone ends at 2^31 - 1.
__device__ __forceinline__ int64_t first_row_of_block(int rows_per_block) {
  return (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * rows_per_block;
}

// NVRTC compiles no host code.
#ifndef __CUDACC_RTC__

constexpr int64_t kMaxGrid = 0x7FFFFFFF;  // blocks in x, on every card
constexpr int kStaticSharedBytes = 1024;  // more than the own arrays of a kernel that does not ask for their size

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline dim3 grid_of_rows(int64_t n_rows, int rows_per_block) {
  const int64_t n_blocks = ceil_div(n_rows, rows_per_block), grid_y = ceil_div(n_blocks, kMaxGrid);
  return dim3(static_cast<unsigned>(ceil_div(n_blocks, grid_y)), static_cast<unsigned>(grid_y));
}

// Whether every tensor of the call can be read and written in whole chunks, at most 16 bytes at a time.
class VectorAccess {
 public:
  VectorAccess(int64_t n_cols, int columns) : columns_(columns), possible_(n_cols % columns == 0) {}

  // row_stride in elements; 0 for a parameter.
  void require(const void* address, DType dtype, int64_t row_stride) { require(address, size_of(dtype), row_stride); }
  void require(const void* address, int64_t size, int64_t row_stride) {
    if (address == nullptr) return;
    const int64_t unit = columns_ * size < 16 ? columns_ * size : 16;
    possible_ = possible_ && reinterpret_cast<uintptr_t>(address) % unit == 0 && row_stride * size % unit == 0;
  }
  bool possible() const { return possible_; }

 private:
  int64_t columns_;
  bool possible_;
};

// Makes a device current, and the earlier one again at the end: the static runtime has a current device of its own.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : status_(cudaGetDevice(&previous_)) {
    if (status_ == cudaSuccess && previous_ != device) {
      status_ = cudaSetDevice(device);
      restore_ = status_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (restore_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int previous_ = 0;
  bool restore_ = false;
  cudaError_t status_;
};

// A launch in clusters of cluster_blocks blocks along x.
struct ClusterLaunch {
  ClusterLaunch(int cluster_blocks, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream)
      : config{grid, block, shared_bytes, stream, &attribute, 1} {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster_blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  ClusterLaunch(const ClusterLaunch&) = delete;
  ClusterLaunch& operator=(const ClusterLaunch&) = delete;
  const cudaLaunchConfig_t* address() const { return &config; }

  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config;
};

// Bytes of a kernel's own arrays in shared memory. 0 where it is empty: code of cards that lack what it needs.
template <typename Kernel>
int64_t static_shared_bytes(Kernel kernel) {
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)) == cudaSuccess) {
    return static_cast<int64_t>(attributes.sharedSizeBytes);
  }
  cudaGetLastError();  // no error of the call's
  return 0;
}

// Whether the card runs a kernel in clusters of so many blocks; then the kernel may have so much dynamic shared memory.
// Not so on cards without clusters, and for code of such cards, whose kernel is empty.
template <typename Kernel>
bool runs_in_clusters(Kernel kernel, int cluster_blocks, int threads, size_t shared_bytes, int device) {
  int possible = 0, n_clusters = 0;
  if (cudaDeviceGetAttribute(&possible, cudaDevAttrClusterLaunch, device) != cudaSuccess || possible == 0) return false;
  if (static_shared_bytes(kernel) == 0) return false;
  const auto address = reinterpret_cast<const void*>(kernel);
  cudaError_t status =
      cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (status == cudaSuccess) {
    const ClusterLaunch launch(cluster_blocks, dim3(static_cast<unsigned>(cluster_blocks)),
                               dim3(static_cast<unsigned>(threads)), shared_bytes, nullptr);
    status = cudaOccupancyMaxActiveClusters(&n_clusters, address, launch.address());
  }
  if (status != cudaSuccess) cudaGetLastError();  // no error of the call's
  return n_clusters > 0;
}

#endif  // __CUDACC_RTC__

}  // namespace onetrip
