// One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) over the chunks of all parameters of a kind;
// the formulas are those of launch.h and of the reference, every float32 operation rounded by itself.
//
// adam_prepare_kernel: a thread counts the step of one counter and computes its AdamScalars.
// adam_step_kernel: as many blocks as run at once take the chunks of 4096 elements in turn. A thread takes 8
// consecutive elements: 128-bit accesses of parameter and gradient; 16 lanes are a block of 128 elements, and find its
// largest magnitudes by shuffles. The warps of a block never wait for each other.
// Where memory is fast the arithmetic is the limit: 8-bit steps of bfloat16 take about 76 instructions an element. So a
// warp whose elements are all there, aligned and of ordinary size takes them without a branch between two of them
// (kQuick), roots and quotients side by side; any other warp's part goes the long way, to the same bits.
// Moves, of a float32 parameter and gradient, 12 + 2 * (2 + 8/128) = 16.1 bytes an element (8-bit), or 28 (32-bit).
#pragma once
#include "adam_tables.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

constexpr int kAdamThreads = kAdamChunk / kChunkColumns;
constexpr int kAdamWarps = kAdamThreads / kWarpThreads;
constexpr int kAdamLanes = kAdamBlock / kChunkColumns;  // that share a scale
constexpr int kAdamBlocks = 2;                          // an SM: what 64 registers allow
static_assert(kWarpThreads % kAdamLanes == 0, "the scales of a warp");

// Groups that a launch takes as an argument: 64 of them fill most of its 4 KiB.
template <int kGroups>
struct AdamGroups {
  AdamGroup group[kGroups];
};

// Counters of the groups first_group, ..., first_group + n_groups - 1.
template <int kGroups>
__global__ void adam_prepare_kernel(const __grid_constant__ AdamGroups<kGroups> groups, int64_t first_group,
                                    int64_t n_groups, const AdamCounter* counters, int64_t n_counters,
                                    const float* grad_scale, const float* found_inf, AdamScalars* scalars) {
  const int64_t i = first_row_of_block(static_cast<int>(blockDim.x)) + threadIdx.x;
  if (i >= n_counters) return;
  const AdamCounter counter = counters[i];
  const int64_t group = counter.group - first_group;
  if (group >= 0 && group < n_groups) scalars[i] = prepare_adam(counter, groups.group[group], grad_scale, found_inf);
}

// Where element `first` of a tensor lies, and the scales of its block.
template <typename P, typename G, typename State>
struct AdamAddresses {
  P* param;
  const G* grad;
  State *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;

  // Index: uint32_t or int64_t.
  template <typename Index>
  __device__ __forceinline__ AdamAddresses(const AdamTensor& tensor, Index first)
      : param(global_pointer<P>(tensor.param, first)),
        grad(global_pointer<const G>(tensor.grad, first)),
        exp_avg(global_pointer<State>(tensor.exp_avg, first)),
        exp_avg_sq(global_pointer<State>(tensor.exp_avg_sq, first)),
        exp_avg_scale(scale_of(tensor.exp_avg_scale, first)),
        exp_avg_sq_scale(scale_of(tensor.exp_avg_sq_scale, first)) {}

 private:
  template <typename Index>
  __device__ __forceinline__ static float* scale_of(int64_t scales, Index first) {
    return sizeof(State) == 1 ? global_pointer<float>(scales, first / static_cast<Index>(kAdamBlock)) : nullptr;
  }
};

// Whether chunks of 8 elements of a tensor, from its first on, can be read and written 16 bytes at a time, or as one.
template <typename P, typename G, typename State>
__device__ __forceinline__ bool aligned_for_chunks(const AdamTensor& tensor) {
  constexpr auto kUnit = [](size_t size) { return static_cast<uint32_t>(kChunkColumns * size < 16 ? 8 : 16); };
  const auto rest = [](int64_t address, uint32_t unit) { return static_cast<uint32_t>(address) & (unit - 1); };
  return (rest(tensor.param, kUnit(sizeof(P))) | rest(tensor.grad, kUnit(sizeof(G))) |
          rest(tensor.exp_avg | tensor.exp_avg_sq, kUnit(sizeof(State)))) == 0;
}

// m and v become those of this step.
__device__ __forceinline__ void update_moments(float g, float& m, float& v, const AdamScalars& s) {
  m = __fadd_rn(m, __fmul_rn(__fadd_rn(g, -m), s.one_minus_beta1));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(__fmul_rn(g, s.one_minus_beta2), g));
}

__device__ __forceinline__ float denominator_of(float root, const AdamScalars& s) {
  return __fadd_rn(__fmul_rn(root, s.inv_sqrt_bias_correction2), s.eps);
}

