// Launches on a thread's GPUs as DeviceGuard makes them current, beside the rules of the CUDA runtime and the driver.
#include "common/device_guard.h"

#include <cstdio>

namespace {

bool has_context[2];      // of each GPU
void* current = nullptr;  // the thread's context

int get(void** context) {
  *context = current;
  return 0;
}
int set(void* context) {
  current = context;
  return 0;
}
const onetrip::ContextCalls calls = [] {
  onetrip::ContextCalls of_test;
  of_test.get = get;
  of_test.set = set;
  return of_test;
}();

bool launch_on(int device) {
  const onetrip::DeviceGuard guard(device, calls);
  return guard.status() == cudaSuccess && current == &has_context[device];
}

int n_failures = 0;
void expect(bool holds, const char* what) {
  if (!holds) std::printf("%s\n", what), ++n_failures;
}

}  // namespace

extern "C" {
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (device > 1) return cudaErrorInvalidDevice;
  has_context[device] = true;
  current = &has_context[device];
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = current == &has_context[1];
  return cudaSuccess;
}
}

int main() {
  expect(launch_on(1), "a launch on GPU 1 runs there");
  expect(current == nullptr, "a thread without a context has none afterwards");
  expect(!has_context[0], "a launch on GPU 1 makes no context on GPU 0");
  expect(launch_on(1) && current == nullptr, "the second launch as well");
  set(&has_context[0]);
  expect(launch_on(1), "a launch on GPU 1 from a thread on GPU 0 runs there");
  expect(current == &has_context[0], "the thread is on GPU 0 afterwards");
  expect(launch_on(0) && current == &has_context[0], "a launch on the thread's own GPU changes nothing");
  {
    const onetrip::DeviceGuard guard(7, calls);
    expect(guard.status() != cudaSuccess, "a device that is not there is an error");
  }
  expect(current == &has_context[0], "which changes nothing");
  return n_failures;
}
