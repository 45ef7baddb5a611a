// Sums over the threads of a row, in an order that depends on their number alone: the same bits on every GPU.
#pragma once
#include "platform.cuh"

namespace onetrip {

constexpr int kWarpThreads = 32;
constexpr unsigned kFullWarp = 0xFFFFFFFFu;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarpThreads;

// Half of the threads that an SM can hold: 1024 of sm_75, 1536 of sm_86, sm_89 and sm_120, 2048 of the others.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
constexpr int kHalfOfResidentThreads = 512;
#elif defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int kHalfOfResidentThreads = 768;
#else
constexpr int kHalfOfResidentThreads = 1024;
#endif

__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, value, lane_mask);
}
__device__ __forceinline__ double shuffle_xor(double value, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, value, lane_mask);
}
__device__ __forceinline__ float2 shuffle_xor(float2 value, int lane_mask) {
  return make_float2(shuffle_xor(value.x, lane_mask), shuffle_xor(value.y, lane_mask));
}
__device__ __forceinline__ float add(float a, float b) { return a + b; }
__device__ __forceinline__ double add(double a, double b) { return a + b; }
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

// Every lane gets the sum over its group of kThreads consecutive lanes. All 32 lanes must take part.
template <int kThreads, typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int lane_mask = kThreads / 2; lane_mask > 0; lane_mask /= 2) value = add(value, shuffle_xor(value, lane_mask));
  return value;
}

// The same of groups of so many lanes. No branches: steps between lanes of other groups are taken, and come to nothing.
__device__ __forceinline__ float lanes_sum(float value, int lanes) {
#pragma unroll
  for (int lane_mask = kWarpThreads / 2; lane_mask > 0; lane_mask /= 2) {
    const float other = shuffle_xor(value, lane_mask);
    value = lane_mask < lanes ? value + other : value;
  }
  return value;
}

// The sums over 32 lanes of two values, each in the order above: lanes 0 to 15 get the first's, the others the
// second's.
template <typename T>
__device__ __forceinline__ T warp_sums(T first, T second) {
  const bool upper = static_cast<int>(threadIdx.x) % kWarpThreads >= kWarpThreads / 2;
  const T kept = upper ? second : first;
  return warp_sum<kWarpThreads / 2>(add(kept, shuffle_xor(upper ? first : second, kWarpThreads / 2)));
}

// Every lane of a warp gets the sum of the warps' sums of a row: first each lane those of its number, 32 apart, so that
// up to 32 warps are added as warp_sum adds 32 lanes.
template <typename T>
__device__ __forceinline__ T sum_of_warps(const T* warp_sums, int n_warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  T total = lane < n_warps ? warp_sums[lane] : T{};
#pragma unroll 1
  for (int i = lane + kWarpThreads; i < n_warps; i += kWarpThreads) total = add(total, warp_sums[i]);
  return warp_sum<kWarpThreads>(total);
}

// Every lane gets the largest number of its half of the warp. All 32 lanes must take part.
__device__ __forceinline__ uint32_t half_warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
  for (int lane_mask = kWarpThreads / 4; lane_mask > 0; lane_mask /= 2) {
    value = max(value, __shfl_xor_sync(kFullWarp, value, lane_mask));
  }
  return value;
#else
  const bool upper = static_cast<int>(threadIdx.x) % kWarpThreads >= kWarpThreads / 2;
  const uint32_t of_lower = __reduce_max_sync(kFullWarp, upper ? 0 : value);
  const uint32_t of_upper = __reduce_max_sync(kFullWarp, upper ? value : 0);
  return upper ? of_upper : of_lower;
#endif
}

// Sums over the threads that share a row. kRowThreads: lanes of one warp; 0: row_threads of the block, whole
// warps, of which several groups may work on rows of their own, each waiting at its own barrier; kClusterRow: all
// threads of a cluster's blocks.
constexpr int kClusterRow = -1;
template <int kRowThreads>
class RowSum {
 public:
  __device__ RowSum(int, int, float2*) {}
  template <typename T>
  __device__ __forceinline__ T operator()(T value) {
    return warp_sum<kRowThreads>(value);
  }
  // The sum of two values a lane, as if the second were those of as many lanes more.
  template <typename T>
  __device__ __forceinline__ T operator()(T first, T second) {
    return warp_sum<kRowThreads>(add(first, second));
  }
};

