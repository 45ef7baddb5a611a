// One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019) over the chunks of all parameters of a kind;
// the formulas are those of launch.h and of the reference, every float32 operation rounded by itself.
//
// adam_prepare_kernel: a thread counts the step of one counter and computes its AdamScalars.
// adam_step_kernel: as many blocks as run at once share the chunks of 4096 elements out, in runs of chunks next to each
// other. A warp takes a 16th of each chunk, its threads 8 elements each: consecutive ones, or (whole parts with
// 32-bit tensors, kAdamApart) two halves as in vec.cuh, so that 128-bit accesses touch whole sectors. 16 lanes are a
// block of 128 elements, and find its largest magnitudes together. The warps never wait for each other.
//
// Where memory is fast the arithmetic is the limit: 8-bit steps of bfloat16 take about 58 instructions an element. So
// parts that are whole, aligned and of ordinary sizes are taken without a branch between two elements, roots and
// quotients side by side, and what a warp's lanes have in common lies in registers of the warp; any other part goes a
// longer way, to the same bits.
//
// kOtherRounding: parameters of 16 bits keep a residual, or are rounded stochastically (adam_rounding.cuh); which of
// these is known at run time. Of bfloat16 and 8-bit states, instructions an element: 63 with int16 residuals, 66 with
// int8 ones, 65 with random bits.
//
// Moves, of a float32 parameter and gradient, 12 + 2 * (2 + 8/128) = 16.1 bytes an element (8-bit), or 28 (32-bit); of
// 16-bit ones 10.1, or 22. A residual is read and written: 2 or 4 bytes more.
#pragma once
#include "adam_rounding.cuh"
#include "adam_tables.cuh"
#include "launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace onetrip {

constexpr int kAdamThreads = kAdamChunk / kChunkColumns;
constexpr int kAdamWarps = kAdamThreads / kWarpThreads;
constexpr int kAdamLanes = kAdamBlock / kChunkColumns;   // that share a scale
constexpr int kAdamBlocks = 2;                           // an SM: what 64 registers allow
constexpr int kAdamPart = kWarpThreads * kChunkColumns;  // of a chunk, which a warp takes
static_assert(kWarpThreads == 2 * kAdamLanes, "the scales of a warp");

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
template <typename P, typename G, typename State, bool kOtherRounding>
struct AdamAddresses {
  P* param;
  const G* grad;
  State *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
  RestPlace<kOtherRounding> rest;

  __device__ __forceinline__ AdamAddresses(const AdamTensor& tensor, int64_t first, AdamRounding rounding)
      : param(global_pointer<P>(tensor.param, first)),
        grad(global_pointer<const G>(tensor.grad, first)),
        exp_avg(global_pointer<State>(tensor.exp_avg, first)),
        exp_avg_sq(global_pointer<State>(tensor.exp_avg_sq, first)),
        exp_avg_scale(scale_of(tensor.exp_avg_scale, first)),
        exp_avg_sq_scale(scale_of(tensor.exp_avg_sq_scale, first)),
        rest(tensor, first, rounding) {}

  // To the same place of the next chunk. unit: of advance_by.
  __device__ __forceinline__ void advance(uint32_t unit) {
    advance_by<kAdamChunk>(param, unit), advance_by<kAdamChunk>(grad, unit);
    advance_by<kAdamChunk>(exp_avg, unit), advance_by<kAdamChunk>(exp_avg_sq, unit);
    if (sizeof(State) == 1) {
      advance_by<kAdamChunk / kAdamBlock>(exp_avg_scale, unit);
      advance_by<kAdamChunk / kAdamBlock>(exp_avg_sq_scale, unit);
    }
    rest.advance();
  }
  __device__ __forceinline__ const AdamAddresses& addresses() const { return *this; }

 private:
  __device__ __forceinline__ static float* scale_of(int64_t scales, int64_t first) {
    static_assert(kAdamBlock == 1 << 7, "rounded down: a place before the first element has a block, too");
    return sizeof(State) == 1 ? global_pointer<float>(scales, first >> 7) : nullptr;
  }
};

