// The functions of activations, a vector at a time. Errors are relative: both tails are as exact as the middle. The
// levels with a fused multiply-add agree bit for bit.
#pragma once
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

ONETRIP_INLINE F select(U mask, F a, F b) { return (F)select(mask, (U)a, (U)b); }
ONETRIP_INLINE F negative_magnitude(F x) { return (F)((U)x | 0x80000000u); }

// e^x of x <= 0 as exp_nonpositive, where T is what it is computed from or for. In half precision within 2^-22: ln 2 in
// one part, and a polynomial of one degree less.
template <class T>
ONETRIP_INLINE F exp_nonpositive_for(F x) {
  if constexpr (kIsFloat32<T>) {
    return exp_nonpositive(x);
  } else {
    x = larger_number(splat(-88.0f), x);
    const F magic = splat(0x1.8p23f + 127.0f);
    const F shifted = mul_add(x, splat(0x1.715476p0f), magic);
    const F r = mul_add(shifted - magic, splat(-0x1.62e430p-1f), x);
    F e = mul_add(r, splat(0x1.10adb6p-7f), splat(0x1.572ad4p-5f));
    e = mul_add(e, r, splat(0x1.555722p-3f));
    e = mul_add(e, r, splat(0x1.fffdfcp-2f));
    e = mul_add(e, r, splat(1.0f));
    e = mul_add(e, r, splat(1.0f));
    return e * (F)((U)shifted << 23);
  }
}

// 1 / (1 + e^-x), and what is missing from 1: 1 / (1 + e^x). Within 3 units in the last place, within 2^-21 where T is
// half precision; 0 and 1 from |x| = 88 on.
struct Logistic {
  F value, complement;
};
template <class T = float>
ONETRIP_INLINE Logistic logistic(F x) {
  const F t = exp_nonpositive_for<T>(negative_magnitude(x));
  const F larger = 1.0f / (t + 1.0f), smaller = t * larger;
  return {select_by_sign(x, smaller, larger), select_by_sign(x, larger, smaller)};
}

// The normal distribution: its cumulative (1 + erf(x / sqrt(2))) / 2, and its density e^(-x^2/2) / sqrt(2 pi). Within
// 7 units in the last place; 0 and 1 from |x| = 13.3 on.
//
// The tail beyond a = |x| is e^(-a^2/2) t p(t), t = 1 / (1 + a/4): p is minimax in the relative error over
// 0 <= a <= 14.5, 0.15 * 2^-24 before rounding. The exponential is exp_nonpositive of s = -2x, of which all but the
// rounding is exact: what rounding a^2 left out joins -2r, and the coefficients are those of r times powers of -1/2.
struct Normal {
  F cumulative, density;
};
ONETRIP_INLINE Normal normal_distribution(F x) {
  // From 13.27 on e^(-a^2/2) is 0, see exp_nonpositive.
  const F a = smaller_number(splat(13.27f), -negative_magnitude(x));
  const F square = a * a, rest = mul_add(a, a, -square);
  const F magic = splat(0x1.8p23f + 127.0f);
  const F shifted = mul_add(square, splat(-0x1.715476p-1f), magic);
  const F n = shifted - magic;
  const F r = mul_add(n, splat(0x1.62e4p0f), square) + mul_add(n, splat(0x1.7f7d1cp-19f), rest);
  F e = mul_add(r, splat(0x1.6a2434p-16f), splat(-0x1.1239e2p-12f));
  e = mul_add(e, r, splat(0x1.5558f2p-9f));
  e = mul_add(e, r, splat(-0x1.555492p-6f));
  e = mul_add(e, r, splat(0x1.fffffcp-4f));
  e = mul_add(e, r, splat(-0.5f));
  e = mul_add(e, r, splat(1.0f)) * (F)((U)shifted << 23);
  const F t = 1.0f / mul_add(a, splat(0.25f), splat(1.0f));
  F p = mul_add(t, splat(0x1.14c3d2p-6f), splat(-0x1.085808p-4f));
  p = mul_add(p, t, splat(0x1.c9c352p-5f));
  p = mul_add(p, t, splat(0x1.727626p-6f));
  p = mul_add(p, t, splat(0x1.228fd0p-6f));
  p = mul_add(p, t, splat(0x1.577484p-4f));
  p = mul_add(p, t, splat(0x1.2b0f6ep-4f));
  p = mul_add(p, t, splat(0x1.864c92p-4f));
  p = mul_add(p, t, splat(0x1.97a3d0p-4f));
  p = mul_add(p, t, splat(0x1.988f9cp-4f));
  const F tail = e * t * p;
  return {select_by_sign(x, tail, 1.0f - tail), e * 0x1.988454p-2f};
}

