// One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) over the chunks of all parameters of a kind;
// the formulas are those of launch.h and of the reference, every float32 operation rounded by itself.
//
// adam_prepare_kernel: a thread counts the step of one counter and computes its AdamScalars.
// adam_step_kernel: as many blocks as run at once take the chunks of 4096 elements in turn. A thread takes 8
// consecutive elements: 128-bit accesses of parameter and gradient; 16 lanes are a block of 128 elements, and find its
// largest magnitudes by shuffles. The warps of a block never wait for each other.
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

template <typename T>
__device__ __forceinline__ bool aligned_for_chunks(const T* address) {
  constexpr int kBytes = kChunkColumns * sizeof(T);
  return reinterpret_cast<uintptr_t>(address) % (kBytes < 16 ? kBytes : 16) == 0;
}

// Where element `first` of a tensor lies, and the scales of its block.
template <typename P, typename G, typename State>
struct AdamAddresses {
  P* param;
  const G* grad;
  State *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;

  __device__ __forceinline__ AdamAddresses(const AdamTensor& tensor, int64_t first)
      : param(global_pointer<P>(tensor.param, first)),
        grad(global_pointer<const G>(tensor.grad, first)),
        exp_avg(global_pointer<State>(tensor.exp_avg, first)),
        exp_avg_sq(global_pointer<State>(tensor.exp_avg_sq, first)),
        exp_avg_scale(scale_of(tensor.exp_avg_scale, first)),
        exp_avg_sq_scale(scale_of(tensor.exp_avg_sq_scale, first)) {}

  __device__ __forceinline__ bool aligned() const {
    return aligned_for_chunks(param) && aligned_for_chunks(grad) && aligned_for_chunks(exp_avg) &&
           aligned_for_chunks(exp_avg_sq);
  }

 private:
  __device__ __forceinline__ static float* scale_of(int64_t scales, int64_t first) {
    return sizeof(State) == 1 ? global_pointer<float>(scales, first / kAdamBlock) : nullptr;
  }
};

// m and v become those of this step.
__device__ __forceinline__ void update_moments(float g, float& m, float& v, const AdamScalars& s) {
  m = __fadd_rn(m, __fmul_rn(__fadd_rn(g, -m), s.one_minus_beta1));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(__fmul_rn(g, s.one_minus_beta2), g));
}

// The new parameter, before it is rounded. root: sqrt(v).
template <bool kClamp>
__device__ __forceinline__ float updated(float p, float m, float root, const AdamScalars& s) {
  float u =
      __fdiv_rn(__fmul_rn(m, s.inv_bias_correction1), __fadd_rn(__fmul_rn(root, s.inv_sqrt_bias_correction2), s.eps));
  if (kClamp && fabsf(u) > s.largest_update) u = copysignf(s.largest_update, u);  // NaN stays
  return __fadd_rn(__fmul_rn(p, s.decay), -__fmul_rn(u, s.lr));
}