// The new parameter, before it is rounded. root: sqrt(v).
template <bool kClamp, bool kQuick>
__device__ __forceinline__ float updated(float p, float m, float root, const AdamScalars& s) {
  const float numerator = __fmul_rn(m, s.inv_bias_correction1), denominator = denominator_of(root, s);
  float u = kQuick ? quick_divide(numerator, denominator) : __fdiv_rn(numerator, denominator);
  if (kClamp) u = clamp_magnitude(u, s.largest_update);
  return __fadd_rn(__fmul_rn(p, s.decay), -__fmul_rn(u, s.lr));
}

// The scale of a block of which every lane has its largest magnitude, as bits: NaN is larger than any number.
__device__ __forceinline__ float adam_scale(uint32_t magnitude) {
  const float scale = __uint_as_float(group_max<kAdamLanes>(magnitude));
  return scale < kSmallestAdamScale ? 0.0f : scale;
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The least and largest magnitude of a thread's numbers, as bits: NaN is larger than any number.
struct Magnitudes {
  uint32_t least = ~0u, largest = 0;

  __device__ __forceinline__ void add(uint32_t bits) { least = min(least, bits), largest = max(largest, bits); }

  // Leaves zeros out of the least, which is the next smaller number then.
  template <int N>
  __device__ __forceinline__ void skip_zeros(const float (&value)[N]) {
    least = ~0u;
#pragma unroll
    for (int j = 0; j < N; ++j) least = min(least, magnitude_bits(value[j]) - 1);  // 0 becomes the largest
  }
};

// Whether the quick arithmetic of platform.cuh is right for moments of these sizes, or for 0: no smaller than 2^-100,
// as v, the square of the root, is for roots of 2^-49; not so large that the update could overflow.
__device__ __forceinline__ bool in_quick_range(const Magnitudes& m, const Magnitudes& root, const AdamScalars& s) {
  constexpr uint32_t kExponent = 1 << 23, kOne = 127 * kExponent;
  constexpr uint32_t kSign = 1u << 31;  // of the root of a negative number
  return m.least >= kOne - 100 * kExponent && root.least >= kOne - 49 * kExponent && root.largest < kSign &&
         m.largest <= kOne + 40 * kExponent && denominator_of(__uint_as_float(root.largest), s) <= 1048576.0f &&
         s.eps >= 8.67361738e-19f;
}

// A step of the 256 elements of a warp, 8 a lane, from first_of_warp on. kQuick: all are there and aligned; returns
// false, and has changed nothing, where an element is out of the quick arithmetic's range. The same bits either way.
template <bool kQuick, typename P, typename G, int kStateBits, typename Index>
__device__ __forceinline__ bool adam_part(const AdamTensor* tensors, uint32_t tensor_index, Index first_of_warp,
                                          const AdamScalars* scalars, const AdamTables* tables) {
  constexpr bool k8Bit = kStateBits == 8;
  using State = typename UintOf<kStateBits / 8>::Type;
  using Addresses = AdamAddresses<P, G, State>;
  constexpr int kStateBytes = sizeof(State), kStateWords = kChunkColumns * kStateBytes / 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const Index first = first_of_warp + static_cast<Index>(lane * kChunkColumns);
  const AdamTensor tensor = tensors[tensor_index];
  const Addresses from(tensor, first);
  const int valid =
      kQuick ? kChunkColumns : valid_columns<kChunkColumns>(static_cast<int64_t>(first), tensor.numel, false);
  const bool vector_access = kQuick || (valid == kChunkColumns && aligned_for_chunks<P, G, State>(tensor));
  Chunk<P, kChunkColumns> param_chunk;
  Chunk<G, kChunkColumns> grad_chunk;
  uint32_t m_words[kStateWords], v_words[kStateWords];
  float m_scale = 0.0f, v_scale = 0.0f;
  load_chunk<false>(param_chunk, from.param, 0, vector_access, valid);
  load_chunk<true>(grad_chunk, from.grad, 0, vector_access, valid);
  load_words<kStateBytes, kChunkColumns, false>(m_words, from.exp_avg, vector_access, valid);
  load_words<kStateBytes, kChunkColumns, false>(v_words, from.exp_avg_sq, vector_access, valid);
  if (k8Bit && valid > 0) m_scale = *from.exp_avg_scale, v_scale = *from.exp_avg_sq_scale;
  uint32_t counter = static_cast<uint32_t>(tensor.counter);
  const AdamScalars s = scalars[counter];

  float p[kChunkColumns], g[kChunkColumns], m[kChunkColumns], root[kChunkColumns];
  unpack(param_chunk, p);
  unpack(grad_chunk, g);
  if (s.grad_factor != 1.0f || s.l2 != 0.0f) {
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) {
      g[j] = __fmul_rn(g[j], s.grad_factor);
      if (s.l2 != 0.0f) g[j] = __fadd_rn(g[j], __fmul_rn(p[j], s.l2));
    }
  }
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) {
    float v;
    if constexpr (k8Bit) {
      m[j] = __fmul_rn(tables->signed_value[code_of(m_words[j / 4], j % 4)], m_scale);
      root[j] = __fmul_rn(tables->unsigned_value[code_of(v_words[j / 4], j % 4)], v_scale);
      v = __fmul_rn(root[j], root[j]);
    } else {
      m[j] = __uint_as_float(m_words[j]), v = __uint_as_float(v_words[j]);
    }
    update_moments(g[j], m[j], v, s);
    root[j] = kQuick ? quick_sqrt(v) : __fsqrt_rn(v);
    if constexpr (!k8Bit) m_words[j] = __float_as_uint(m[j]), v_words[j] = __float_as_uint(v);
  }
  forget(counter);
  const AdamScalars s_again = scalars[counter];
  if constexpr (k8Bit && !kQuick) {
    if (__any_sync(kFullWarp, valid < kChunkColumns)) {
#pragma unroll
      for (int j = 0; j < kChunkColumns; ++j) {
        if (j >= valid) m[j] = root[j] = 0.0f;
      }
    }
  }
  Magnitudes m_size, root_size;
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) m_size.add(magnitude_bits(m[j])), root_size.add(__float_as_uint(root[j]));
  bool has_zeros = false;
  if constexpr (kQuick) {
    if (__any_sync(kFullWarp, !in_quick_range(m_size, root_size, s_again))) {
      has_zeros = true;
      m_size.skip_zeros(m), root_size.skip_zeros(root);
      if (__any_sync(kFullWarp, !in_quick_range(m_size, root_size, s_again))) return false;
    }
  }
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) p[j] = updated<k8Bit, kQuick>(p[j], m[j], root[j], s_again);
  // Computed again: registers that wait for it would spill.
  forget(tensor_index);
  const Addresses to(tensors[tensor_index], first);
  store_rounded<P>(to.param, 0, p, vector_access, valid);
  if constexpr (k8Bit) {
    m_scale = adam_scale(m_size.largest), v_scale = adam_scale(root_size.largest);
    const auto inverse_of = [](float scale) {
      return scale == 0.0f ? 0.0f : kQuick ? quick_reciprocal(scale) : __frcp_rn(scale);
    };
    const float m_inverse = inverse_of(m_scale), root_inverse = inverse_of(v_scale);
    uint32_t m_code[kChunkColumns], root_code[kChunkColumns];
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) {
      m_code[j] = signed_code(*tables, m[j], m_inverse);
      root_code[j] = unsigned_code<kQuick>(*tables, root[j], root_inverse);
    }
    if (has_zeros) {
#pragma unroll
      for (int j = 0; j < kChunkColumns; ++j) root_code[j] = root[j] == 0.0f ? 0 : root_code[j];
    }
