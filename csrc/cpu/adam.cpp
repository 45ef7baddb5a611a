// One step of Adam over tables of parameters; reference/adam.py has the formulas, and these are its bits at every
// level.
//
// A block of 128 elements is taken through two passes. The first reads codes, gradient and parameter, writes the
// parameter, and leaves m and sqrt(v) in 1 KiB of stack; the second writes their codes. It follows the first pass of
// the next block, so that nothing waits for the scales. Memory sees every array once: p read and written, g read, 2
// bytes of codes and 1/16 of scales read and written, 16.1 bytes an element in float32. Every block is computed by
// itself: no bit depends on the threads.
#include "adam_codes.h"
#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

// Of each lane the largest magnitude's bits, as integers: NaN is larger than Inf, and that than any number.
// kHasNegatives: there may be negative numbers; NaN is of any sign.
template <bool kHasNegatives>
ONETRIP_INLINE U largest_magnitudes(const F* values) {
  U largest = {};
  for (int i = 0; i < kVectors; ++i) {
    const U bits = kHasNegatives ? (U)values[i] & 0x7FFFFFFFu : (U)values[i];
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// AdamScalars, in every lane.
struct Numbers {
  F grad_factor, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_bias_correction1, inv_sqrt_bias_correction2,
      eps, lr, largest_update;
  bool has_l2;
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
        has_l2(s.l2 != 0.0f) {
    __asm__("" : "+r"(has_l2));  // or the comparison would be made for every vector
  }
};

// The moments of a vector one step on, and its new parameter.
struct Updated {
  F m, v, root, p;
};
template <bool kClamps>
ONETRIP_INLINE Updated update(F p, F grad, F m, F v, const Numbers& by) {
  F g = grad * by.grad_factor;
  if (by.has_l2) g = g + p * by.l2;
  m = m + (g - m) * by.one_minus_beta1;
  v = v * by.beta2 + (g * by.one_minus_beta2) * g;
  const F root = square_root(v);
  F u = (m * by.inv_bias_correction1) / (root * by.inv_sqrt_bias_correction2 + by.eps);
  if constexpr (kClamps) u = smaller_number(by.largest_update, larger_number(-by.largest_update, u));  // NaN stays
  return {m, v, root, p * by.decay - u * by.lr};
}

// What a block of 8-bit states is read from and written to.
template <class P, class G>
struct Block {
  P* param;
  const G* grad;
  uint8_t *exp_avg, *exp_avg_sq;
  float *exp_avg_scale, *exp_avg_sq_scale;
};

// Of a block, between its passes.
struct Moments {
  F m[kVectors], root[kVectors];
  Scale m_scale, root_scale;
  ONETRIP_INLINE void find_scales() {
    make_scales(largest_magnitudes<true>(m), largest_magnitudes<false>(root), m_scale, root_scale);
  }
};

// n: elements that exist, of kBlock that can be read and written.
template <class P, class G>
ONETRIP_INLINE void update_block(const Block<P, G>& block, int n, const Numbers& by, const Tables& tables,
                                 Moments& moments) {
  const F m_scale = splat(*block.exp_avg_scale), root_scale = splat(*block.exp_avg_sq_scale);
  for (int first = 0; first < kVectors; first += kGroup) {
    F m[kGroup], root[kGroup];
    signed_values(tables, block.exp_avg + first * kWidth, m);
    unsigned_values(tables, block.exp_avg_sq + first * kWidth, root);
#pragma GCC unroll 4
    for (int i = 0; i < kGroup; ++i) {
      P* param = block.param + (first + i) * kWidth;
      const F grad = load(block.grad + (first + i) * kWidth, All{}), old_root = root[i] * root_scale;
      const Updated updated = update<true>(load(param, All{}), grad, m[i] * m_scale, old_root * old_root, by);
      store_rounded(param, updated.p, All{});
      moments.m[first + i] = updated.m;
      moments.root[first + i] = updated.root;
    }
  }
  if (n < kBlock) {
    memset(reinterpret_cast<float*>(moments.m) + n, 0, (kBlock - n) * sizeof(float));
    memset(reinterpret_cast<float*>(moments.root) + n, 0, (kBlock - n) * sizeof(float));
  }
  moments.find_scales();
}
template <class P, class G>
ONETRIP_INLINE void store_block(const Block<P, G>& block, const Tables& tables, const Moments& moments) {
  *block.exp_avg_scale = moments.m_scale.value;
  *block.exp_avg_sq_scale = moments.root_scale.value;
  store_signed(tables, moments.m, moments.m_scale, block.exp_avg);
  store_unsigned(tables, moments.root, moments.root_scale, block.exp_avg_sq);
}

// The last block of a parameter, in arrays of its whole size.
template <class P, class G>
__attribute__((noinline)) void step_part_of_block(const Block<P, G>& block, int n, const Numbers& by,
                                                  const Tables& tables) {
  P param[kBlock] = {};
  G grad[kBlock] = {};
  uint8_t exp_avg[kBlock] = {}, exp_avg_sq[kBlock] = {};
  memcpy(param, block.param, n * sizeof(P));
  memcpy(grad, block.grad, n * sizeof(G));
  memcpy(exp_avg, block.exp_avg, n);
  memcpy(exp_avg_sq, block.exp_avg_sq, n);
  const Block<P, G> whole = {param, grad, exp_avg, exp_avg_sq, block.exp_avg_scale, block.exp_avg_sq_scale};
  Moments moments;
  update_block(whole, n, by, tables, moments);
  store_block(whole, tables, moments);
  memcpy(block.param, param, n * sizeof(P));
  memcpy(block.exp_avg, exp_avg, n);
  memcpy(block.exp_avg_sq, exp_avg_sq, n);
}

template <class T>
ONETRIP_INLINE T* address(int64_t base, int64_t index) {
  return reinterpret_cast<T*>(base) + index;
}

template <class P, class G>
void step_8bit_chunks(const AdamStep& args, const AdamChunk* chunks, int64_t n_chunks, const Tables& tables) {
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const Numbers by(args.scalars[tensor.counter]);
    const int64_t n = smaller(kAdamChunk, tensor.numel - chunk->first), n_whole = n / kBlock;
    const auto block = [&](int64_t i) {
      const int64_t first = chunk->first + i * kBlock;
      return Block<P, G>{address<P>(tensor.param, first),
                         address<const G>(tensor.grad, first),
                         address<uint8_t>(tensor.exp_avg, first),
                         address<uint8_t>(tensor.exp_avg_sq, first),
                         address<float>(tensor.exp_avg_scale, first / kBlock),
                         address<float>(tensor.exp_avg_sq_scale, first / kBlock)};
    };
    Moments moments[2];
    for (int64_t i = 0; i <= n_whole; ++i) {
      if (i < n_whole) update_block(block(i), kBlock, by, tables, moments[i % 2]);
      if (i > 0) store_block(block(i - 1), tables, moments[(i - 1) % 2]);
    }
    if (n_whole * kBlock < n) step_part_of_block(block(n_whole), static_cast<int>(n - n_whole * kBlock), by, tables);
  }
}

template <class P, class G>
void step_32bit_chunks(const AdamStep& args, const AdamChunk* chunks, int64_t n_chunks, const Tables&) {
  for (const AdamChunk* chunk = chunks; chunk < chunks + n_chunks; ++chunk) {
    const AdamTensor& tensor = args.tensors[chunk->tensor];
    const Numbers by(args.scalars[tensor.counter]);
    P* param = address<P>(tensor.param, 0);
    const G* grad = address<const G>(tensor.grad, 0);
    float *exp_avg = address<float>(tensor.exp_avg, 0), *exp_avg_sq = address<float>(tensor.exp_avg_sq, 0);
    for_columns<2>(chunk->first, smaller(chunk->first + kAdamChunk, tensor.numel), [&](int64_t c, auto lanes, int) {
      const Updated updated = update<false>(load(param + c, lanes), load(grad + c, lanes), load(exp_avg + c, lanes),
                                            load(exp_avg_sq + c, lanes), by);
      store_rounded(param + c, updated.p, lanes);
      store(exp_avg + c, updated.m, lanes);
      store(exp_avg_sq + c, updated.v, lanes);
    });
  }
}

}  // namespace