template <>
class RowSum<0> {
 public:
  // group: which of the block's groups of row_threads threads this is, 0 to 14. shared: [2 * kMaxWarps], one a block.
  __device__ RowSum(int row_threads, int group, float2* shared)
      : row_threads_(row_threads), group_(group), shared_(shared) {}

  template <typename T>
  __device__ __forceinline__ T operator()(T value) {
    return add_up<1>(warp_sum<kWarpThreads>(value));
  }
  // The sum of two values a thread, as if the second were those of as many warps more. At most 512 threads.
  template <typename T>
  __device__ __forceinline__ T operator()(T first, T second) {
    return add_up<2>(warp_sums(first, second));
  }

 private:
  // A warp's sum of value i is in its lanes from i * kWarpThreads / kValues on.
  template <int kValues, typename T>
  __device__ __forceinline__ T add_up(T value) {
    // The two halves of the memory take turns. Who writes a half again has passed the barrier of the sum in between,
    // and that one nobody reaches before having read this half: one barrier a sum is enough.
    compiler_barrier(group_);  // what follows from it is cheaper computed again than held in registers
    const int group = group_, n_warps = row_threads_ / kWarpThreads;
    T* slot = reinterpret_cast<T*>(shared_ + turn_ * kMaxWarps) + group * n_warps * kValues;
    turn_ ^= 1;
    const int warp = static_cast<int>(threadIdx.x) / kWarpThreads - group * n_warps;
    const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
    constexpr int kLanes = kWarpThreads / kValues;
    if (lane % kLanes == 0) slot[lane / kLanes * n_warps + warp] = value;
    named_barrier(1 + group, row_threads_);
    value = lane < n_warps * kValues ? slot[lane] : T{};
    return warp_sum<kWarpThreads>(value);
  }

  int row_threads_, group_, turn_ = 0;
  float2* shared_;
};

// The same where a row has kRowThreads lanes, row_threads lanes (kAnyLanes), or the whole block (0) for itself.
constexpr int kAnyLanes = -2;
template <int kRowThreads>
class BlockOrLanesSum {
 public:
  // shared: [2 * kMaxWarps] for a block. row_threads: for kAnyLanes.
  __device__ explicit BlockOrLanesSum(float2* shared, int row_threads = 0)
      : row_threads_(row_threads), shared_(shared) {}

  template <typename T>
  __device__ __forceinline__ T operator()(T value) {
    if constexpr (kRowThreads == kAnyLanes) return lanes_sum(value, row_threads_);
    if constexpr (kRowThreads > 0) return warp_sum<kRowThreads>(value);
    uint32_t thread = threadIdx.x;
    compiler_barrier(thread);  // what follows from it is cheaper computed again than held in registers
    const uint32_t warp = thread / kWarpThreads, lane = thread % kWarpThreads;
    T* const slots = reinterpret_cast<T*>(shared_ + turn_ * kMaxWarps);  // the halves take turns
    turn_ ^= 1;
    value = warp_sum<kWarpThreads>(value);
    if (lane == 0) slots[warp] = value;
    __syncthreads();
    value = lane < blockDim.x / kWarpThreads ? slots[lane] : T{};
    return warp_sum<kWarpThreads>(value);
  }

 private:
  int row_threads_, turn_ = 0;
  float2* shared_;
};

constexpr int kMaxClusterBlocks = 8;  // that every GPU with clusters can run
constexpr int kMaxClusterWarps = kMaxClusterBlocks * kMaxWarps;

#if ONETRIP_CLUSTERS

// Every warp of a cluster tells all blocks values, once per sum.
class ClusterExchange {
 public:
  // shared: [2 * kMaxClusterWarps], at the same place in every block. The threads of the cluster meet before the first
  // value is sent: nobody stores into a block that has not begun.
  __device__ explicit ClusterExchange(float2* shared) : shared_(shared) {
    ONETRIP_SHARED(uint64_t, barriers, 2);
    barriers_ = barriers;
    if (threadIdx.x == 0) {
      byte_barrier_init(barriers);
      byte_barrier_init(barriers + 1);
    }
    cluster_arrive_relaxed();
  }

  static __device__ __forceinline__ int n_warps() {
    return cluster_size() * static_cast<int>(blockDim.x / kWarpThreads);
  }