// The cumulative alone, where it is rounded to T. In half precision within 2^-16: p is of a lower degree, with
// t = 1 / (1 + 0.31 a), and a^2 is rounded.
template <class T>
ONETRIP_INLINE F normal_cumulative(F x) {
  if constexpr (kIsFloat32<T>) {
    return normal_distribution(x).cumulative;
  } else {
    const F t = 1.0f / mul_add(negative_magnitude(x), splat(-0x1.3d70a4p-2f), splat(1.0f));
    F p = mul_add(t, splat(-0x1.2ed026p-4f), splat(0x1.718faap-3f));
    p = mul_add(p, t, splat(0x1.01f8e6p-6f));
    p = mul_add(p, t, splat(0x1.11436ep-3f));
    p = mul_add(p, t, splat(0x1.ed53f4p-4f));
    p = mul_add(p, t, splat(0x1.fb555ap-4f));
    const F tail = exp_nonpositive_for<T>(x * x * -0.5f) * t * p;
    return select_by_sign(x, tail, 1.0f - tail);
  }
}

// tanh(x) within 3 units in the last place. Below 0.625 an odd polynomial (Cephes, tanhf), above it
// (1 - e) / (1 + e) of e = exp(-2 |x|).
ONETRIP_INLINE F hyperbolic_tangent(F x) {
  const F square = x * x;
  F p = mul_add(square, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
  p = mul_add(p, square, splat(-5.37397155531e-2f));
  p = mul_add(p, square, splat(1.33314422036e-1f));
  p = mul_add(p, square, splat(-3.33332819422e-1f));
  const F small = mul_add(p * square, x, x);
  const F e = exp_nonpositive(negative_magnitude(x) * 2.0f);
  const F large = (F)((U)((1.0f - e) / (1.0f + e)) | ((U)x & 0x80000000u));
  return select((U)(negative_magnitude(x) > splat(-0.625f)), small, large);
}

// act(x), and its derivative. value<T> is accurate to T; with_slope always to float32: the gradient of a bias sums
// slopes, and may be float32 where x is not.
struct Activated {
  F value, slope;
};

// x / (1 + e^-x).
struct Silu {
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    return x * logistic<T>(x).value;
  }
  static ONETRIP_INLINE Activated with_slope(F x) {
    const Logistic s = logistic(x);
    const F y = x * s.value;
    return {y, mul_add(y, s.complement, s.value)};
  }
};

// x times the cumulative normal distribution (Hendrycks & Gimpel 2016).
struct Gelu {
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    return x * normal_cumulative<T>(x);
  }
  static ONETRIP_INLINE Activated with_slope(F x) {
    const Normal normal = normal_distribution(x);
    return {x * normal.cumulative, mul_add(x, normal.density, normal.cumulative)};
  }
};

// x (1 + tanh(u)) / 2 = x / (1 + e^-2u),  u = sqrt(2/pi) (x + 0.044715 x^3).
struct GeluTanh {
  static constexpr float kLinear = 1.5957691216f, kCubic = 0.0713548163f;  // of 2u
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    return x * logistic<T>(x * mul_add(x * x, splat(kCubic), splat(kLinear))).value;
  }
  static ONETRIP_INLINE Activated with_slope(F x) {
    // Beyond x^2 = 2^16 the logistic function is 0 or 1 and the slope of u is multiplied by 0: it has to be finite.
    const F square = smaller_number(splat(0x1p16f), x * x);
    const Logistic s = logistic(x * mul_add(square, splat(kCubic), splat(kLinear)));
    const F y = x * s.value;
    return {y, mul_add(y * s.complement, mul_add(square, splat(3.0f * kCubic), splat(kLinear)), s.value)};
  }
};

// max(x, 0)^2 (So et al. 2021).
struct Relu2 {
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    const F positive = larger_number(F{}, x);
    return positive * positive;
  }
  static ONETRIP_INLINE Activated with_slope(F x) {
    const F positive = larger_number(F{}, x);
    return {positive * positive, positive + positive};
  }
};

// max(x, 0). Where x is NaN the gradient passes, as in torch.
struct Relu {
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    return larger_number(F{}, x);
  }
  static ONETRIP_INLINE Activated with_slope(F x) { return {value<float>(x), (F)((U)splat(1.0f) & ~(U)(x <= 0.0f))}; }
};

// x / (1 + e^(-1.702 x)) (Hendrycks & Gimpel 2016).
struct QuickGelu {
  static constexpr float kAlpha = 1.702f;
  template <class T>
  static ONETRIP_INLINE F value(F x) {
    return x * logistic<T>(x * kAlpha).value;
  }
  static ONETRIP_INLINE Activated with_slope(F x) {
    const Logistic s = logistic(x * kAlpha);
    const F y = x * s.value;
    return {y, mul_add(y * s.complement, splat(kAlpha), s.value)};  // finite where x * kAlpha overflows
  }
};

// Calls body with a value of the type of the activation.
template <class Body>
ONETRIP_INLINE auto with_activation(Activation activation, Body body) {
  switch (activation) {
    case Activation::kGelu:
      return body(Gelu{});
    case Activation::kGeluTanh:
      return body(GeluTanh{});
    case Activation::kRelu2:
      return body(Relu2{});
    case Activation::kRelu:
      return body(Relu{});
    case Activation::kQuickGelu:
      return body(QuickGelu{});
    default:
      return body(Silu{});
  }
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
