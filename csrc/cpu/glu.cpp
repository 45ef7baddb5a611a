// y = dropout(act(gate) * up),  or y = dropout(act(gate + bias)): element-wise over rows, and the gradients.
//
// A task takes a range of the elements in row order; matrices without gaps and without a bias count as one long row.
// Memory sees each input read once and each output written once: backward computes the activation again.
// The clamped form (OpenAI's gpt-oss, 2025) has kernels of its own; so have interleaved gate and up.
// The gradient of the bias is summed on the way: rows are cut into parts, a function of the sizes alone
// (row_partition), each part has a slot of the workspace that stays in its thread's cache, and the slots are added in
// order: no bit of a result depends on the number of threads or on which took what.
#include <type_traits>

#include "dropout.h"
#include "levels.h"
#include "math.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// Elements of a task: some 8 tasks a thread, so that the last ones end together.
inline int64_t task_elements(int64_t n) {
  return round_up(clamp(n / (8 * thread_count()), kTaskElements, 16 * kTaskElements), 64);
}

// Calls body(row, begin, end) for the columns of each row that elements [first, last) fall on.
template <class Body>
ONETRIP_INLINE void for_rows(int64_t n_cols, int64_t first, int64_t last, Body body) {
  for (int64_t row = first / n_cols, begin = first % n_cols; first < last; ++row, begin = 0) {
    const int64_t end = smaller(n_cols, begin + last - first);
    body(row, begin, end);
    first += end - begin;
  }
}

// One function for all kernels: inlined into each it is most of their code.
__attribute__((noinline)) const uint16_t* draw_row(DropoutMask& mask, int64_t row, int64_t begin, int64_t end,
                                                   int64_t n_cols) {
  mask.fill(row, 1, begin, end, n_cols);
  return mask.row(0);
}

// Calls body(begin, end, bits) for pieces of the columns [begin, end) of a row, with 16 random bits for each column.
template <bool kDrops, class Body>
ONETRIP_INLINE void for_draws(DropoutMask& mask, int64_t row, int64_t begin, int64_t end, int64_t n_cols, Body body) {
  if constexpr (!kDrops) return body(begin, end, static_cast<const uint16_t*>(nullptr));
  for (int64_t next; begin < end; begin = next) {
    next = smaller(end, begin + DropoutMask::kColumns);
    body(begin, next, draw_row(mask, row, begin, next, n_cols));
  }
}

// Neighbouring columns, where the even ones belong to one matrix and the odd ones to another; for addresses.
template <class T>
struct Neighbours {
  T even, odd;
};

// A vector of each.
ONETRIP_INLINE Pair load_pairs(const float* from, All) {
#if defined(__AVX512F__)
  const __m512 a = _mm512_loadu_ps(from), b = _mm512_loadu_ps(from + 16);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {(F)_mm512_permutex2var_ps(a, even, b), (F)_mm512_permutex2var_ps(a, odd, b)};
#elif defined(__AVX2__)
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + 8);
  constexpr int kInOrder = 0xD8;  // a, a, b, b: of each half of a register a and b came in turn
  const auto in_order = [](__m256 v) {
    return (F)_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(v), kInOrder));
  };
  return {in_order(_mm256_shuffle_ps(a, b, 0x88)), in_order(_mm256_shuffle_ps(a, b, 0xDD))};
#elif defined(__SSE2__)
  const __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + 4);
  return {(F)_mm_shuffle_ps(a, b, 0x88), (F)_mm_shuffle_ps(a, b, 0xDD)};
#else
  Pair v;
  for (int i = 0; i < kWidth; ++i) v.even[i] = from[2 * i], v.odd[i] = from[2 * i + 1];
  return v;
#endif
}
ONETRIP_INLINE Pair load_pairs(const BFloat16* from, All) { return load(from, Both{}); }
ONETRIP_INLINE Pair load_pairs(const Float16* from, All) {
  U bits;
  memcpy(&bits, from, sizeof bits);
  return {widen(__builtin_convertvector(bits & 0xFFFFu, H), Float16{}),
          widen(__builtin_convertvector(bits >> 16, H), Float16{})};
}

