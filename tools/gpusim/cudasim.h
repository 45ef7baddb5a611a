// Runs CUDA kernels on the CPU, for tests: every CUDA thread is a fiber; blocks, or clusters of them, run one after
// another.
//
// The .cu files are compiled as C++ with -DONETRIP_CUDASIM; csrc/cuda/platform.cuh includes this header then. Under
// AddressSanitizer and UBSan that finds accesses out of bounds in global and shared memory, misaligned vector accesses,
// and use of shared memory that was not written (it is filled with NaN before every block). The simulator itself
// aborts on divergent barriers, on warp operations that name an absent lane, on deadlocks, and on stores into a block
// of the cluster that may not have begun or has ended. A copy that was not waited for has not arrived, but has already
// made its target unreadable. A missing barrier shows only under some orders of the threads: run several (set_order).
// Blind to races within a warp, to memory-model effects and to rounding of fast-math instructions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#undef __shared__  // shared memory is declared through ONETRIP_SHARED, whose arrays belong to a block
#undef __launch_bounds__
#define __launch_bounds__(...)
// Inlined by force into every kernel, device functions would take two to three times as long to compile.
#undef __forceinline__
#define __forceinline__ inline

namespace cudasim {

// In which order threads run between two waits.
enum class Order {
  kInStep = 0,  // all threads in turn
  // Warp by warp, each as far as it can alone, which is what exposes a missing barrier:
  kWarpsForward = 3,
  kWarpsReverse = 4,
  kWarpsRandom = 5,
};

void set_order(Order order);
// What GPUs differ in.
struct Gpu {
  int shared_limit;     // what cudaDevAttrMaxSharedMemoryPerBlockOptin answers, and what a launch may ask for
  int reserved_shared;  // by the system, for every block
  bool has_clusters;    // whether it can launch clusters
  bool has_copies;      // whether it has asynchronous copies; otherwise kernels that need them, or clusters, are empty
  bool operator==(const Gpu& other) const {
    return shared_limit == other.shared_limit && reserved_shared == other.reserved_shared &&
           has_clusters == other.has_clusters && has_copies == other.has_copies;
  }
};
// Makes the current device one of this kind, and returns its number: launchers ask a device only once what it is.
int use_gpu(const Gpu& gpu);
const Gpu& gpu_in_use();

// The thread that runs now.
struct ThreadIndices {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
  unsigned linear;
  unsigned cluster_rank, cluster_size;
};
const ThreadIndices& current();

void block_barrier(int line);
void named_barrier(int barrier, int threads);
// All lanes of mask bring a value; afterwards each may read those of all: 32 slots, valid until the lane's next
// exchange.
const uint64_t* warp_exchange(unsigned mask, uint64_t value);
[[noreturn]] void fail(const char* message);

// The block's array declared at this place in the source; NaN-filled when the block begins.
void* shared_array(const char* file, int line, size_t bytes);
void* dynamic_shared();

void cluster_arrive();
void cluster_wait();
// Where an address in this block's shared memory lies in that of another block of the cluster.
void* remote_shared(void* mine, int rank);

// Barriers that count bytes. What is stored arrives at once: early, where no thread waits for the end of the phase.
void byte_barrier_init(uint64_t* barrier);
void byte_barrier_expect(uint64_t* barrier, int bytes);
void byte_barrier_wait(uint64_t* barrier, int parity);
void store_remote_counted(void* mine, int rank, const void* value, size_t bytes, uint64_t* barrier);

// A copy fills its target with NaN, and waits in a group of its thread: all but the last n_pending are carried out by
// copy_async_wait.
void copy_async(void* shared, const void* global, size_t bytes);
void copy_async_commit();
void copy_async_wait(int n_pending);

using Body = void (*)(void* context);
cudaError_t run_grid(Body body, void* context, dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster_blocks);

// What runs a kernel in place of its source: its machine code (machine.h). parameters: as a launch hands them over.
using Executor = cudaError_t (*)(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes,
                                 unsigned cluster_blocks, const std::vector<unsigned char>& parameters);
inline Executor executor = nullptr;
// Bytes of the arrays in shared memory that a kernel's machine code has of its own, where there is one.
inline int (*static_shared)(const void* kernel) = nullptr;

template <typename Parameter>
void append(std::vector<unsigned char>& parameters, const Parameter& value) {
  const size_t at = (parameters.size() + alignof(Parameter) - 1) / alignof(Parameter) * alignof(Parameter);
  parameters.resize(at + sizeof value);
  std::memcpy(&parameters[at], &value, sizeof value);
}

// Where a graph is captured: whether it keeps the launch for later.
using Capture = bool (*)(const std::function<void()>& work);
inline Capture capture = nullptr;

template <typename... Parameters, typename... Args>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster_blocks,
                   const Args&... args) {
  if (capture != nullptr && capture([=] { launch(kernel, grid, block, shared_bytes, cluster_blocks, args...); }))
    return cudaSuccess;
  if (executor != nullptr) {
    std::vector<unsigned char> parameters;
    (append<Parameters>(parameters, args), ...);
    return executor(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, cluster_blocks, parameters);
  }
  auto call = [&] { kernel(args...); };
  return run_grid([](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call, grid, block, shared_bytes,
                  cluster_blocks);
}

inline unsigned lane() { return current().linear % 32; }

template <typename T>
T shuffle(unsigned mask, T value, unsigned source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "at most 8 bytes a lane");
  if ((mask >> source_lane & 1u) == 0) fail("shuffle reads a lane outside its mask");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const uint64_t* slots = warp_exchange(mask, bits);
  T result;
  std::memcpy(&result, &slots[source_lane], sizeof result);
  return result;
}