// The scale of a block of which every lane has its largest magnitude, as bits: NaN is larger than any number.
__device__ __forceinline__ float adam_scale(uint32_t magnitude) {
  const float scale = __uint_as_float(group_max<kAdamLanes>(magnitude));
  return scale < kSmallestAdamScale ? 0.0f : scale;
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

template <typename P, typename G, int kStateBits>
__global__ void __launch_bounds__(kAdamThreads, kAdamBlocks)
    adam_step_kernel(const AdamTensor* tensors, const AdamChunk* chunks, int64_t n_chunks, const AdamScalars* scalars) {
  constexpr bool k8Bit = kStateBits == 8;
  using State = typename UintOf<kStateBits / 8>::Type;
  using Addresses = AdamAddresses<P, G, State>;
  constexpr int kStateBytes = sizeof(State), kStateWords = kChunkColumns * kStateBytes / 4;
  const AdamTables* tables = nullptr;
  if constexpr (k8Bit) tables = &shared_adam_tables<kAdamThreads>();
  // The part of a chunk that this warp takes; another in every chunk, so that parameters of a few elements find all
  // warps at work.
  int part = static_cast<int>(threadIdx.x) / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int64_t i = first_row_of_block(1); i < n_chunks; i += gridDim.x, part = (part + 1) % kAdamWarps) {
    const AdamChunk chunk = chunks[i];
    const AdamTensor tensor = tensors[chunk.tensor];
    const int64_t first_of_warp = chunk.first + part * (kWarpThreads * kChunkColumns);
    if (first_of_warp >= tensor.numel) continue;
    const int64_t first = first_of_warp + lane * kChunkColumns;
    const int valid = valid_columns<kChunkColumns>(first, tensor.numel, false);
    const Addresses from(tensor, first);
    const bool vector_access = valid == kChunkColumns && from.aligned();
    Chunk<P, kChunkColumns> param_chunk;
    Chunk<G, kChunkColumns> grad_chunk;
    uint32_t m_words[kStateWords], v_words[kStateWords];
    float m_scale = 0.0f, v_scale = 0.0f;
    load_chunk<false>(param_chunk, from.param, 0, vector_access, valid);
    load_chunk<true>(grad_chunk, from.grad, 0, vector_access, valid);
    load_words<kStateBytes, kChunkColumns, false>(m_words, from.exp_avg, vector_access, valid);
    load_words<kStateBytes, kChunkColumns, false>(v_words, from.exp_avg_sq, vector_access, valid);
    if (k8Bit && valid > 0) m_scale = *from.exp_avg_scale, v_scale = *from.exp_avg_sq_scale;
    int counter = static_cast<int>(tensor.counter);
    const AdamScalars s = scalars[counter];
    if (s.skip != 0.0f) return;  // of every counter alike

    float p[kChunkColumns], g[kChunkColumns], m[kChunkColumns], root[kChunkColumns];
    unpack(param_chunk, p);
    unpack(grad_chunk, g);
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) g[j] = __fmul_rn(g[j], s.grad_factor);
    if (s.l2 != 0.0f) {
#pragma unroll
      for (int j = 0; j < kChunkColumns; ++j) g[j] = __fadd_rn(g[j], __fmul_rn(p[j], s.l2));
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
      root[j] = __fsqrt_rn(v);
      if constexpr (!k8Bit) m_words[j] = __float_as_uint(m[j]), v_words[j] = __float_as_uint(v);
    }
    forget(counter);
    const AdamScalars s_again = scalars[counter];
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) p[j] = updated<k8Bit>(p[j], m[j], root[j], s_again);
    // Computed again: registers that wait for it would spill.
    int tensor_index = static_cast<int>(chunk.tensor);
    forget(tensor_index);
    const Addresses to(tensors[tensor_index], first);
    store_rounded<P>(to.param, 0, p, vector_access, valid);
    if constexpr (k8Bit) {
      if (__any_sync(kFullWarp, valid < kChunkColumns)) {
#pragma unroll
        for (int j = 0; j < kChunkColumns; ++j) {
          if (j >= valid) m[j] = root[j] = 0.0f;
        }
      }
      uint32_t m_largest = 0, root_largest = 0;
#pragma unroll
      for (int j = 0; j < kChunkColumns; ++j) {
        m_largest = max(m_largest, magnitude_bits(m[j]));
        root_largest = max(root_largest, magnitude_bits(root[j]));
      }
      m_scale = adam_scale(m_largest), v_scale = adam_scale(root_largest);
      const float m_inverse = m_scale == 0.0f ? 0.0f : __frcp_rn(m_scale);
      const float root_inverse = v_scale == 0.0f ? 0.0f : __frcp_rn(v_scale);
      uint32_t m_code[kChunkColumns], root_code[kChunkColumns];
#pragma unroll
      for (int j = 0; j < kChunkColumns; ++j) {
        m_code[j] = signed_code(*tables, m[j], m_inverse);
        root_code[j] = unsigned_code(*tables, root[j], root_inverse);
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
  }
}

}  // namespace onetrip