// Stores both rounded to T, see store_rounded. NaN: see that of Both.
ONETRIP_INLINE void store_pairs(float* to, Pair v, All, bool streams) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const F first = (F)_mm512_permutex2var_ps((__m512)v.even, low, (__m512)v.odd);
  const F second = (F)_mm512_permutex2var_ps((__m512)v.even, high, (__m512)v.odd);
#elif defined(__AVX2__)
  const __m256 low = _mm256_unpacklo_ps((__m256)v.even, (__m256)v.odd);
  const __m256 high = _mm256_unpackhi_ps((__m256)v.even, (__m256)v.odd);
  const F first = (F)_mm256_permute2f128_ps(low, high, 0x20), second = (F)_mm256_permute2f128_ps(low, high, 0x31);
#elif defined(__SSE2__)
  const F first = (F)_mm_unpacklo_ps((__m128)v.even, (__m128)v.odd);
  const F second = (F)_mm_unpackhi_ps((__m128)v.even, (__m128)v.odd);
#else
  F both[2];
  for (int i = 0; i < 2 * kWidth; ++i) both[i / kWidth][i % kWidth] = i % 2 ? v.odd[i / 2] : v.even[i / 2];
  const F first = both[0], second = both[1];
#endif
  store_rounded(present(to), first, All{}, streams);
  store_rounded(present(to + kWidth), second, All{}, streams);
}
ONETRIP_INLINE void store_pairs(BFloat16* to, Pair v, All, bool streams) { store_rounded(to, v, Both{}, streams); }
ONETRIP_INLINE void store_pairs(Float16* to, Pair v, All, bool streams) {
  const U even = __builtin_convertvector(narrow(v.even, Float16{}), U);
  const U odd = __builtin_convertvector(narrow(v.odd, Float16{}), U);
  const U bits = even | odd << 16;
  store_rounded(reinterpret_cast<float*>(to), (F)bits, All{}, streams);
}

// The end of a row.
template <class T>
ONETRIP_INLINE Pair load_pairs(const T* from, First lanes) {
  T values[2 * kWidth] = {};
  memcpy(values, from, 2 * lanes.n * sizeof(T));
  return load_pairs(values, All{});
}
template <class T>
ONETRIP_INLINE void store_pairs(T* to, Pair v, First lanes, bool) {
  T values[2 * kWidth];
  store_pairs(values, v, All{}, false);
  memcpy(to, values, 2 * lanes.n * sizeof(T));
}

// An activation as the kernels call it: with what is done to up, and which gradients pass.
template <class Act>
struct Formula : Act {
  explicit Formula(const ClampedGlu&) {}
  static ONETRIP_INLINE F factor(F up) { return up; }
  static ONETRIP_INLINE F gradient_of_gate(F gate, F gradient) {
    // An infinite up or dy times the slope 0 is NaN. Torch's relu gives 0.
    if constexpr (std::is_same_v<Act, Relu2>) return (F)((U)gradient & ~(U)(gate <= 0.0f));
    return gradient;
  }
  static ONETRIP_INLINE F gradient_of_up(F, F gradient) { return gradient; }
};

// Bounds as torch.clamp's: NaN stays, and gradients pass where a value is inside, bounds included.
struct ClampedSilu {};
template <>
struct Formula<ClampedSilu> {
  float limit, alpha, up_offset;
  explicit Formula(const ClampedGlu& numbers)
      : limit(numbers.limit), alpha(numbers.alpha), up_offset(numbers.up_offset) {}
  template <class T>
  ONETRIP_INLINE F value(F gate) const {
    const F g = smaller_number(splat(limit), gate);
    return g * logistic<T>(g * alpha).value;
  }
  ONETRIP_INLINE Activated with_slope(F gate) const {
    const F g = smaller_number(splat(limit), gate);
    const Logistic s = logistic(g * alpha);
    const F y = g * s.value;
    return {y, mul_add(y * s.complement, splat(alpha), s.value)};  // finite where g * alpha overflows
  }
  ONETRIP_INLINE F factor(F up) const {
    return larger_number(splat(-limit), smaller_number(splat(limit), up)) + up_offset;
  }
  ONETRIP_INLINE F gradient_of_gate(F gate, F gradient) const { return (F)((U)gradient & (U)(gate <= limit)); }
  ONETRIP_INLINE F gradient_of_up(F up, F gradient) const {
    return (F)((U)gradient & (U)(negative_magnitude(up) >= -limit));
  }
};