// Whether chunks of 8 elements of a tensor, from its first on, can be read and written 16 bytes at a time, or as one.
template <typename P, typename G, typename State, bool kOtherRounding>
__device__ __forceinline__ bool aligned_for_chunks(const AdamTensor& tensor, AdamRounding rounding) {
  if (kOtherRounding && !residuals_aligned(tensor, rounding)) return false;
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

// Which parts a variant of the code is for. All give the same bits.
enum class AdamSizes {
  kAny,
  kQuick,     // whole and aligned, moments for which the quick arithmetic of platform.cuh is right, or 0
  kOrdinary,  // the same, and none of them so small beside the largest of its block that it gets the code of 0
};

// The scale of a block of which every lane has its largest magnitude, as bits: NaN is larger than any number.
template <AdamSizes kSizes>
__device__ __forceinline__ float adam_scale(uint32_t magnitude) {
  const float scale = __uint_as_float(half_warp_max(magnitude));
  return kSizes != AdamSizes::kOrdinary && scale < kSmallestAdamScale ? 0.0f : scale;
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The least and largest magnitude of a thread's numbers, as bits: NaN is larger than any number.
struct Magnitudes {
  uint32_t least = ~0u, largest = 0;

  // kQuick leaves zeros out of the least, which is the next smaller number then.
  template <AdamSizes kSizes>
  __device__ __forceinline__ void add(uint32_t bits) {
    least = min(least, kSizes == AdamSizes::kQuick ? bits - 1 : bits);  // 0 becomes the largest
    largest = max(largest, bits);
  }
};

// Whether the quick arithmetic is right for moments of these sizes: no smaller than 2^-100, as v, the square of the
// root, is for roots of 2^-49; not so large that the update could overflow. The root of a negative number has a sign.
__device__ __forceinline__ bool in_quick_range(const Magnitudes& m, const Magnitudes& root) {
  constexpr uint32_t kExponent = 1 << 23, kOne = 127 * kExponent;
  return m.least >= kOne - 100 * kExponent && root.least >= kOne - 49 * kExponent &&
         m.largest <= kOne + 40 * kExponent && root.largest <= kOne + 10 * kExponent;
}
// Whether it is, for such moments: the denominator lies in 2^-60 ... 2^20, the quotient below 2^120.
__device__ __forceinline__ bool in_quick_range(const AdamScalars& s) {
  return s.inv_bias_correction1 <= 1048576.0f && s.inv_sqrt_bias_correction2 <= 512.0f && s.eps >= 8.67361738e-19f &&
         s.eps <= 1024.0f;
}

// Whether no magnitude of a thread gets the code of 0, with a hundredth to spare for the rounding of 1 / scale.
template <typename Buckets>
__device__ __forceinline__ bool all_have_codes(const Magnitudes& size, float scale) {
  return __uint_as_float(size.least) >= __fmul_rn(scale, 1.01f * Buckets::map.threshold[1]);
}

// Where 8 elements lie, computed from memory each time that it is asked for: registers that wait for it would spill.
template <typename P, typename G, typename State, bool kOtherRounding>
struct AdamPlace {
  const AdamTensor* tensors;
  uint32_t index;
  int64_t first;
  AdamRounding rounding;
  __device__ __forceinline__ AdamAddresses<P, G, State, kOtherRounding> addresses() const {
    uint32_t i = index;
    compiler_barrier(i);
    return {tensors[i], first, rounding};
  }
};

// What a step multiplies with, in registers of the warp, or loaded from memory each time.
struct HeldScalars {
  AdamScalars scalars;
  __device__ __forceinline__ const AdamScalars& now() const { return scalars; }
};
struct ScalarsInMemory {
  const AdamScalars* scalars;
  uint32_t counter;
  __device__ __forceinline__ AdamScalars now() const {
    uint32_t i = counter;
    compiler_barrier(i);
    return scalars[i];
  }
};

// Whether a warp whose part is whole takes it as vec.cuh's rows of float32: whole sectors with every access. The 16
// lanes that share a scale are the same.
template <AdamSizes kSizes, typename P, typename G, int kStateBits>
constexpr bool kAdamApart = kSizes != AdamSizes::kAny && (kHalvesApart<P> || kHalvesApart<G> || kStateBits == 32);

// A step of the 256 elements of a warp, 8 a lane. Place: AdamAddresses or AdamPlace. valid: of the 8. Returns false,
// and has changed nothing, where a moment is not of kSizes, or a bfloat16 of kOtherRounding would not be finite.
template <AdamSizes kSizes, typename P, typename G, int kStateBits, bool kOtherRounding, typename Place,
          typename Scalars>
__device__ __forceinline__ bool adam_part(const Place& place, bool vector_access, int valid, const Scalars& scalars,
                                          const SharedWords& tables) {
  constexpr bool k8Bit = kStateBits == 8, kQuick = kSizes != AdamSizes::kAny;
  constexpr bool kOrdinary = kSizes == AdamSizes::kOrdinary, kApart = kAdamApart<kSizes, P, G, kStateBits>;
  constexpr bool kJoinFirst = kOtherRounding && !kQuick;  // before the other loads: registers would spill
  using State = typename UintOf<kStateBits / 8>::Type;
  constexpr int kStateBytes = sizeof(State), kStateWords = kChunkColumns * kStateBytes / 4;
  const auto& from = place.addresses();
  const auto& s = scalars.now();
  if (kOtherRounding && kSizes == AdamSizes::kQuick && s.l2 != 0.0f) return false;  // would spill, too
  Chunk<P, kChunkColumns> param_chunk;
  Chunk<G, kChunkColumns> grad_chunk;
  uint32_t m_words[kStateWords], v_words[kStateWords];
  float m_scale = 0.0f, v_scale = 0.0f;
  [[maybe_unused]] uint32_t residuals[kPairs];
  load_chunk<kApart, false>(param_chunk, from.param, 0, vector_access, valid);
  if constexpr (kOtherRounding && kOrdinary) {
    load_residuals<kApart>(residuals, place_of_thread<true, kApart>(from.rest), vector_access, valid);
  }
  const auto load_others = [&] {
    load_chunk<kApart, true>(grad_chunk, from.grad, 0, vector_access, valid);
    load_words<kStateBytes, kChunkColumns, false, kApart>(m_words, from.exp_avg, vector_access, valid);
    load_words<kStateBytes, kChunkColumns, false, kApart>(v_words, from.exp_avg_sq, vector_access, valid);
  };
  if constexpr (!kJoinFirst) load_others();
  if (k8Bit && valid > 0) m_scale = *from.exp_avg_scale, v_scale = *from.exp_avg_sq_scale;

  float p[kChunkColumns], g[kChunkColumns], m[kChunkColumns], root[kChunkColumns];
  unpack(param_chunk, p);
  if constexpr (kOtherRounding && kOrdinary) join<false>(param_chunk, residuals, from.rest.rounding, p);
  if constexpr (kJoinFirst) {
    if (s.l2 != 0.0f) {
      const auto& rest = place.addresses().rest;
      load_residuals<kApart>(residuals, rest, vector_access, valid);
      join<true>(param_chunk, residuals, rest.rounding, p);
    }
    load_others();
  }
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
      m[j] = __fmul_rn(__uint_as_float(tables.at_byte<kSignedValues>(m_words[j / 4], j % 4)), m_scale);
      root[j] = __fmul_rn(__uint_as_float(tables.at_byte<kUnsignedValues>(v_words[j / 4], j % 4)), v_scale);
      v = __fmul_rn(root[j], root[j]);
    } else {
      m[j] = __uint_as_float(m_words[j]), v = __uint_as_float(v_words[j]);
    }
    update_moments(g[j], m[j], v, s);
    root[j] = kQuick ? quick_sqrt<!kOrdinary>(v) : __fsqrt_rn(v);
    if constexpr (!k8Bit) m_words[j] = __float_as_uint(m[j]), v_words[j] = __float_as_uint(v);
  }
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
  for (int j = 0; j < kChunkColumns; ++j) {
    m_size.add<kSizes>(magnitude_bits(m[j])), root_size.add<kSizes>(__float_as_uint(root[j]));
  }
  if constexpr (k8Bit) m_scale = adam_scale<kSizes>(m_size.largest), v_scale = adam_scale<kSizes>(root_size.largest);
  if constexpr (kQuick) {
    bool right = in_quick_range(m_size, root_size);
    if (k8Bit && kOrdinary) {
      right = right && all_have_codes<SignedBuckets>(m_size, m_scale) &&
              all_have_codes<UnsignedBuckets>(root_size, v_scale);
    }
    if (__any_sync(kFullWarp, !right)) return false;
  }
  const auto& s_again = scalars.now();
  const auto& to = place.addresses();
  if constexpr (!kOrdinary) {  // read once more: registers that wait for it would spill
    load_chunk<kApart, false>(param_chunk, to.param, 0, vector_access, valid);
    unpack(param_chunk, p);
    if constexpr (kOtherRounding) {
      load_residuals<kApart>(residuals, to.rest, vector_access, valid);
      join<!kQuick>(param_chunk, residuals, to.rest.rounding, p);
    }
  }
#pragma unroll
  for (int j = 0; j < kChunkColumns; ++j) p[j] = updated<k8Bit, kQuick>(p[j], m[j], root[j], s_again);
  if constexpr (kOtherRounding) {
    if constexpr (DTypeOf<P>::value == DType::kBFloat16) {
      if constexpr (!kQuick) settle_infinite(p, to.rest.rounding);
      if (kQuick && __any_sync(kFullWarp, !all_finite(p))) return false;
    }
  } else {
    store_rounded<P, kApart>(to.param, 0, p, vector_access, valid);
  }
  if constexpr (k8Bit) {
    const auto inverse_of = [](float scale) {
      return !kOrdinary && scale == 0.0f ? 0.0f : kQuick ? quick_reciprocal(scale) : __frcp_rn(scale);
    };
    const float m_inverse = inverse_of(m_scale), root_inverse = inverse_of(v_scale);
    uint32_t m_code[kChunkColumns], root_code[kChunkColumns];
#pragma unroll
    for (int j = 0; j < kChunkColumns; ++j) {
      m_code[j] = signed_code<kOrdinary>(tables, m[j], m_inverse);
      root_code[j] = unsigned_code<kOrdinary>(tables, root[j], root_inverse);
    }
#pragma unroll
    for (int j = 0; j < kStateWords; ++j) {
      m_words[j] = pack_bytes<2>(m_code[4 * j], m_code[4 * j + 1], m_code[4 * j + 2], m_code[4 * j + 3]);
      v_words[j] = pack_bytes<2>(root_code[4 * j], root_code[4 * j + 1], root_code[4 * j + 2], root_code[4 * j + 3]);
    }
    if (threadIdx.x % kAdamLanes == 0 && valid > 0) *to.exp_avg_scale = m_scale, *to.exp_avg_sq_scale = v_scale;
  }
  store_words<kStateBytes, kChunkColumns, kApart>(to.exp_avg, m_words, vector_access, valid);
  store_words<kStateBytes, kChunkColumns, kApart>(to.exp_avg_sq, v_words, vector_access, valid);
  if constexpr (kOtherRounding) {                               // last, when moments hold no registers
    const auto last = kWarpRegisters ? to : place.addresses();  // once more on sm_70 and sm_75: keys would spill
    const auto& rest = place_of_thread<kOrdinary, kApart>(last.rest);
    store_masters<kApart>(last.param, rest, scalars.now().step, p, vector_access, valid);
  }
  return true;
}