#pragma unroll
    for (int j = 0; j < kStateWords; ++j) {
      m_words[j] = pack_codes(m_code[4 * j], m_code[4 * j + 1], m_code[4 * j + 2], m_code[4 * j + 3]);
      v_words[j] = pack_codes(root_code[4 * j], root_code[4 * j + 1], root_code[4 * j + 2], root_code[4 * j + 3]);
    }
    if (lane % kAdamLanes == 0 && valid > 0) *to.exp_avg_scale = m_scale, *to.exp_avg_sq_scale = v_scale;
  }
  store_words<kStateBytes, kChunkColumns>(to.exp_avg, m_words, vector_access, valid);
  store_words<kStateBytes, kChunkColumns>(to.exp_avg_sq, v_words, vector_access, valid);
  return true;
}

template <typename P, typename G, int kStateBits>
__global__ void __launch_bounds__(kAdamThreads, kAdamBlocks)
    adam_step_kernel(const AdamTensor* tensors, const AdamChunk* chunks, uint32_t n_chunks,
                     const AdamScalars* scalars) {
  using State = typename UintOf<kStateBits / 8>::Type;
  if (scalars[0].skip != 0.0f) return;  // of every counter alike
  const AdamTables* tables = nullptr;
  if constexpr (kStateBits == 8) tables = &shared_adam_tables<kAdamThreads>();
  // The part of a chunk that this warp takes; another in every chunk, so that parameters of a few elements find all
  // warps at work.
  constexpr int kPart = kWarpThreads * kChunkColumns;
  int part = static_cast<int>(threadIdx.x) / kWarpThreads;
  for (uint32_t i = blockIdx.x; i < n_chunks; i += gridDim.x, part = (part + 1) % kAdamWarps) {
    const AdamChunk chunk = chunks[i];
    const uint32_t tensor_index = static_cast<uint32_t>(chunk.tensor);
    const AdamTensor& tensor = tensors[tensor_index];
    const int64_t numel = tensor.numel, first = chunk.first + part * kPart;
    if (first >= numel) continue;
    const bool whole = first + kPart <= numel && numel <= 0xFFFFFFFF && aligned_for_chunks<P, G, State>(tensor);
    const auto quick_first = static_cast<uint32_t>(first);
    if (!(whole && adam_part<true, P, G, kStateBits>(tensors, tensor_index, quick_first, scalars, tables))) {
      adam_part<false, P, G, kStateBits>(tensors, tensor_index, first, scalars, tables);
    }
  }
}

}  // namespace onetrip
