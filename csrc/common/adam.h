// What the Adam kernels share: the 8-bit code maps, and the numbers of one step.
//
// Maps (dynamic quantisation: Dettmers 2016; block-wise: Dettmers et al. 2022): 0, then in decades 1e-6 ... 1 of the
// block's scale 2^i (signed map, first moment) or 2^(i+1) values (unsigned map, square root of the second), then 1.
#pragma once
#include <cmath>
#include <cstdint>

#include "../launch.h"
#include "philox.h"  // ONETRIP_HOST_DEVICE

namespace onetrip {

constexpr int kSignedMagnitudes = 129, kUnsignedMagnitudes = 256;
constexpr int kSignedZeroCode = 127;  // signed: code 127 + q is magnitude q, 127 - q its negative (q <= 127)
constexpr float kSmallestAdamScale = 1.17549435e-38f;  // 2^-126: below, 1 / scale is not finite; stored as zeros

// values[q]: magnitude q in units of the scale. threshold[q]: the least float32 that is nearer to magnitude q than to
// q - 1, or as near to both; threshold[0] is 0. So the code of x >= 0 is the last q with threshold[q] <= x.
template <int kMagnitudes>
struct CodeMap {
  float value[kMagnitudes];
  float threshold[kMagnitudes];
};

// extra: the decades have 2^(i + extra) values.
template <int kMagnitudes>
constexpr CodeMap<kMagnitudes> make_code_map(int extra) {
  CodeMap<kMagnitudes> map{};
  const double decades[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
  int q = 0;
  map.value[q++] = 0.0f;
  for (int i = 0; i < 7; ++i) {
    const int n_steps = 1 << (i + extra);
    for (int j = 0; j < n_steps; ++j) {
      const double low = 0.1 + 0.9 * j / n_steps, high = 0.1 + 0.9 * (j + 1) / n_steps;
      map.value[q++] = static_cast<float>(decades[i] * (low + high) / 2);
    }
  }
  map.value[q] = 1.0f;
  map.threshold[0] = 0.0f;
  for (int i = 1; i < kMagnitudes; ++i) {
    // Exact: the sum of two float32 numbers of these sizes has fewer than 53 bits.
    const double middle = (static_cast<double>(map.value[i - 1]) + static_cast<double>(map.value[i])) / 2;
    float least = static_cast<float>(middle);
    // The next float32 up, where rounding went down: half a unit in the last place more than the middle rounds to it.
    double step = 1.0;
    while (step > middle) step /= 2;
    if (static_cast<double>(least) < middle) least = static_cast<float>(static_cast<double>(least) + step / (1 << 23));
    map.threshold[i] = least;
  }
  return map;
}

// C_t: |m_hat| / sqrt(v_hat) of exact Adam after t steps never exceeds it, whatever the gradients were (Cauchy-Schwarz
// over their weights in m and v). The clamp to it meets quantisation error only.
ONETRIP_HOST_DEVICE double largest_adam_update(double beta1, double beta2, double t) {
  double geometric = 1.0;
  if (beta1 != 0.0) {
    if (beta2 == 0.0) return HUGE_VAL;
    const double ratio = beta1 * beta1 / beta2;
    geometric = fabs(1.0 - ratio) < 1e-9 ? t : expm1(t * log(ratio)) / (ratio - 1.0);
  }
  return (1.0 - beta1) / (1.0 - pow(beta1, t)) * sqrt((1.0 - pow(beta2, t)) / (1.0 - beta2)) * sqrt(geometric);
}

// For step number t (1 is the first).
ONETRIP_HOST_DEVICE AdamScalars adam_scalars(const AdamGroup& group, double lr, double t, double grad_scale) {
  AdamScalars s;
  s.grad_factor = static_cast<float>((group.maximize ? -1.0 : 1.0) / grad_scale);
  s.l2 = static_cast<float>(group.decoupled ? 0.0 : group.weight_decay);
  s.decay = static_cast<float>(group.decoupled ? 1.0 - lr * group.weight_decay : 1.0);
  s.one_minus_beta1 = static_cast<float>(1.0 - group.beta1);
  s.beta2 = static_cast<float>(group.beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - group.beta2);
  s.inv_bias_correction1 = static_cast<float>(1.0 / (1.0 - pow(group.beta1, t)));
  s.inv_sqrt_bias_correction2 = static_cast<float>(1.0 / sqrt(1.0 - pow(group.beta2, t)));
  s.eps = static_cast<float>(group.eps);
  s.lr = static_cast<float>(lr);
  s.largest_update = static_cast<float>(largest_adam_update(group.beta1, group.beta2, t));
  s.step = static_cast<float>(t);
  return s;
}

// Counts a parameter's step and returns its numbers; where found_inf is not 0 the count stays.
ONETRIP_HOST_DEVICE AdamScalars prepare_adam(const AdamCounter& counter, const AdamGroup& group,
                                             const float* grad_scale, const float* found_inf) {
  float* const step = reinterpret_cast<float*>(counter.step);
  const float t = *step + 1.0f;
  AdamScalars s = adam_scalars(group, group.lr_address ? static_cast<double>(*group.lr_address) : group.lr, t,
                               grad_scale ? static_cast<double>(*grad_scale) : 1.0);
  if (found_inf != nullptr && *found_inf != 0.0f) {
    s.step = 0.0f;
  } else {
    *step = t;
  }
  return s;
}

}  // namespace onetrip
