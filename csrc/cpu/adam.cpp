// One step of Adam over tables of parameters; reference/adam.py has the formulas, and these are its bits at every
// level.
//
// A block of 128 elements takes three passes. The first reads codes and gradient (and for L2 decay the parameter) and
// leaves m and sqrt(v) in 1 KiB of stack; the second takes the parameter its step, and the scales are there when it
// ends; the third writes the codes.
// Memory sees every array once: p (and the residual of a master weight) read and written, g read, 2 bytes of codes and
// 1/16 of scales read and written, 16.1 bytes an element in float32. Every block is computed by itself: no bit depends
// on the threads.
#include "adam_codes.h"
#include "adam_params.h"
#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// AdamScalars, in every lane.
struct Numbers {
  F grad_factor, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction1, inv_sqrt_bias_correction2,
      eps, lr, largest_update;
  bool has_l2, has_finite_eps;
  explicit Numbers(const AdamScalars& s)
      : grad_factor(splat(s.grad_factor)),
        l2(splat(s.l2)),
        decay(splat(s.decay)),
        one_minus_beta1(splat(s.one_minus_beta1)),
        beta2(splat(s.beta2)),
        one_minus_beta2(splat(s.one_minus_beta2)),
        inv_bias_correction1(splat(s.inv_bias_correction1)),
        inv_sqrt_bias_correction2(splat(s.inv_sqrt_bias_correction2)),
        eps(splat(s.eps)),
        lr(splat(s.lr)),
        largest_update(splat(s.largest_update)),
        has_l2(s.l2 != 0.0f),
        has_finite_eps(s.eps > 0.0f && is_finite(s.eps)) {
    __asm__("" : "+r"(has_l2));  // or the comparison would be made for every vector
  }
};

// The moments of a vector one step on.
struct Moments {
  F m, v;
};
ONETRIP_INLINE Moments update_moments(F p, F grad, F m, F v, const Numbers& by) {
  F g = grad * by.grad_factor;
  if (by.has_l2) g = g + p * by.l2;
  return {m + (g - m) * by.one_minus_beta1, v * by.beta2 + (g * by.one_minus_beta2) * g};
}
// The update of exact Adam in units of the learning rate, from m and sqrt(v).
ONETRIP_INLINE F update(F m, F root, const Numbers& by) {
  return (m * by.inv_bias_correction1) / (root * by.inv_sqrt_bias_correction2 + by.eps);
}
ONETRIP_INLINE F update_param(F p, F u, const Numbers& by) { return p * by.decay - u * by.lr; }

// What a block of 8-bit states is read from and written to.
template <class Param, class G>
struct Block {
  Param param;
  const G* grad;
  uint8_t *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
};