// Which element of each chunk of a tensor is the first of a thread's. A warp takes another part of each tensor's, so
// that tensors of a few elements find all warps at work.
template <bool kApart>
__device__ __forceinline__ uint32_t place_in_chunk(uint32_t tensor_index) {
  const auto first = static_cast<uint32_t>(first_column<kApart>(static_cast<int>(threadIdx.x)));
  return (first + tensor_index * kAdamPart) % kAdamChunk;
}

// rounding: read where kOtherRounding; else kNearest.
template <typename P, typename G, int kStateBits, bool kOtherRounding>
__global__ void __launch_bounds__(kAdamThreads, kAdamBlocks)
    adam_step_kernel(const AdamTensor* tensors, const AdamChunk* chunks, uint32_t n_chunks, const AdamScalars* scalars,
                     AdamRounding rounding) {
  using State = typename UintOf<kStateBits / 8>::Type;
  if (scalars[0].step == 0.0f) return;  // of every counter alike
  const SharedWords tables(kStateBits == 8 ? shared_adam_tables<kAdamThreads>() : nullptr);
  [[maybe_unused]] const uint32_t unit = uniform_register(kAdvanceUnit);
  const uint32_t share = n_chunks / gridDim.x, n_larger = n_chunks % gridDim.x;
  uint32_t i = uniform_register(blockIdx.x * share + min(blockIdx.x, n_larger));
  const uint32_t end = uniform_register(i + share + (blockIdx.x < n_larger ? 1 : 0));
  for (; i < end; ++i) {
    const AdamChunk chunk = uniform_register(chunks + i);
    const auto index = static_cast<uint32_t>(chunk.tensor);
    const AdamTensor tensor = tensors[index];
    const auto counter = uniform_register(static_cast<uint32_t>(tensor.counter));
    const bool quick =
        aligned_for_chunks<P, G, State, kOtherRounding>(tensor, rounding) && in_quick_range(scalars[counter]);
    uint32_t quick_end = uniform_register(quick ? end : i);
    if constexpr (kWarpRegisters && kStateBits == 8) {
      // On through the chunks of this tensor as long as the parts are ordinary.
      const int64_t left = tensor.numel - chunk.first;
      const auto chunks_until = [&](int64_t n) {
        const int64_t n_left = (n + kAdamChunk - 1) / kAdamChunk;
        return uniform_register(i + static_cast<uint32_t>(min(n_left, int64_t{end - i})));
      };
      constexpr bool kApart = kAdamApart<AdamSizes::kOrdinary, P, G, kStateBits>;
      const uint32_t part = uniform_register(place_in_chunk<kApart>(index) / kAdamPart) * kAdamPart,
                     last = chunks_until(left);
      quick_end = uniform_register(min(quick_end, chunks_until(left - part - (kAdamPart - 1))));
      const HeldScalars held{uniform_register(scalars + counter)};
      AdamAddresses<P, G, State, kOtherRounding> addresses(
          tensor, chunk.first - kAdamChunk + part + first_column<kApart>(static_cast<int>(threadIdx.x % kWarpThreads)),
          rounding);
      const auto take_ordinary = [&] {
        for (; i < quick_end; ++i) {
          addresses.advance(unit);
          if (!adam_part<AdamSizes::kOrdinary, P, G, kStateBits, kOtherRounding>(addresses, true, kChunkColumns, held,
                                                                                 tables))
            break;
        }
      };
      if constexpr (kOtherRounding) {  // a loop for each rounding: branches in one would take registers
        const auto take_rounding = [&](AdamRounding known) {
          if (rounding != known) return;
          addresses.rest = {tensor, chunk.first - kAdamChunk + part, known};
          addresses.rest.hold();
          take_ordinary();
        };
        take_rounding(AdamRounding::kResidual8);
        take_rounding(AdamRounding::kResidual16);
        if constexpr (DTypeOf<P>::value == DType::kBFloat16) take_rounding(AdamRounding::kStochastic);
      } else {
        take_ordinary();
      }
      if (i >= last) {
        --i;  // the loop goes on to `last`
        continue;
      }
    }
    if (i < quick_end) {
      constexpr bool kApart = kAdamApart<AdamSizes::kQuick, P, G, kStateBits>;
      const AdamPlace<P, G, State, kOtherRounding> place{tensors, index,
                                                         chunks[i].first + place_in_chunk<kApart>(index), rounding};
      const ScalarsInMemory in_memory{scalars, counter};
      const int64_t left = tensors[index].numel - place.first;
      if (!__any_sync(kFullWarp, left <= column_of<kApart>(kChunkColumns - 1)) &&
          adam_part<AdamSizes::kQuick, P, G, kStateBits, kOtherRounding>(place, true, kChunkColumns, in_memory, tables))
        continue;
    }
    uint32_t again = i;  // what follows from it is cheaper read again than held in registers
    compiler_barrier(again);
    const auto tensor_index = static_cast<uint32_t>(chunks[again].tensor);
    const AdamPlace<P, G, State, kOtherRounding> place{
        tensors, tensor_index, chunks[again].first + place_in_chunk<false>(tensor_index), rounding};
    const int valid = valid_columns<false>(place.first, tensors[tensor_index].numel, false);
    if (!__any_sync(kFullWarp, valid > 0)) continue;
    const ScalarsInMemory in_memory{scalars, static_cast<uint32_t>(tensors[tensor_index].counter)};
    const bool vector_access =
        valid == kChunkColumns && aligned_for_chunks<P, G, State, kOtherRounding>(tensors[tensor_index], rounding);
    adam_part<AdamSizes::kAny, P, G, kStateBits, kOtherRounding>(place, vector_access, valid, in_memory, tables);
  }
}