// A formula without up.
struct Softcap {};
template <>
struct Formula<Softcap> {
  float cap;
  explicit Formula(const ClampedGlu& numbers) : cap(numbers.alpha) {}
  template <class T>
  ONETRIP_INLINE F value(F x) const {
    return hyperbolic_tangent(x / splat(cap)) * cap;
  }
  ONETRIP_INLINE Activated with_slope(F x) const {
    const F e = exp_nonpositive(negative_magnitude(x / splat(cap)) * 2.0f), whole = 1.0f + e;
    // Without up, backward reads the slope alone. 1 - tanh^2 would cancel.
    return {F{}, 4.0f * e / (whole * whole)};
  }
  static ONETRIP_INLINE F gradient_of_gate(F, F gradient) { return gradient; }
};

enum class With { kNothing, kUp, kPairs, kBias };
constexpr bool has_up(With with) { return with == With::kUp || with == With::kPairs; }

template <With kWith>
using Chosen = std::integral_constant<With, kWith>;

// Calls body with a value of the type of the activation, what gate comes with, and whether there is dropout, the last
// two as constants. Dropout alone counts as kBias with a null bias: its draws hide the test for it, and kernels are
// slow to compile.
template <class Args, class Body>
auto with_formula(const Args& args, bool has_bias, Body body) {
  const auto with_dropout = [&](auto act, auto with) {
    return args.dropout.threshold ? body(act, with, std::true_type{}) : body(act, with, std::false_type{});
  };
  if (args.activation == Activation::kClampedSilu)
    return args.clamped.interleaved ? with_dropout(ClampedSilu{}, Chosen<With::kPairs>{})
                                    : with_dropout(ClampedSilu{}, Chosen<With::kUp>{});
  if (args.activation == Activation::kSoftcap)  // of one tensor, without dropout
    return body(Softcap{}, Chosen<With::kNothing>{}, std::false_type{});
  return with_activation(args.activation, [&](auto act) {
    if (args.up) return with_dropout(act, Chosen<With::kUp>{});
    if (has_bias || args.dropout.threshold) return with_dropout(act, Chosen<With::kBias>{});
    return body(act, Chosen<With::kNothing>{}, std::false_type{});
  });
}

// Gate of a vector of columns, and up where it is read from the same lines.
template <With kWith, class T, class Lanes>
ONETRIP_INLINE Pair load_gate(const T* gate, int64_t c, Lanes lanes) {
  if constexpr (kWith == With::kPairs) {
    return load_pairs(gate + 2 * c, lanes);
  } else {
    return {load(gate + c, lanes), F{}};
  }
}
template <With kWith, class T, class Lanes>
ONETRIP_INLINE F load_up(const Pair& loaded, const T* up, int64_t c, Lanes lanes) {
  if constexpr (kWith == With::kPairs) {
    return loaded.odd;
  } else {
    return load(up + c, lanes);
  }
}

// The inner loops are compiled for what they read and write: a vector of them has no condition. With dropout nothing is
// streamed: drawing takes longer than that would save (768 x 3072 float32, relu, 2 threads: 1.4 ms either way).
template <class Act, class T, With kWith, bool kDrops>
void forward_elements(const GluForward& args, const float* bias, float* buffer, bool streams, int64_t first,
                      int64_t last) {
  const Formula<Act> act(args.clamped);
  DropoutMask mask(args.dropout, buffer);
  for_rows(args.n_cols, first, last, [&](int64_t row, int64_t begin, int64_t end) {
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_row_stride;
    const T* up = kWith == With::kUp ? static_cast<const T*>(args.up) + row * args.up_row_stride : nullptr;
    T* y = static_cast<T*>(args.y) + row * args.n_cols;
    for_draws<kDrops>(mask, row, begin, end, args.n_cols, [&](int64_t begin, int64_t end, const uint16_t* bits) {
      for_stored_columns<float, 1>(begin, end, y, !kDrops && streams, [&](int64_t c, auto lanes, auto streams) {
        const Pair loaded = load_gate<kWith>(gate, c, lanes);
        F x = loaded.even;
        if constexpr (kWith == With::kBias)
          if (!kDrops || bias) x += load(bias + c, lanes);
        F v = act.template value<T>(x);
        if constexpr (has_up(kWith)) v *= act.factor(load_up<kWith>(loaded, up, c, lanes));
        if constexpr (kDrops) v = mask.apply(v, mask.kept(bits + (c - begin)));
        store_rounded(present(y + c), v, lanes, streams);
      });
    });
  });
}