// The bits of the largest magnitude of each lane, as integers: NaN is larger than Inf, and that than any number.
__attribute__((noinline)) U largest_magnitudes(const F* values) {
  U largest = {};
  for (int i = 0; i < kVectors; ++i) {
    const U bits = (U)values[i] & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <bool kKeepsNaN, class Param>
ONETRIP_INLINE void update_params(const Param& param, const F* m, const F* root, const Numbers& by) {
#pragma GCC unroll 4
  for (int i = 0; i < kVectors; ++i) {
    const F u = clamp_magnitude<kKeepsNaN>(update(m[i], root[i], by), by.largest_update);
    param.store(i * kWidth, update_param(param.load(i * kWidth, All{}), u, by), All{});
  }
}
template <class Param>
__attribute__((noinline)) void update_params_with_nan(const Param& param, const F* m, const F* root,
                                                      const Numbers& by) {
  update_params<true>(param, m, root, by);
}

template <class Param, class G>
ONETRIP_INLINE void step_block(const Block<Param, G>& block, const Numbers& by, const Tables& tables) {
  F m[kVectors], root[kVectors];
  const F old_m_scale = splat(*block.exp_avg_scale), old_root_scale = splat(*block.exp_avg_sq_scale);
  F m_magnitudes = {};  // the largest of each lane: NaN may be lost
  U root_magnitudes = {};
  for (int first = 0; first < kVectors; first += kGroup) {
    F old_m[kGroup], old_root[kGroup];
    signed_values(tables, block.exp_avg + first * kWidth, old_m);
    unsigned_values(tables, block.exp_avg_sq + first * kWidth, old_root);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      const int64_t c = (first + i) * kWidth;
      const F p = by.has_l2 ? block.param.load(c, All{}) : F{}, scaled_root = old_root[i] * old_root_scale;
      const Moments moments =
          update_moments(p, load(block.grad + c, All{}), old_m[i] * old_m_scale, scaled_root * scaled_root, by);
      const F new_root = square_root(moments.v);
      m[first + i] = moments.m;
      root[first + i] = new_root;
      m_magnitudes = larger_magnitude(m_magnitudes, moments.m);
      root_magnitudes = (U)new_root > root_magnitudes ? (U)new_root : root_magnitudes;
    }
  }
  Scale m_scale, root_scale;
  make_scales((U)m_magnitudes, root_magnitudes, m_scale, root_scale);
  // A NaN of m comes from the old scale, or from what sqrt(v) is not finite of either. An update is NaN where m or
  // sqrt(v) are, or where it is 0 / 0 or Inf / Inf: sqrt(v), below 2^64, needs an infinite eps for that.
  if (__builtin_expect(is_finite(*block.exp_avg_scale) & root_scale.is_finite & by.has_finite_eps, 1)) {
    update_params<false>(block.param, m, root, by);
  } else {
    make_scales(largest_magnitudes(m), largest_magnitudes(root), m_scale, root_scale);
    update_params_with_nan(block.param, m, root, by);
  }
  *block.exp_avg_scale = m_scale.value;
  *block.exp_avg_sq_scale = root_scale.value;
  store_signed(m, m_scale, block.exp_avg);
  store_unsigned(root, root_scale, block.exp_avg_sq);
}

// The last block of a parameter, of n elements, in arrays of its whole size: what fills them changes no scale.
template <class Param, class G>
__attribute__((noinline)) void step_part_of_block(const Block<Param, G>& block, int n, const Numbers& by,
                                                  const Tables& tables) {
  typename Param::Copy param(block.param, n);
  G grad[kBlock];
  uint8_t exp_avg[kBlock], exp_avg_sq[kBlock];
  copy_filled(grad, block.grad, n);
  copy_filled(exp_avg, block.exp_avg, n);
  copy_filled(exp_avg_sq, block.exp_avg_sq, n);
  step_block<Param, G>({param.block(), grad, exp_avg, exp_avg_sq, block.exp_avg_scale, block.exp_avg_sq_scale}, by,
                       tables);
  param.write(block.param, n);
  memcpy(block.exp_avg, exp_avg, n);
  memcpy(block.exp_avg_sq, exp_avg_sq, n);
}

template <class Param, class G>
void step_8bit_chunks(const AdamStep& args, const AdamKind& kind, const AdamChunk* chunks, int64_t n_chunks,
                      const Tables& tables) {
  typename Param::Memory memory;
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const AdamScalars& scalars = args.scalars[tensor.counter];
    const Numbers by(scalars);
    const int64_t n = smaller(kAdamChunk, tensor.numel - chunk->first), n_whole = n / kBlock;
    const Param param = Param::at({tensor, kind.rounding, chunk->first, n, scalars.step}, memory);
    const auto block = [&](int64_t i) {
      const int64_t first = chunk->first + i * kBlock;
      return Block<Param, G>{param.from(i * kBlock),
                             address<const G>(tensor.grad, first),
                             address<uint8_t>(tensor.exp_avg, first),
                             address<uint8_t>(tensor.exp_avg_sq, first),
                             address<float>(tensor.exp_avg_scale, first / kBlock),
                             address<float>(tensor.exp_avg_sq_scale, first / kBlock)};
    };
    for (int64_t i = 0; i < n_whole; ++i) step_block(block(i), by, tables);
    if (n_whole * kBlock < n) step_part_of_block(block(n_whole), static_cast<int>(n - n_whole * kBlock), by, tables);
  }
}