// Nothing in it can fail: a step that has begun is completed.
int adam_step(const AdamStep& args) {
  constexpr int64_t kMostChunks = 16;  // of a task: 1 MiB of float32 with 8-bit states
  static const Tables tables;
  for (const AdamKind* kind = args.kinds; kind < args.kinds + args.n_kinds; ++kind) {
    const auto step_chunks = with_type(kind->param_dtype, [&](auto param) {
      return with_type(kind->grad_dtype, [&](auto grad) {
        using P = decltype(param);
        using G = decltype(grad);
        return kind->is_8bit ? &step_8bit_chunks<P, G> : &step_32bit_chunks<P, G>;
      });
    });
    const AdamChunk* chunks = args.chunks + kind->first_chunk;
    const int64_t per_task = clamp(kind->n_chunks / (8 * thread_count()), 1, kMostChunks);
    const int64_t n_tasks = (kind->n_chunks + per_task - 1) / per_task;
    const bool is_worth_it = n_tasks > 1 && kind->n_chunks * kAdamChunk >= kSerialElements;
#pragma omp parallel for schedule(dynamic) if (is_worth_it)
    for (int64_t task = 0; task < n_tasks; ++task) {
      const int64_t first = task * per_task;
      step_chunks(args, chunks + first, smaller(per_task, kind->n_chunks - first), tables);
    }
  }
  return 0;
}

}  // namespace ONETRIP_LEVEL
}  // namespace onetrip
