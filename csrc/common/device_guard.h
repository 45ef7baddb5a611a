// The GPU of a launch, made current for the time of the launch.
#pragma once
#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace onetrip {

// What the CUDA runtime has no call for: the thread's context as it is, none included.
struct ContextCalls {
  using Context = void*;
  int (*get)(Context*) = nullptr;
  int (*set)(Context) = nullptr;

  // The driver's, which every runtime of the process shares.
  static const ContextCalls& of_driver() {
    static const ContextCalls calls = [] {
      ContextCalls found;
      if (void* driver = dlopen("libcuda.so.1", RTLD_LAZY)) {
        found.get = reinterpret_cast<decltype(found.get)>(dlsym(driver, "cuCtxGetCurrent"));
        found.set = reinterpret_cast<decltype(found.set)>(dlsym(driver, "cuCtxSetCurrent"));
      }
      return found;
    }();
    return calls;
  }
};

// Makes a device current, and restores the thread's context at the end. cudaSetDevice(previous) would not do: where the
// thread had no context yet it makes one on the previous GPU, which takes hundreds of megabytes there.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device, const ContextCalls& calls = ContextCalls::of_driver())
      : calls_(calls),
        known_(calls.get != nullptr && calls.set != nullptr && calls.get(&context_) == 0),
        // Also where the runtime names this device already: it may not know of a context that torch has set since.
        status_(cudaSetDevice(device)) {}
  ~DeviceGuard() {
    ContextCalls::Context now = nullptr;
    if (known_ && calls_.get(&now) == 0 && now != context_) calls_.set(context_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  const ContextCalls& calls_;
  ContextCalls::Context context_ = nullptr;
  const bool known_;
  const cudaError_t status_;
};

}  // namespace onetrip
