// Parameters as a step of Adam reads and writes them, vector by vector: rounded to nearest, as the upper part of a
// master weight, or rounded stochastically. python_pkg/onetrip/reference/rounding.py has the formulas.
//
// Each of the three has load and store of the vector from element c on, `from` for later elements, and a Copy: its
// first n elements in arrays of a whole block, the rest of which are like the first one.
#pragma once
#include "adam_codes.h"
#include "dropout.h"
#include "master_weight.h"

namespace onetrip::ONETRIP_LEVEL {
namespace {

template <class T>
ONETRIP_INLINE T* address(int64_t base, int64_t index) {
  return reinterpret_cast<T*>(base) + index;
}

template <class T>
ONETRIP_INLINE void copy_filled(T* block, const T* from, int n) {
  memcpy(block, from, n * sizeof(T));
  for (int i = n; i < kBlock; ++i) block[i] = from[0];
}

// Where a chunk of a parameter lies.
struct ParamPlace {
  const AdamTensor& tensor;
  AdamRounding rounding;
  int64_t first, n;
  float step;  // its number
};

template <class P>
struct Nearest {
  struct Memory {};  // of a chunk
  struct Copy {
    P param[kBlock];
    Copy(const Nearest& from, int n) { copy_filled(param, from.param, n); }
    Nearest block() { return {param}; }
    void write(const Nearest& to, int n) const { memcpy(to.param, param, n * sizeof(P)); }
  };
  static Nearest at(const ParamPlace& place, Memory&) { return {address<P>(place.tensor.param, place.first)}; }

  P* param;

  Nearest from(int64_t c) const { return {param + c}; }
  template <class Lanes>
  ONETRIP_INLINE F load(int64_t c, Lanes lanes) const {
    return ONETRIP_LEVEL::load(param + c, lanes);
  }
  template <class Lanes>
  ONETRIP_INLINE void store(int64_t c, F v, Lanes lanes) const {
    store_rounded(param + c, v, lanes);
  }
};

template <class P>
struct Master {
  struct Memory {};
  struct Copy {
    P param[kBlock];
    int16_t residual[kBlock];
    int residual_bits;
    Copy(const Master& from, int n) : residual_bits(from.residual_bits) {
      copy_filled(param, from.param, n);
      if (residual_bits == 16) {
        copy_filled(residual, reinterpret_cast<const int16_t*>(from.residual), n);
      } else {
        copy_filled(reinterpret_cast<char*>(residual), from.residual, n);
      }
    }
    Master block() { return {param, reinterpret_cast<char*>(residual), residual_bits}; }
    void write(const Master& to, int n) const {
      memcpy(to.param, param, n * sizeof(P));
      memcpy(to.residual, residual, n * residual_bits / 8);
    }
  };
  static Master at(const ParamPlace& place, Memory&) {
    const int bits = place.rounding == AdamRounding::kResidual16 ? 16 : 8;
    return {address<P>(place.tensor.param, place.first), address<char>(place.tensor.residual, place.first * bits / 8),
            bits};
  }

  P* param;
  char* residual;  // int8 or int16
  int residual_bits;

  Master from(int64_t c) const { return {param + c, residual + c * residual_bits / 8, residual_bits}; }
  template <class Lanes>
  ONETRIP_INLINE F load(int64_t c, Lanes lanes) const {
    return residual_bits == 16 ? load_as<Signed16>(c, lanes) : load_as<Signed8>(c, lanes);
  }
  template <class Lanes>
  ONETRIP_INLINE void store(int64_t c, F v, Lanes lanes) const {
    residual_bits == 16 ? store_as<Signed16>(c, v, lanes) : store_as<Signed8>(c, v, lanes);
  }

 private:
  template <class Rest, class Lanes>
  ONETRIP_INLINE F load_as(int64_t c, Lanes lanes) const {
    constexpr int kBytes = sizeof(Rest) / kWidth;
    Rest rest = {};
    memcpy(&rest, residual + c * kBytes, count(lanes) * kBytes);
    return join(load_bits(param + c, lanes), __builtin_convertvector(rest, S), 8 * kBytes, P{});
  }
  template <class Rest, class Lanes>
  ONETRIP_INLINE void store_as(int64_t c, F v, Lanes lanes) const {
    constexpr int kBytes = sizeof(Rest) / kWidth;
    H weight;
    S units;
    split(v, 8 * kBytes, weight, units, P{});
    const S most = S{} + ((1 << (8 * kBytes - 1)) - 1);
    const Rest rest = __builtin_convertvector((S)select((U)(units > most), (U)most, (U)units), Rest);
    ONETRIP_LEVEL::store(param + c, weight, lanes);
    memcpy(residual + c * kBytes, &rest, count(lanes) * kBytes);
  }
};

struct Stochastic : Nearest<BFloat16> {
  struct Memory {
    uint16_t bits[kAdamChunk + kPhiloxBatch];
  };
  struct Copy : Nearest<BFloat16>::Copy {
    const uint16_t* bits;
    Copy(const Stochastic& from, int n) : Nearest<BFloat16>::Copy(from, n), bits(from.bits) {}
    Stochastic block() { return {{param}, bits}; }
  };
  static Stochastic at(const ParamPlace& place, Memory& memory) {
    const auto first = static_cast<uint64_t>(place.tensor.residual + place.first);
    draw_elements(memory.bits, static_cast<uint64_t>(place.tensor.key), static_cast<uint64_t>(place.step), first,
                  (place.n + kBlock - 1) / kBlock * kBlock, {});
    return {{address<BFloat16>(place.tensor.param, place.first)}, memory.bits};
  }

  const uint16_t* bits;

  Stochastic from(int64_t c) const { return {{param + c}, bits + c}; }
  template <class Lanes>
  ONETRIP_INLINE void store(int64_t c, F v, Lanes lanes) const {
    const U random = __builtin_convertvector(load_bits(bits + c, All{}), U);
    const U rounded = select(is_nan(v), splat_bits(0x7FC00000u), (U)v + random);
    ONETRIP_LEVEL::store(param + c, __builtin_convertvector(rounded >> 16, H), lanes);
  }
};

// Calls body with a value of the type of a kind's parameters.
template <class Body>
ONETRIP_INLINE auto with_param(const AdamKind& kind, Body body) {
  if (kind.rounding == AdamRounding::kStochastic) return body(Stochastic{});
  if (kind.rounding != AdamRounding::kNearest)
    return kind.param_dtype == DType::kFloat16 ? body(Master<Float16>{}) : body(Master<BFloat16>{});
  return with_type(kind.param_dtype, [&](auto param) { return body(Nearest<decltype(param)>{}); });
}

}  // namespace
}  // namespace onetrip::ONETRIP_LEVEL
