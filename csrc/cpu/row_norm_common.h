// What forward and backward of row_norm share: parameters, and sums over a row.
#pragma once
#include <type_traits>

#include "levels.h"
#include "rows.h"
#include "simd.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

// What z can be beside float32: the dtype that x and residual have in common.
template <class X, class R>
using CommonType = std::conditional_t<std::is_same_v<X, R>, X, float>;
// The same rule for a caller's dtypes: nothing else is compiled.
inline bool is_z_dtype(DType z, DType x, DType residual) { return z == DType::kFloat32 || (z == x && z == residual); }

// Sums over a row of a and of a * b.
struct Sums {
  F values = {}, products = {};
};

// For every vector of [begin, end), body(column, lanes, add) calls add(a, b, row) once for each of kRows rows, and what
// it adds goes to the sums.
template <int kRows, class Body>
ONETRIP_INLINE void sum_columns(int64_t begin, int64_t end, Sums (&sums)[kRows], Body body) {
  F values[kRows], products[kRows];  // registers
  for (int row = 0; row < kRows; ++row) values[row] = sums[row].values, products[row] = sums[row].products;
  for (int64_t block = begin; block < end; block += kSumColumns) {
    F a_sum[kRows][kChains] = {}, ab_sum[kRows][kChains] = {};
    for_columns<kChains>(block, smaller(block + kSumColumns, end), [&](int64_t c, auto lanes, int chain) {
      body(c, lanes, [&](F a, F b, int row = 0) __attribute__((always_inline)) {
        a_sum[row][chain] += a;
        ab_sum[row][chain] = mul_add(a, b, ab_sum[row][chain]);
      });
    });
#pragma GCC unroll 2
    for (int row = 0; row < kRows; ++row) {
      values[row] += sum_chains(a_sum[row]);
      products[row] += sum_chains(ab_sum[row]);
    }
  }
  for (int row = 0; row < kRows; ++row) sums[row] = {values[row], products[row]};
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