// The sum of the squares of each chunk's gradient, where gradients are clipped. In float64, where the square of a
// float32 is exact. Blocks take every gridDim.x-th chunk, a thread every kAdamThreads-th element of one. Moves
// sizeof(G) bytes an element.
template <typename G>
__global__ void __launch_bounds__(kAdamThreads)
    adam_squares_kernel(const AdamTensor* tensors, const AdamChunk* chunks, uint32_t n_chunks, double* sums) {
  ONETRIP_SHARED(double, sums_of_warps, kAdamWarps);
  for (uint32_t i = blockIdx.x; i < n_chunks; i += gridDim.x) {
    const AdamChunk chunk = chunks[i];
    const AdamTensor& tensor = tensors[chunk.tensor];
    const G* const grad = global_pointer<const G>(tensor.grad, chunk.first);
    const int n = static_cast<int>(min(tensor.numel - chunk.first, int64_t{kAdamChunk}));
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < kAdamChunk; j += kAdamThreads) {
      const int at = j + static_cast<int>(threadIdx.x);
      const double g = at < n ? static_cast<float>(grad[at]) : 0.0f;
      sum += g * g;
    }
    sum = warp_sum<kWarpThreads>(sum);
    if (threadIdx.x % kWarpThreads == 0) sums_of_warps[threadIdx.x / kWarpThreads] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kAdamWarps; ++warp) sum += sums_of_warps[warp];
      sums[i] = sum;
    }
    __syncthreads();
  }
}

}  // namespace onetrip