// Columns in memory of a row of gate or up.
template <class Args>
int64_t row_columns(const Args& args) {
  return args.clamped.interleaved ? 2 * args.n_cols : args.n_cols;
}

// Whether all gradients are wanted, and those of gate and up are aligned alike: where one may be streamed, so may both.
// Interleaved ones are always wanted, and must be aligned as pairs.
bool wants_all(const GluBackward& args) {
  if (args.clamped.interleaved) return reinterpret_cast<uintptr_t>(args.dgate) % (2 * size_of(args.dtype)) == 0;
  const auto distance = reinterpret_cast<uintptr_t>(args.dup) - reinterpret_cast<uintptr_t>(args.dgate);
  if (args.up) return args.dgate && args.dup && args.dgate_row_stride == args.dup_row_stride && distance % 64 == 0;
  return args.dgate && (!args.bias || args.dbias);
}

// bias: null: nothing is added to gate. sums: [n_cols], to which the gradient of the bias is added; null: not wanted.
// kAll: wants_all; else results that are not wanted are null, and nothing is streamed.
template <class Act, class T, With kWith, bool kDrops, bool kAll>
void backward_elements(const GluBackward& args, const float* bias, float* sums, float* buffer, bool streams,
                       int64_t first, int64_t last) {
  using Stored = std::conditional_t<kWith == With::kPairs, Neighbours<T>, T>;
  const Formula<Act> act(args.clamped);
  DropoutMask mask(args.dropout, buffer);
  for_rows(args.n_cols, first, last, [&](int64_t row, int64_t begin, int64_t end) {
    const T* dy = static_cast<const T*>(args.dy) + row * args.dy_row_stride;
    const T* gate = static_cast<const T*>(args.gate) + row * args.gate_row_stride;
    const T* up = kWith == With::kUp ? static_cast<const T*>(args.up) + row * args.up_row_stride : nullptr;
    T* dgate = args.dgate ? static_cast<T*>(args.dgate) + row * args.dgate_row_stride : nullptr;
    T* dup = kWith == With::kUp && args.dup ? static_cast<T*>(args.dup) + row * args.dup_row_stride : nullptr;
    const auto* stored = reinterpret_cast<const Stored*>(dgate);
    for_draws<kDrops>(mask, row, begin, end, args.n_cols, [&](int64_t begin, int64_t end, const uint16_t* bits) {
      for_stored_columns<float, 1>(begin, end, stored, kAll && streams, [&](int64_t c, auto lanes, auto streams) {
        const Pair loaded = load_gate<kWith>(gate, c, lanes);
        F x = loaded.even;
        if constexpr (kWith == With::kBias)
          if (bias) x += load(bias + c, lanes);
        F g = load(dy + c, lanes);
        if constexpr (kDrops) g = mask.apply(g, mask.kept(bits + (c - begin)));
        const Activated activated = act.with_slope(x);
        F gradient_of_up = {};
        if constexpr (has_up(kWith))
          gradient_of_up = act.gradient_of_up(load_up<kWith>(loaded, up, c, lanes), g * activated.value);
        if constexpr (kWith == With::kUp)
          if (kAll || dup) store_rounded(present(dup + c), gradient_of_up, lanes, streams);
        if constexpr (has_up(kWith)) g *= act.factor(load_up<kWith>(loaded, up, c, lanes));
        if constexpr (std::is_same_v<Act, Relu>) {
          g = (F)((U)(kDrops ? g : g * args.dropout.scale) & (U)(activated.slope != 0.0f));
        } else {
          g = act.gradient_of_gate(x, g * activated.slope);
        }
        if constexpr (kWith == With::kPairs) {
          store_pairs(dgate + 2 * c, {g, gradient_of_up}, lanes, streams);
        } else if (kAll || dgate) {
          store_rounded(present(dgate + c), g, lanes, streams);
        }
        if constexpr (kWith == With::kBias)
          if (kAll || sums) store(sums + c, load(sums + c, lanes) + g, lanes);
      });
    });
  });
}

}  // namespace

