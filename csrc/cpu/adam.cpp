// One step of Adam over tables of parameters; reference/adam.py has the formulas, and these are its bits at every
// level.
//
// A block of 128 elements is taken through two passes. The first reads codes, gradient and parameter, writes the
// parameter, and leaves m and sqrt(v) in 1 KiB of stack; the second writes their codes. Memory sees every array once: p
// read and written, g read, 2 bytes of codes and 1/16 of scales read and written, 16.1 bytes an element in float32.
// Every block is computed by itself: no bit depends on the threads.
#include "adam_codes.h"
#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip {
namespace ONETRIP_LEVEL {
namespace {

constexpr int kBlock = static_cast<int>(kAdamBlock), kVectors = kBlock / kWidth;

// Of the bits, as integers: NaN is larger than Inf, and that than any number.
ONETRIP_INLINE float largest_magnitude(const F* values) {
  U largest = {};
  for (int i = 0; i < kVectors; ++i) {
    const U bits = (U)values[i] & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  uint32_t lane = 0;
#if defined(__AVX512F__)
  lane = _mm512_reduce_max_epu32((__m512i)largest);
#else
  for (int i = 0; i < kWidth; ++i) lane = largest[i] > lane ? largest[i] : lane;
#endif
  float value;
  memcpy(&value, &lane, sizeof value);
  return value;
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
        has_l2(s.l2 != 0.0f) {}
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

// n: elements that exist, of kBlock that can be read and written.
template <class P, class G>
ONETRIP_INLINE void step_block(const Block<P, G>& block, int n, const Numbers& by, const Tables& tables) {
  F m[kVectors], root[kVectors];
  const F m_scale = splat(*block.exp_avg_scale), root_scale = splat(*block.exp_avg_sq_scale);
  for (int first = 0; first < kVectors; first += kGroup) {
    signed_values(tables, block.exp_avg + first * kWidth, m + first);
    unsigned_values(tables, block.exp_avg_sq + first * kWidth, root + first);
    for (int i = first; i < first + kGroup; ++i) {
      P* param = block.param + i * kWidth;
      const F old_root = root[i] * root_scale;
      const Updated updated = update<true>(load(param, All{}), load(block.grad + i * kWidth, All{}), m[i] * m_scale,
                                           old_root * old_root, by);
      store_rounded(param, updated.p, All{});
      m[i] = updated.m;
      root[i] = updated.root;
    }
  }
  if (n < kBlock) {
    memset(reinterpret_cast<float*>(m) + n, 0, (kBlock - n) * sizeof(float));
    memset(reinterpret_cast<float*>(root) + n, 0, (kBlock - n) * sizeof(float));
  }
  const Scale new_m_scale(largest_magnitude(m)), new_root_scale(largest_magnitude(root));
  *block.exp_avg_scale = new_m_scale.value;
  *block.exp_avg_sq_scale = new_root_scale.value;
  for (int first = 0; first < kVectors; first += kGroup) {
    store_signed(tables, m + first, new_m_scale, block.exp_avg + first * kWidth);
    store_unsigned(tables, root + first, new_root_scale, block.exp_avg_sq + first * kWidth);
  }
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
  step_block<P, G>({param, grad, exp_avg, exp_avg_sq, block.exp_avg_scale, block.exp_avg_sq_scale}, n, by, tables);
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
    const int64_t end = smaller(chunk->first + kAdamChunk, tensor.numel);
    for (int64_t first = chunk->first; first < end; first += kBlock) {
      const Block<P, G> block = {address<P>(tensor.param, first),
                                 address<const G>(tensor.grad, first),
                                 address<uint8_t>(tensor.exp_avg, first),
                                 address<uint8_t>(tensor.exp_avg_sq, first),
                                 address<float>(tensor.exp_avg_scale, first / kBlock),
                                 address<float>(tensor.exp_avg_sq_scale, first / kBlock)};
      if (end - first < kBlock) {
        step_part_of_block(block, static_cast<int>(end - first), by, tables);
      } else {
        step_block(block, kBlock, by, tables);
      }
    }
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
  const Tables tables;
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
