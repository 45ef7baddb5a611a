// What the driver knows about a GPU and about kernels on it, queried once: a query per launch takes microseconds.
#pragma once
#include "platform.cuh"

// NVRTC compiles no host code.
#ifndef __CUDACC_RTC__

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "../common/device_guard.h"

namespace onetrip {

// A call's status; one that failed is not left behind for the next launch to report.
inline cudaError_t cleared(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Caches driver queries by key; a failed query is not cached. The lock is not held during a query, which may load a
// kernel and wait for the GPU, so two threads may issue the same one.
template <typename Key, typename Answer>
class QueryCache {
 public:
  // ask(answer) fills in the answer and returns the driver's status.
  template <typename Ask>
  cudaError_t get(const Key& key, Answer& answer, const Ask& ask) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto known = answers_.find(key);
      if (known != answers_.end()) {
        answer = known->second;
        return cudaSuccess;
      }
    }
    const cudaError_t status = cleared(ask(answer));
    if (status != cudaSuccess) return status;
    const std::lock_guard<std::mutex> lock(mutex_);
    answers_.emplace(key, answer);
    return status;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Answer> answers_;
};
// The caches below are never destroyed: a launch may come after static destructors have run.

struct DeviceInfo {
  int device;
  int n_multiprocessors;
  // Bytes of shared memory: of a multiprocessor, of that what the system takes for every block, and what a block may
  // have.
  int shared, reserved_shared, block_shared;
  bool has_copies, has_clusters;  // asynchronous copies (sm_80), clusters of blocks (sm_90)
  bool has_early_starts;          // programmatic dependent launch: sm_90, and a driver that captures it in a graph
};

inline cudaError_t query_device(int device, DeviceInfo& info) {
  static auto& devices = *new QueryCache<int, DeviceInfo>;
  return devices.get(device, info, [device](DeviceInfo& asked) {
    asked.device = device;
    cudaError_t status = cudaSuccess;
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
    };
    ask(asked.n_multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(asked.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    ask(asked.reserved_shared, cudaDevAttrReservedSharedMemoryPerBlock);
    ask(asked.block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    int major = 0;
    ask(major, cudaDevAttrComputeCapabilityMajor);
    asked.has_copies = major >= 8;
    int driver = 0;
    if (status == cudaSuccess) status = cudaDriverGetVersion(&driver);
    asked.has_early_starts = major >= 9 && driver >= 12040;
    // A driver older than clusters fails here: it has none.
    int clusters = 0;
    asked.has_clusters =
        cleared(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device)) == cudaSuccess && clusters != 0;
    return status;
  });
}

struct KernelInfo {
  int static_shared;  // bytes of the kernel's own arrays; 0 if it is empty, compiled for GPUs that lack its features
  int architecture;   // that its code was written for, 10 * major + minor; older than the GPU's where PTX was compiled
};

// Allows a kernel all the dynamic shared memory that the current GPU has, in the device's primary context (which torch
// never resets either). Not only what a call needs: another thread's smaller limit would replace it before the launch.
// carveout: of an SM's memory the percentage that is shared memory, where the driver is not to choose.
template <typename Kernel>
cudaError_t prepare(Kernel kernel, const DeviceInfo& info, KernelInfo& kernel_info,
                    int carveout = cudaSharedmemCarveoutDefault) {
  static auto& kernels = *new QueryCache<std::pair<const void*, int>, KernelInfo>;
  const auto address = reinterpret_cast<const void*>(kernel);
  return kernels.get({address, info.device}, kernel_info, [&](KernelInfo& asked) {
    cudaFuncAttributes attributes{};
    cudaError_t status = cudaFuncGetAttributes(&attributes, address);
    if (status != cudaSuccess) return status;
    asked = {static_cast<int>(attributes.sharedSizeBytes), attributes.ptxVersion};
    status = cudaFuncSetAttribute(address, cudaFuncAttributePreferredSharedMemoryCarveout, carveout);
    if (status != cudaSuccess) return status;
    return cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                info.block_shared - asked.static_shared);
  });
}

template <typename Kernel>
cudaError_t prepare(Kernel kernel, const DeviceInfo& info) {
  KernelInfo kernel_info{};
  return prepare(kernel, info, kernel_info);
}

// A launch with an attribute.
struct AttributedLaunch {
  AttributedLaunch(cudaLaunchAttributeID id, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream)
      : config{grid, block, shared_bytes, stream, &attribute, 1} {
    attribute.id = id;
  }
  AttributedLaunch(const AttributedLaunch&) = delete;
  AttributedLaunch& operator=(const AttributedLaunch&) = delete;
  const cudaLaunchConfig_t* address() const { return &config; }

  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config;
};

// In clusters of cluster_blocks blocks along x.
struct ClusterLaunch : AttributedLaunch {
  ClusterLaunch(int cluster_blocks, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream)
      : AttributedLaunch(cudaLaunchAttributeClusterDimension, grid, block, shared_bytes, stream) {
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster_blocks);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
};

// Launches a kernel that calls wait_for_previous_kernel. early: its blocks start when all blocks of the kernel before
// it in the stream have called allow_next_kernel or have ended.
struct EarlyLaunch : AttributedLaunch {
  EarlyLaunch(bool early, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream)
      : AttributedLaunch(cudaLaunchAttributeProgrammaticStreamSerialization, grid, block, shared_bytes, stream) {
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = early ? 1 : 0;
  }
};

// Whether the GPU and its driver can, and the kernel's code waits: compiled from PTX of earlier GPUs it does not.
inline bool starts_early(const KernelInfo& kernel_info, const DeviceInfo& info) {
  return info.has_early_starts && kernel_info.architecture >= 90;
}

// How many clusters of this size, with this dynamic shared memory, the current GPU runs of a kernel at the same time:
// its parts (GPCs) may have SMs left over. 0 on GPUs without clusters, and for code compiled for such GPUs, whose
// kernel is empty.
template <typename Kernel>
int clusters_at_once(Kernel kernel, int cluster_blocks, int threads, size_t shared_bytes, const DeviceInfo& info,
                     int carveout = cudaSharedmemCarveoutDefault) {
  KernelInfo kernel_info{};
  if (!info.has_clusters || prepare(kernel, info, kernel_info, carveout) != cudaSuccess) return 0;
  if (kernel_info.static_shared == 0) return 0;
  static auto& fitting = *new QueryCache<std::tuple<const void*, int, int, int, size_t>, int>;
  const auto address = reinterpret_cast<const void*>(kernel);
  int n_clusters = 0;
  const cudaError_t status =
      fitting.get({address, info.device, cluster_blocks, threads, shared_bytes}, n_clusters, [&](int& asked) {
        const ClusterLaunch launch(cluster_blocks, dim3(static_cast<unsigned>(cluster_blocks)),
                                   dim3(static_cast<unsigned>(threads)), shared_bytes, nullptr);
        return cudaOccupancyMaxActiveClusters(&asked, address, launch.address());
      });
  return status == cudaSuccess ? n_clusters : 0;
}

// Runs launch(info) with the device current, and returns its status.
template <typename Launch>
int on_device(int device, const Launch& launch) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  DeviceInfo info{};
  const cudaError_t status = query_device(device, info);
  return status != cudaSuccess ? status : launch(info);
}

}  // namespace onetrip

#endif  // __CUDACC_RTC__