template <class Param, class G>
void step_32bit_chunks(const AdamStep& args, const AdamKind& kind, const AdamChunk* chunks, int64_t n_chunks,
                       const Tables&) {
  typename Param::Memory memory;
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const AdamScalars& scalars = args.scalars[tensor.counter];
    const Numbers by(scalars);
    const int64_t first = chunk->first, n = smaller(kAdamChunk, tensor.numel - first);
    const Param param = Param::at({tensor, kind.rounding, first, n, scalars.step}, memory);
    const G* grad = address<const G>(tensor.grad, first);
    float *exp_avg = address<float>(tensor.exp_avg, first), *exp_avg_sq = address<float>(tensor.exp_avg_sq, first);
    for_columns<2>(0, n, [&](int64_t c, auto lanes, int) {
      const F p = param.load(c, lanes);
      const Moments moments =
          update_moments(p, load(grad + c, lanes), load(exp_avg + c, lanes), load(exp_avg_sq + c, lanes), by);
      param.store(c, update_param(p, update(moments.m, square_root(moments.v), by), by), lanes);
      store(exp_avg + c, moments.m, lanes);
      store(exp_avg_sq + c, moments.v, lanes);
    });
  }
}

// Runs task(first chunk, n) for runs of a kind's chunks, on all threads where that is worth it.
template <class Task>
void for_chunks(const AdamKind& kind, Task task) {
  constexpr int64_t kMostChunks = 16;  // of a task: 1 MiB of float32 with 8-bit states
  const int64_t per_task = clamp(kind.n_chunks / (8 * thread_count()), 1, kMostChunks);
  const int64_t n_tasks = (kind.n_chunks + per_task - 1) / per_task;
  const bool is_worth_it = n_tasks > 1 && kind.n_chunks * kAdamChunk >= kSerialElements;
#pragma omp parallel for schedule(dynamic) if (is_worth_it)
  for (int64_t i = 0; i < n_tasks; ++i) {
    const int64_t first = i * per_task;
    task(kind.first_chunk + first, smaller(per_task, kind.n_chunks - first));
  }
}

typedef float HalfF __attribute__((vector_size(kWidth * 2)));
typedef double D __attribute__((vector_size(kWidth * 4)));

// The square of a float32 is exact in float64: the order of the sum moves no more than the last bits of a float64.
template <class G>
double sum_of_squares(const G* grad, int64_t n) {
  D low[2] = {}, high[2] = {};
  for_columns<2>(0, n, [&](int64_t c, auto lanes, int chain) {
    const F g = load(grad + c, lanes);
    HalfF half[2];
    memcpy(half, &g, sizeof g);
    const D first = __builtin_convertvector(half[0], D), second = __builtin_convertvector(half[1], D);
    low[chain] += first * first;
    high[chain] += second * second;
  });
  const D lanes = (low[0] + low[1]) + (high[0] + high[1]);
  double sum = 0.0;
  for (int i = 0; i < kWidth / 2; ++i) sum += lanes[i];
  return sum;
}

}  // namespace

int adam_squares(const AdamSquares& args) {
  for (const AdamKind* kind = args.kinds; kind < args.kinds + args.n_kinds; ++kind) {
    with_type(kind->grad_dtype, [&](auto grad) {
      for_chunks(*kind, [&](int64_t first_chunk, int64_t n_chunks) {
        for (int64_t i = first_chunk; i < first_chunk + n_chunks; ++i) {
          const AdamChunk& chunk = args.chunks[i];
          const AdamTensor& tensor = args.tensors[chunk.tensor];
          args.sums[i] = sum_of_squares(address<const decltype(grad)>(tensor.grad, chunk.first),
                                        smaller(kAdamChunk, tensor.numel - chunk.first));
        }
      });
    });
  }
  return 0;
}

// Nothing in it can fail: a step that has begun is completed.
int adam_step(const AdamStep& args) {
  static const Tables tables;
  for (const AdamKind* kind = args.kinds; kind < args.kinds + args.n_kinds; ++kind) {
    const auto step_chunks = with_param(*kind, [&](auto param) {
      return with_type(kind->grad_dtype, [&](auto grad) {
        using Param = decltype(param);
        using G = decltype(grad);
        return kind->is_8bit ? &step_8bit_chunks<Param, G> : &step_32bit_chunks<Param, G>;
      });
    });
    for_chunks(*kind, [&](int64_t first, int64_t n_chunks) {
      step_chunks(args, *kind, args.chunks + first, n_chunks, tables);
    });
  }
  return 0;
}

}  // namespace onetrip::ONETRIP_LEVEL
