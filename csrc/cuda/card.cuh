// What the driver says of cards and of kernels on them. It is asked once: asking at every launch takes microseconds.
#pragma once
#include "platform.cuh"

// NVRTC compiles no host code.
#ifndef __CUDACC_RTC__

#include <map>
#include <mutex>
#include <tuple>
#include <utility>

namespace onetrip {

// A call's status; one that failed is not left behind for the next launch to report.
inline cudaError_t cleared(cudaError_t status) {
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

// Answers by what they are about. One that failed is not kept. Nobody waits here while the driver is asked, which may
// load a kernel and wait for the card: two threads may ask the same.
template <typename Key, typename Answer>
class Answers {
 public:
  // ask(answer) -> the status of the call that answers.
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
// They outlive the process's last launch: never destroyed.

struct Card {
  int device;
  int n_multiprocessors;
  // Bytes of shared memory: of a multiprocessor, of that what the system takes for every block, and what a block may
  // have.
  int shared, reserved_shared, block_shared;
  bool has_clusters;
};

inline cudaError_t look_at(int device, Card& card) {
  static auto& cards = *new Answers<int, Card>;
  return cards.get(device, card, [device](Card& asked) {
    asked.device = device;
    cudaError_t status = cudaSuccess;
    const auto ask = [&](int& value, cudaDeviceAttr attribute) {
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, device);
    };
    ask(asked.n_multiprocessors, cudaDevAttrMultiProcessorCount);
    ask(asked.shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    ask(asked.reserved_shared, cudaDevAttrReservedSharedMemoryPerBlock);
    ask(asked.block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    // A driver that has never heard of clusters, and fails here, has none.
    int clusters = 0;
    asked.has_clusters =
        cleared(cudaDeviceGetAttribute(&clusters, cudaDevAttrClusterLaunch, device)) == cudaSuccess && clusters != 0;
    return status;
  });
}

// Lets a kernel have as much dynamic shared memory as the card, which is current, has for it, in the device's one
// context (which torch, too, never resets). Not just what a call asks
// for: another thread's call with less would take it back before the launch. static_shared: bytes of the kernel's own
// arrays; 0 where it is empty, being code of cards that lack what it needs.
template <typename Kernel>
cudaError_t prepare(Kernel kernel, const Card& card, int& static_shared) {
  static auto& kernels = *new Answers<std::pair<const void*, int>, int>;
  const auto address = reinterpret_cast<const void*>(kernel);
  return kernels.get({address, card.device}, static_shared, [&](int& asked) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, address);
    if (status != cudaSuccess) return status;
    asked = static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(address, cudaFuncAttributeMaxDynamicSharedMemorySize, card.block_shared - asked);
  });
}

template <typename Kernel>
cudaError_t prepare(Kernel kernel, const Card& card) {
  int static_shared = 0;
  return prepare(kernel, card, static_shared);
}

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

// Whether the card, which is current, runs a kernel in clusters of so many blocks of so many threads, with so much
// dynamic shared memory. Not so on cards without clusters, and for code of such cards, whose kernel is empty.
template <typename Kernel>
bool runs_in_clusters(Kernel kernel, int cluster_blocks, int threads, size_t shared_bytes, const Card& card) {
  int static_shared = 0;
  if (!card.has_clusters || prepare(kernel, card, static_shared) != cudaSuccess || static_shared == 0) return false;
  static auto& fitting = *new Answers<std::tuple<const void*, int, int, int, size_t>, int>;  // clusters at a time
  const auto address = reinterpret_cast<const void*>(kernel);
  int n_clusters = 0;
  const cudaError_t status =
      fitting.get({address, card.device, cluster_blocks, threads, shared_bytes}, n_clusters, [&](int& asked) {
        const ClusterLaunch launch(cluster_blocks, dim3(static_cast<unsigned>(cluster_blocks)),
                                   dim3(static_cast<unsigned>(threads)), shared_bytes, nullptr);
        return cudaOccupancyMaxActiveClusters(&asked, address, launch.address());
      });
  return status == cudaSuccess && n_clusters > 0;
}

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

// Runs launch(card) with the device current, and returns its status.
template <typename Launch>
int on_device(int device, const Launch& launch) {
  const DeviceGuard guard(device);
  if (guard.status() != cudaSuccess) return guard.status();
  Card card{};
  const cudaError_t status = look_at(device, card);
  return status != cudaSuccess ? status : launch(card);
}

}  // namespace onetrip

#endif  // __CUDACC_RTC__
