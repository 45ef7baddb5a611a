// What forward and backward of row_norm share: parameters, and sums over a row.
#pragma once
#include <cstdlib>

#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

constexpr int kSumChains = 4;
constexpr int64_t kSumColumns = 2048;

// What z can be beside float32: the dtype that x and residual have in common.
template <class X, class R>
struct Common {
  using Type = float;
};
template <class X>
struct Common<X, X> {
  using Type = X;
};
template <class X, class R>
using CommonType = typename Common<X, R>::Type;
// The same rule for a caller's dtypes: nothing else is compiled.
inline bool is_z_dtype(DType z, DType x, DType residual) { return z == DType::kFloat32 || (z == x && z == residual); }

// Sums over a row of a and of a * b.
struct Sums {
  F values = {}, products = {};
};

// For every vector of [begin, end), body(column, lanes, add) calls add(a, b, row) once for each of kRows rows, and what
// it adds goes to the sums. Sums run in kSumChains chains that are folded every kSumColumns columns: in one long chain
// every addition rounds off the low bits that half-precision values have in common in the same direction, and the error
// grows with the width.
template <int kRows, class Body>
ONETRIP_INLINE void sum_columns(int64_t begin, int64_t end, Sums (&sums)[kRows], Body body) {
  static_assert(kSumChains == 4, "added in pairs");
  F values[kRows], products[kRows];  // registers
  for (int row = 0; row < kRows; ++row) values[row] = sums[row].values, products[row] = sums[row].products;
  for (int64_t block = begin; block < end; block += kSumColumns) {
    F a_sum[kRows][kSumChains] = {}, ab_sum[kRows][kSumChains] = {};
    for_columns<kSumChains>(block, smaller(block + kSumColumns, end), [&](int64_t c, auto lanes, int chain) {
      body(c, lanes, [&](F a, F b, int row = 0) __attribute__((always_inline)) {
        a_sum[row][chain] += a;
        ab_sum[row][chain] = mul_add(a, b, ab_sum[row][chain]);
      });
    });
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      const F *a = a_sum[row], *ab = ab_sum[row];
      values[row] += (a[0] + a[1]) + (a[2] + a[3]);
      products[row] += (ab[0] + ab[1]) + (ab[2] + ab[3]);
    }
  }
  for (int row = 0; row < kRows; ++row) sums[row] = {values[row], products[row]};
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