int glu_forward(const GluForward& given) {
  GluForward args = given;
  const int64_t n = args.n_rows * args.n_cols;
  if (n <= 0) return 0;
  const int64_t whole = row_columns(args);
  if (!args.bias && args.gate_row_stride == whole && (!args.up || args.up_row_stride == whole))
    args.n_rows = 1, args.n_cols = n;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, args.n_cols);
  if (bias.failed()) return ENOMEM;
  const auto run = with_type(args.dtype, [&](auto type) {
    return with_formula(args, args.bias, [](auto act, auto with, auto drops) {
      return &forward_elements<decltype(act), decltype(type), with(), drops()>;
    });
  });
  const bool streams = n * size_of(args.dtype) >= kStreamBytes;
  const int64_t per_task = task_elements(n);
  const int64_t buffer_floats = args.dropout.threshold ? DropoutMask::kFloats : 16;
  return run_tasks((n + per_task - 1) / per_task, n, buffer_floats, [&](int64_t task, float* buffer) {
    run(args, bias.values(), buffer, streams, task * per_task, smaller((task + 1) * per_task, n));
  });
}

int glu_backward(const GluBackward& given) {
  GluBackward args = given;
  const int64_t n = args.n_rows * args.n_cols;
  if (n <= 0 || !(args.dgate || args.dup || args.dbias)) return 0;
  const int64_t whole = row_columns(args);
  const auto is_whole = [&](const void* matrix, int64_t row_stride) { return !matrix || row_stride == whole; };
  const RowPartition partition = row_partition(args.n_rows, args.n_cols);
  if (!args.bias && !args.dbias && args.dy_row_stride == args.n_cols && is_whole(args.gate, args.gate_row_stride) &&
      is_whole(args.up, args.up_row_stride) && is_whole(args.dgate, args.dgate_row_stride) &&
      is_whole(args.dup, args.dup_row_stride))
    args.n_rows = 1, args.n_cols = n;
  const Parameter bias(args.bias, args.bias_dtype, 0.0f, args.n_cols);
  if (bias.failed()) return ENOMEM;
  const bool all = wants_all(args);
  const auto run = with_type(args.dtype, [&](auto type) {
    return with_formula(args, args.bias || args.dbias, [all](auto act, auto with, auto drops) {
      using Act = decltype(act);
      if constexpr (!drops())
        if (all || with() == With::kNothing) return &backward_elements<Act, decltype(type), with(), false, true>;
      return &backward_elements<Act, decltype(type), with(), drops(), false>;
    });
  });
  const bool streams = n * size_of(args.dtype) >= kStreamBytes;
  const int64_t buffer_floats = args.dropout.threshold ? DropoutMask::kFloats : 16;
  if (!args.dbias) {
    const int64_t per_task = task_elements(n);
    return run_tasks((n + per_task - 1) / per_task, n, buffer_floats, [&](int64_t task, float* buffer) {
      run(args, bias.values(), nullptr, buffer, streams, task * per_task, smaller((task + 1) * per_task, n));
    });
  }
  const int64_t per_part = partition.rows_per_part * args.n_cols;
  const auto run_part = [&](int64_t part, float* buffer) {
    float* sums = args.workspace + part * partition.slot_floats;
    memset(sums, 0, partition.slot_floats * sizeof(float));
    run(args, bias.values(), sums, buffer, streams, part * per_part, smaller((part + 1) * per_part, n));
  };
  if (const int error = run_tasks(partition.n_parts, n, buffer_floats, run_part)) return error;
  constexpr int64_t kColumnsPerTask = 256;
  const int64_t n_tasks = (args.n_cols + kColumnsPerTask - 1) / kColumnsPerTask;
  return run_tasks(n_tasks, partition.n_parts * partition.slot_floats, 16, [&](int64_t task, float*) {
    const int64_t begin = task * kColumnsPerTask, end = smaller(begin + kColumnsPerTask, args.n_cols);
    with_type(args.bias_dtype, [&](auto type) {
      add_parts<decltype(type)>(args.workspace, partition.slot_floats, partition.n_parts, args.dbias, begin, end);
    });
  });
}

}  // namespace onetrip::ONETRIP_LEVEL