  // The kValues * n_warps() values of all warps, those of a block next to each other, its first values first. A warp's
  // value i is in its lanes from i * kWarpThreads / kValues on. T: float or float2.
  template <int kValues, typename T>
  __device__ __forceinline__ const T* tell(T value) {
    // The two halves of the memory take turns. Who sends into a half again has got everybody's values of the turn in
    // between, and those nobody sends before having read this half.
    T* const slots = reinterpret_cast<T*>(shared_ + turn_ % 2 * kMaxClusterWarps);
    uint64_t* const barrier = barriers_ + turn_ % 2;
    const int parity = turn_ / 2 % 2;
    if (turn_ == 0) cluster_wait();
    turn_ = turn_ % 4 + 1;
    if (threadIdx.x == 0) byte_barrier_expect(barrier, kValues * n_warps() * static_cast<int>(sizeof(T)));
    const int lane = static_cast<int>(threadIdx.x % kWarpThreads), warp = static_cast<int>(threadIdx.x / kWarpThreads);
    const int warps_of_block = static_cast<int>(blockDim.x / kWarpThreads);
    constexpr int kLanes = kWarpThreads / kValues;
    if (lane % kLanes < cluster_size()) {
      T* const slot = slots + (cluster_rank() * kValues + lane / kLanes) * warps_of_block + warp;
      store_remote(slot, lane % kLanes, value, barrier);
    }
    byte_barrier_wait(barrier, parity);
    return slots;
  }

 private:
  float2* shared_;
  uint64_t* barriers_;
  int turn_ = 0;  // then 1 to 4, cyclically
};

template <>
class RowSum<kClusterRow> {
 public:
  // shared: [2 * kMaxClusterWarps].
  __device__ explicit RowSum(float2* shared) : exchange_(shared) {}

  template <typename T>
  __device__ __forceinline__ T operator()(T value) {
    const T* const sums = exchange_.tell<1>(warp_sum<kWarpThreads>(value));
    return sum_of_warps(sums, ClusterExchange::n_warps());
  }
  // The sum of two values a thread, as above: the second are those of as many warps more in each block.
  template <typename T>
  __device__ __forceinline__ T operator()(T first, T second) {
    const T* const sums = exchange_.tell<2>(warp_sums(first, second));
    return sum_of_warps(sums, 2 * ClusterExchange::n_warps());
  }

 private:
  ClusterExchange exchange_;
};

#endif

// Count, mean and sum of squared deviations of a set of values; sets are joined by Chan, Golub & LeVeque (1979).
struct Moments {
  float count, mean, m2;
};

__device__ __forceinline__ Moments join(const Moments& a, const Moments& b) {
  const float count = a.count + b.count;
  const float share = count > 0.0f ? b.count / count : 0.0f;
  const float delta = b.mean - a.mean;
  return Moments{count, fmaf(delta, share, a.mean), fmaf(delta * delta * a.count, share, a.m2 + b.m2)};
}

// The join rounds differently with its sides exchanged, so lane 0's result is everybody's.
__device__ __forceinline__ Moments warp_join(Moments value) {
#pragma unroll
  for (int lane_mask = kWarpThreads / 2; lane_mask > 0; lane_mask /= 2) {
    value = join(value, Moments{shuffle_xor(value.count, lane_mask), shuffle_xor(value.mean, lane_mask),
                                shuffle_xor(value.m2, lane_mask)});
  }
  return Moments{__shfl_sync(kFullWarp, value.count, 0), __shfl_sync(kFullWarp, value.mean, 0),
                 __shfl_sync(kFullWarp, value.m2, 0)};
}

// Over the whole block. shared: [kMaxWarps].
__device__ __forceinline__ Moments block_join(Moments value, Moments* shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads, lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  value = warp_join(value);
  __syncthreads();  // the previous row's readers are done
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  value = lane < static_cast<int>(blockDim.x) / kWarpThreads ? shared[lane] : Moments{};
  return warp_join(value);
}

// A row's statistics are means over n_cols; a row wider than 2^24 would be the first that float cannot count exactly.
__device__ __forceinline__ float mean_of(float sum, int64_t n_cols) { return sum / static_cast<float>(n_cols); }

}  // namespace onetrip