template <typename Operation>
unsigned reduce(unsigned mask, unsigned value, Operation operation) {
  const uint64_t* slots = warp_exchange(mask, value);
  unsigned result = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) != 0) result = operation(result, static_cast<unsigned>(slots[lane]));
  }
  return result;
}

}  // namespace cudasim

#define ONETRIP_SHARED(type, name, count) \
  type* const name = static_cast<type*>(::cudasim::shared_array(__FILE__, __LINE__, sizeof(type) * (count)))
#define ONETRIP_DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::cudasim::dynamic_shared())
#define ONETRIP_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream), ::cudasim::launch(kernel, grid, block, shared_bytes, 1, __VA_ARGS__))
#define ONETRIP_LAUNCH_CLUSTERS(kernel, cluster_blocks, grid, block, shared_bytes, stream, ...) \
  (static_cast<void>(stream), ::cudasim::launch(kernel, grid, block, shared_bytes, cluster_blocks, __VA_ARGS__))
#define ONETRIP_LAUNCH_EARLY(kernel, early, ...) (static_cast<void>(early), ONETRIP_LAUNCH(kernel, __VA_ARGS__))

#define threadIdx (::cudasim::current().thread)
#define blockIdx (::cudasim::current().block)
#define blockDim (::cudasim::current().block_dim)
#define gridDim (::cudasim::current().grid_dim)

namespace onetrip {
using ::cudasim::byte_barrier_expect;
using ::cudasim::byte_barrier_init;
using ::cudasim::byte_barrier_wait;
using ::cudasim::cluster_wait;
using ::cudasim::copy_async_commit;
using ::cudasim::named_barrier;
inline void allow_next_kernel() {}
inline void wait_for_previous_kernel() {}  // kernels run one after the other
inline void cluster_arrive_relaxed() { ::cudasim::cluster_arrive(); }
inline int cluster_rank() { return static_cast<int>(::cudasim::current().cluster_rank); }
inline int cluster_size() { return static_cast<int>(::cudasim::current().cluster_size); }
template <typename T>
void store_remote(T* mine, int rank, T value, uint64_t* barrier) {
  ::cudasim::store_remote_counted(mine, rank, &value, sizeof value, barrier);
}
template <int kBytes>
void copy_async(void* shared, const void* global) {
  ::cudasim::copy_async(shared, global, kBytes);
}
template <int kPending>
void copy_async_wait() {
  ::cudasim::copy_async_wait(kPending);
}
inline float exp2_flushed(float x) {
  const float result = std::exp2(x);
  return result < 1.17549435e-38f ? 0.0f : result;  // a NaN stays
}
// Outside the range in which the GPU's are right, wrong on purpose.
inline float wrong_unless(bool right, float x) { return right || std::isnan(x) ? x : std::isinf(x) ? NAN : 1.5f * x; }
template <bool kZero>
float quick_sqrt(float x) {
  if (x == 0.0f) return kZero ? 0.0f : NAN;
  return wrong_unless(x >= 0x1p-100f && !std::isinf(x), std::sqrt(x));
}
inline float quick_divide(float a, float b) {
  const bool in_range = (a == 0.0f || std::fabs(a) >= 0x1p-100f) && b >= 0x1p-100f && b <= 0x1p20f;
  return wrong_unless(in_range && std::isfinite(a / b), a / b);
}
inline float quick_reciprocal(float x) { return wrong_unless(x >= 0x1p-100f && x <= 0x1p100f, 1.0f / x); }
constexpr uint32_t kAdvanceUnit = 1;
template <int kElements, typename T>
void advance_by(T*& pointer, uint32_t) {
  pointer += kElements;
}
using SharedBase = const uint32_t*;
inline SharedBase shared_base(const void* words) { return static_cast<SharedBase>(words); }
template <int kFirst>
uint32_t shared_word(SharedBase base, uint32_t bytes) {
  return base[kFirst + static_cast<int>(bytes / 4)];
}
inline void read_again(uint64_t& first, uint64_t& second, const volatile uint64_t* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) cudasim::fail("16 bytes read at another alignment");
  first = from[0];
  second = from[1];
}
inline float value_or_zero(float value, bool kept) { return kept ? value : 0.0f; }
inline float clamp_magnitude(float value, float largest) {
  return std::fabs(value) > largest ? std::copysign(largest, value) : value;
}
template <typename T, typename Index>
T* global_pointer(int64_t address, Index index) {
  return reinterpret_cast<T*>(address) + index;
}
}  // namespace onetrip

// The line, not the return address, tells barriers apart: compilers duplicate code.
inline void __syncthreads(int line = __builtin_LINE()) { ::cudasim::block_barrier(line); }

// width: the warp falls into segments of so many lanes; a lane outside its segment means the lane itself.
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const unsigned lane = ::cudasim::lane(), source = lane ^ static_cast<unsigned>(lane_mask);
  const unsigned segment_end = (lane / width + 1) * width;
  return ::cudasim::shuffle(mask, value, source < segment_end ? source : lane);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const unsigned lane = ::cudasim::lane();
  return ::cudasim::shuffle(mask, value, lane / width * width + static_cast<unsigned>(source) % width);
}

inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return ::cudasim::reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return ::cudasim::reduce(mask, value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __any_sync(unsigned mask, int predicate) { return __reduce_or_sync(mask, predicate != 0) != 0; }

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t{a} * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }
// Byte i of the result is the byte of b:a that digit i of the selector names.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i)
    result |= static_cast<unsigned>(bytes >> ((selector >> (4 * i) & 7) * 8) & 0xFF) << (8 * i);
  return result;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 0xFF) * (b >> i & 0xFF);
  return sum;
}
inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned sum) {
  return sum + (a & 0xFFFF) * (b & 0xFF) + (a >> 16) * (b >> 8 & 0xFF);
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
using std::max;
using std::memcpy;
using std::min;
