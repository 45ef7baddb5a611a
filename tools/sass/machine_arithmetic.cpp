// Arithmetic of machine.h, comparisons and conversions. Compile with
// -frounding-math.
#include <algorithm>
#include <cfenv>
#include <functional>
#include <limits>

#include "machine_instructions.h"

namespace machine {
namespace {

int error_ulps = 0;

template <typename T>
T lesser(bool least, T a, T b) {
  return least ? std::min(a, b) : std::max(a, b);
}

}  // namespace

uint32_t extreme(bool is_signed, bool least, uint32_t a, uint32_t b) {
  const auto as_signed = [](uint32_t x) { return static_cast<int32_t>(x); };
  return is_signed ? static_cast<uint32_t>(lesser(least, as_signed(a), as_signed(b))) : lesser(least, a, b);
}

namespace {

template <typename T>
bool compares(const Instruction& i, T a, T b) {
  const bool unordered = a != a || b != b;
  if (i.is(kNUM)) return !unordered;
  if (i.is(kNAN)) return unordered;
  if (i.is(kLT)) return a < b;
  if (i.is(kEQ)) return a == b;
  if (i.is(kLE)) return a <= b;
  if (i.is(kGT)) return a > b;
  if (i.is(kNE)) return a < b || a > b;
  if (i.is(kGE)) return a >= b;
  if (i.is(kLTU)) return unordered || a < b;
  if (i.is(kEQU)) return unordered || a == b;
  if (i.is(kLEU)) return unordered || a <= b;
  if (i.is(kGTU)) return unordered || a > b;
  if (i.is(kNEU)) return unordered || a != b;
  if (i.is(kGEU)) return unordered || a >= b;
  fail("a comparison");
}

void set_compared(Thread& t, const Instruction& i, bool result) {
  const bool other = t.p(i[4]);
  const auto joined = [&](bool x) { return i.is(kAND) ? x && other : i.is(kOR) ? x || other : x != other; };
  t.set_p(i[0], joined(result)), t.set_p(i[1], joined(!result));
}

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
// An operand of an instruction on float32, and its result, to be set.
float float_operand(const Thread& t, const Instruction& i, size_t k) {
  return i.is(kFTZ) ? flushed(t.f(i[k])) : t.f(i[k]);
}
void set_float(Thread& t, const Instruction& i, float result) { t.set(i[0], i.is(kFTZ) ? flushed(result) : result); }

class Rounding {
 public:
  explicit Rounding(const Instruction& i) {
    std::fesetround(i.is(kRM) ? FE_DOWNWARD : i.is(kRP) ? FE_UPWARD : i.is(kRZ) ? FE_TOWARDZERO : FE_TONEAREST);
  }
  ~Rounding() { std::fesetround(FE_TONEAREST); }
};

uint32_t bf16_of(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
uint32_t f16_of(float x) { return x != x ? 0x7FFF : std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
float from_f16(uint32_t bits) { return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits))); }

// The half that begins at bit `shift` of a register with two of them; .H0_H0 and .H1_H1 are one half twice.
float half(const Thread& t, const Instruction& i, const Operand& o, int shift) {
  if (o.kind != Operand::kRegister || o.absolute || (o.is_part() && o.n_bits != 16)) fail("a pair of halves");
  const uint32_t bits = t.reg(o.index) >> (o.is_part() ? o.first_bit : shift) & 0xFFFF;
  const float value = i.is(kBF16_V2) ? std::bit_cast<float>(bits << 16) : from_f16(bits);
  return o.negative ? -value : value;
}

// operation(a, b) of two pairs of halves, rounded once: a float's 24 bits are more than twice a half's, and two more.
// (A subnormal product of bfloat16 is rounded twice.)
template <typename Operation>
uint32_t of_halves(const Thread& t, const Instruction& i, const Operand& a, const Operand& b, Operation operation) {
  const auto convert = i.is(kBF16_V2) ? bf16_of : f16_of;
  const auto result = [&](int shift) { return convert(operation(half(t, i, a, shift), half(t, i, b, shift))); };
  return result(16) << 16 | result(0);
}
uint32_t sums_of_halves(const Thread& t, const Instruction& i, const Operand& a, const Operand& b) {
  return of_halves(t, i, a, b, std::plus<>{});
}
uint32_t products_of_halves(const Thread& t, const Instruction& i, const Operand& a, const Operand& b) {
  return of_halves(t, i, a, b, std::multiplies<>{});
}

// Two predicates: of the low halves and of the high ones.
void compare_halves(Thread& t, const Instruction& i) {
  if (!i.is(kAND)) fail("a comparison of halves");
  const auto holds = [&](int shift) { return compares(i, half(t, i, i[2], shift), half(t, i, i[3], shift)); };
  const bool other = t.p(i[4]), low = holds(0), high = holds(16);
  t.set_p(i[0], low && other), t.set_p(i[1], high && other);
}

float approximate(const Instruction& i, float x) {
  float result = NAN;
  if (i.is(kEX2)) {
    result = flushed(std::exp2(flushed(x)));
  } else if (i.is(kRCP)) {
    result = flushed(1.0f / flushed(x));
  } else if (i.is(kRSQ)) {
    result = 1.0f / std::sqrt(flushed(x));
  } else if (i.is(kLG2)) {
    result = std::log2(flushed(x));
  } else if (i.is(kSQRT)) {
    result = std::sqrt(flushed(x));
  } else {
    fail("MUFU");
  }
  for (int n = error_ulps; n != 0 && std::isfinite(result) && result != 0; n += n < 0 ? 1 : -1)
    result = std::nextafter(result, n < 0 ? -INFINITY : INFINITY);
  return result;
}

template <typename T, typename U>
T saturated(U x) {
  if (x != x) return sizeof(T) == 8 ? static_cast<T>(uint64_t{1} << 63) : T{0};
  if (x <= static_cast<U>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return x >= static_cast<U>(std::numeric_limits<T>::max()) ? std::numeric_limits<T>::max() : static_cast<T>(x);
}

template <typename T>
T rounded(const Instruction& i, T x) {
  return i.is(kTRUNC) ? std::trunc(x) : i.is(kFLOOR) ? std::floor(x) : i.is(kCEIL) ? std::ceil(x) : std::nearbyint(x);
}

// IADD3, IMAD, LEA: a destination, predicates that take the carries, and the
// rest.
struct WithCarries {
  const Instruction& i;
  size_t first = 1;
  explicit WithCarries(const Instruction& instruction) : i(instruction) {
    while (is_predicate(i[first])) ++first;
  }
  const Operand& operator[](size_t k) const { return i[first + k]; }
  bool has(size_t k) const { return first + k < i.operands.size(); }
  void set_carries(Thread& t, uint64_t carry) const {
    for (size_t k = 1; k < first; ++k) t.set_p(i[k], carry >= k);
  }
  // The carries that come in, from operand k on.
  unsigned carries(const Thread& t, size_t k) const {
    unsigned sum = 0;
    for (; i.is(kX) && has(k); ++k) sum += t.p((*this)[k]);
    return sum;
  }
};

void add(Thread& t, const Instruction& i) {
  const WithCarries o(i);
  uint64_t sum = o.carries(t, 3);
  for (size_t k = 0; k < 3; ++k) sum += i.is(kX) ? t.u(o[k]) : t.carrying(o[k]);
  o.set_carries(t, sum >> 32);
  t.set(i[0], static_cast<uint32_t>(sum));
}

void multiply_add(Thread& t, const Instruction& i) {
  const WithCarries o(i);
  const unsigned carry = o.carries(t, 3);
  if (!i.is(kWIDE) && !i.is(kHI)) {
    if (o.first > 1) fail("carry of a product's low word");
    return t.set(i[0], t.u(o[0]) * t.u(o[1]) + t.u(o[2]) + carry);
  }
  const bool is_signed = !i.is(kU32);
  const uint64_t product =
      is_signed ? static_cast<uint64_t>(int64_t{t.s(o[0])} * t.s(o[1])) : uint64_t{t.u(o[0])} * t.u(o[1]);
  if (o[2].negative && (o.first > 1 || i.is(kX) || i.is(kHI))) fail("carry of a negated addend");
  const unsigned __int128 sum = static_cast<unsigned __int128>(product) + t.signed_u64(o[2]) + carry;
  if (o.first > 1 && is_signed) fail("carry of a signed product");
  o.set_carries(t, static_cast<uint64_t>(sum >> 64));
  if (i.is(kHI)) return t.set(i[0], static_cast<uint32_t>(sum >> 32));
  t.set64(i[0], static_cast<uint64_t>(sum));
}

void scaled_add(Thread& t, const Instruction& i) {
  const WithCarries o(i);
  uint64_t sum = 0;
  if (!i.is(kHI)) {
    sum = static_cast<uint32_t>(uint64_t{t.u(o[0])} << t.u(o[2])) + t.carrying(o[1]) + o.carries(t, 3);
  } else {
    const bool extends = i.is(kSX32);
    const uint64_t value = extends ? static_cast<uint64_t>(int64_t{t.s(o[0])}) : uint64_t{t.u(o[2])} << 32 | t.u(o[0]);
    const uint32_t shift = t.u(o[extends ? 2 : 3]);
    sum = static_cast<uint32_t>(value << shift >> 32) + t.carrying(o[1]) + o.carries(t, extends ? 3 : 4);
  }
  o.set_carries(t, sum >> 32);
  t.set(i[0], static_cast<uint32_t>(sum));
}

void shift(Thread& t, const Instruction& i) {
  const uint32_t low = t.u(i[1]), high = t.u(i[3]);
  uint32_t n = t.u(i[2]);
  const bool wide = i.is(kU64) || i.is(kS64);
  if (i.is(kW)) n &= wide ? 63 : 31;
  n = std::min<uint32_t>(n, 127);
  unsigned __int128 value = uint64_t{high} << 32 | low;
  uint64_t result = 0;
  if (i.is(kL)) {
    result = static_cast<uint64_t>((n < 64 ? value << n : 0));
    return t.set(i[0], static_cast<uint32_t>(i.is(kHI) ? result >> 32 : result));
  }
  if (i.is(kHI) && !wide) {  // the high word alone
    n = std::min<uint32_t>(n, 63);
    return t.set(i[0],
                 static_cast<uint32_t>(i.is(kS32) ? int64_t{static_cast<int32_t>(high)} >> n : int64_t{high} >> n));
  }
  const bool is_signed = i.is(kS64) || i.is(kS32);
  const __int128 extended =
      is_signed ? static_cast<__int128>(static_cast<int64_t>(value)) : static_cast<__int128>(value);
  const auto shifted = static_cast<uint64_t>(extended >> n);
  t.set(i[0], static_cast<uint32_t>(i.is(kHI) ? shifted >> 32 : shifted));
}

void logic(Thread& t, const Instruction& i) {
  const size_t first = is_predicate(i[0]) ? 1 : 0;
  const uint32_t a = t.u(i[first + 1]), b = t.u(i[first + 2]), c = t.u(i[first + 3]), table = t.u(i[first + 4]);
  uint32_t result = 0;
  for (unsigned row = 0; row < 8; ++row) {
    if (table >> row & 1) result |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
  }
  if (first == 1) t.set_p(i[0], result != 0 || t.p(i[first + 5]));
  t.set(i[first], result);
}

void predicate_logic(Thread& t, const Instruction& i) {
  const unsigned row = t.p(i[2]) * 4u + t.p(i[3]) * 2u + t.p(i[4]);
  const bool first = t.u(i[5]) >> row & 1, second = t.u(i[6]) >> row & 1;
  t.set_p(i[0], first), t.set_p(i[1], second);
}

void compare_integers(Thread& t, const Instruction& i) {
  bool result = i.is(kU32) ? compares(i, t.u(i[2]), t.u(i[3])) : compares(i, t.s(i[2]), t.s(i[3]));
  if (i.is(kEX)) {  // of high words: equal ones leave it to the low ones
    const bool equal = t.u(i[2]) == t.u(i[3]), low = t.p(i[5]);
    if (equal) result = i.is(kNE) || i.is(kEQ) || i.is(kLT) || i.is(kLE) || i.is(kGT) || i.is(kGE) ? low : result;
  }
  set_compared(t, i, result);
}

void permute(Thread& t, const Instruction& i) {
  const uint64_t bytes = uint64_t{t.u(i[3])} << 32 | t.u(i[1]);
  const uint32_t selector = t.u(i[2]);
  uint32_t result = 0;
  for (unsigned k = 0; k < 4; ++k) {
    const uint32_t digit = selector >> (4 * k) & 15;
    uint32_t byte = static_cast<uint32_t>(bytes >> ((digit & 7) * 8)) & 0xFF;
    if (digit & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << (8 * k);
  }
  t.set(i[0], result);
}

void pack_predicates(Thread& t, const Instruction& i, uint32_t predicates) {
  const uint32_t mask = t.u(i[3]);
  t.set(i[0], (predicates & mask) | (t.u(i[2]) & ~mask));
}

void float_extreme(Thread& t, const Instruction& i) {
  float a = float_operand(t, i, 1), b = float_operand(t, i, 2);
  const bool least = t.p(i[3]), has_nan = a != a || b != b;
  if (a != a) a = b;
  if (b != b) b = a;
  float result = i.is(kNAN) && has_nan ? NAN : lesser(least, a, b);
  if (a == b && std::signbit(a) != std::signbit(b)) result = least ? -0.0f : 0.0f;  // -0 < +0
  // The extreme of magnitudes gets the exclusive or of the signs before |.|.
  if (i.is(kXORSIGN))
    result = std::copysign(result, std::signbit(t.signed_f(i[1])) != std::signbit(t.signed_f(i[2])) ? -1.0f : 1.0f);
  t.set(i[0], result);
}

void integer_extreme(Thread& t, const Instruction& i) {
  t.set(i[0], extreme(!i.is(kU32), t.p(i[3]), t.u(i[1]), t.u(i[2])));
}

// Whether a / b needs more care than a few operations on normal numbers.
bool needs_care(float a, float b) {
  int exponent_a = 0, exponent_b = 0;
  std::frexp(a, &exponent_a), std::frexp(b, &exponent_b);
  const bool normal = std::isfinite(a) && std::isfinite(b) && a != 0 && b != 0;
  return !normal || exponent_a < -100 || exponent_b < -120 || exponent_b > 120 ||
         std::abs(exponent_a - exponent_b) > 120;
}

// Products of unsigned bytes of b with the bytes, or the halves, of a.
void dot_product(Thread& t, const Instruction& i) {
  const uint32_t a = t.u(i[1]), b = t.u(i[2]) >> (i.is(kHI) ? 16 : 0);
  const unsigned n = i.is(k4A) ? 4 : 2, bits = 32 / n;
  uint32_t sum = t.u(i[3]);
  for (unsigned k = 0; k < n; ++k) sum += (a >> (bits * k) & ((1u << bits) - 1)) * (b >> (8 * k) & 0xFF);
  t.set(i[0], sum);
}

using T = Thread;
using I = Instruction;

}  // namespace

void set_error(int ulps) { error_ulps = ulps; }

void add_arithmetic(Handlers& table) {
  static const char* const kCompare = "LT EQ LE GT NE GE LTU EQU LEU GTU NEU GEU NUM NAN AND OR XOR FTZ";
  // clang-format off
  const Handlers rows = {
      {"IADD3", {"X", add}},
      {"IMAD", {"MOV IADD SHL U32 WIDE HI X", multiply_add}},
      {"LEA", {"HI X SX32", scaled_add}},
      {"SHF", {"L R W U32 S32 U64 S64 HI", shift}},
      {"LOP3", {"LUT", logic}},
      {"PLOP3", {"LUT", predicate_logic}},
      {"ISETP", {"LT EQ LE GT NE GE U32 EX AND OR XOR", compare_integers}},
      {"IDP", {"4A 2A LO HI U8 U16", dot_product}},
      {"PRMT", {"", permute}},
      {"SEL", {"", [](T& t, const I& i) { t.set(i[0], t.u(i[t.p(i[3]) ? 1 : 2])); }}},
      {"IABS", {"", [](T& t, const I& i) { t.set(i[0], static_cast<uint32_t>(std::abs(int64_t{t.s(i[1])}))); }}},
      {"VIADD", {"", [](T& t, const I& i) { t.set(i[0], t.u(i[1]) + t.u(i[2])); }}},
      {"VIMNMX", {"U32", integer_extreme}},
      {"IMNMX", {"U32", integer_extreme}},  // its name before sm_90
      {"VIADDMNMX", {"U32", [](T& t, const I& i) {
         t.set(i[0], extreme(!i.is(kU32), t.p(i[4]), t.u(i[1]) + t.u(i[2]), t.u(i[3])));
       }}},
      {"VIMNMX3", {"U32", [](T& t, const I& i) {
         const bool is_signed = !i.is(kU32), least = t.p(i[4]);
         t.set(i[0], extreme(is_signed, least, extreme(is_signed, least, t.u(i[1]), t.u(i[2])), t.u(i[3])));
       }}},
      {"SGXT", {"U32", [](T& t, const I& i) {  // the low bits, extended
         const uint32_t n = t.u(i[2]);
         if (n == 0 || n > 31) fail("a field of so many bits");
         const uint32_t field = t.u(i[1]) << (32 - n);
         t.set(i[0], i.is(kU32) ? field >> (32 - n) : static_cast<uint32_t>(static_cast<int32_t>(field) >> (32 - n)));
       }}},
      {"P2R", {"", [](T& t, const I& i) { pack_predicates(t, i, t.warp.p[t.lane]); }}},
      {"UP2UR", {"", [](T& t, const I& i) { pack_predicates(t, i, t.warp.up); }}},
      {"R2P", {"", [](T& t, const I& i) {
         const uint32_t mask = t.u(i[2]) & 0x7F;
         t.warp.p[t.lane] = static_cast<uint8_t>((t.warp.p[t.lane] & ~mask) | (t.u(i[1]) & mask));
       }}},

      {"FADD", {"FTZ", [](T& t, const I& i) { set_float(t, i, float_operand(t, i, 1) + float_operand(t, i, 2)); }}},
      {"FMUL", {"FTZ", [](T& t, const I& i) { set_float(t, i, float_operand(t, i, 1) * float_operand(t, i, 2)); }}},
      {"FFMA", {"FTZ RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         set_float(t, i, std::fma(float_operand(t, i, 1), float_operand(t, i, 2), float_operand(t, i, 3)));
       }}},
      {"FSETP", {kCompare, [](T& t, const I& i) {
         set_compared(t, i, compares(i, float_operand(t, i, 2), float_operand(t, i, 3)));
       }}},
      {"HSETP2", {"BF16_V2 LT EQ LE GT NE GE LTU EQU LEU GTU NEU GEU AND", compare_halves}},
      {"FSEL", {"", [](T& t, const I& i) {  // a NaN stays as it is
         t.set(i[0], std::bit_cast<uint32_t>(t.f(i[t.p(i[3]) ? 1 : 2])));
       }}},
      {"FMNMX", {"FTZ NAN XORSIGN", float_extreme}},
      {"FCHK", {"", [](T& t, const I& i) { t.set_p(i[0], needs_care(t.f(i[1]), t.f(i[2]))); }}},
      {"MUFU", {"EX2 LG2 RCP RSQ SQRT RCP64H RSQ64H", [](T& t, const I& i) {
         if (!i.is(kRCP64H) && !i.is(kRSQ64H)) return t.set(i[0], approximate(i, t.f(i[1])));
         const auto value = std::bit_cast<double>(uint64_t{t.u(i[1])} << 32);  // of the high word, the high word
         const double result = i.is(kRCP64H) ? 1 / value : 1 / std::sqrt(value);
         t.set(i[0], static_cast<uint32_t>(std::bit_cast<uint64_t>(result) >> 32));
       }}},
      {"F2FP", {"BF16 F16 F32 PACK_AB", [](T& t, const I& i) {
         const auto convert = i.is(kBF16) ? bf16_of : f16_of;
         t.set(i[0], convert(t.f(i[1])) << 16 | convert(t.f(i[2])));
       }}},
      {"HADD2", {"F32 BF16_V2", [](T& t, const I& i) {  // a half, unpacked: -0 is added, behind it before sm_80
         if (!i.is(kF32)) return t.set(i[0], sums_of_halves(t, i, i[1], i[2]));
         const auto is_none = [](const Operand& o) { return o.index == kZero && o.negative; };
         const Operand& half = i[is_none(i[1]) ? 2 : 1];
         if (!(is_none(i[1]) || is_none(i[2])) || half.kind != Operand::kRegister) fail("a sum of halves");
         t.set(i[0], Thread::with_signs(half, from_f16(t.plain(half))));
       }}},
      {"HMUL2", {"BF16_V2", [](T& t, const I& i) { t.set(i[0], products_of_halves(t, i, i[1], i[2])); }}},
      {"HFMA2", {"MMA BF16_V2", [](T& t, const I& i) {  // two halves: as a constant, magnitudes, sums, products
         if (i[2].kind == Operand::kNumber) {
           if (i[2].number != 1 || i[3].number != 1) fail("products of halves");
           return t.set(i[0], sums_of_halves(t, i, i[1], i[4]));
         }
         const auto is_none = [](const Operand& o) { return o.index == kZero && o.negative; };
         if (i[1].index != kZero && is_none(i[3])) return t.set(i[0], products_of_halves(t, i, i[1], i[2]));
         if (!is_none(i[1]) || i[2].index != kZero) fail("products of halves");
         if (i.is(kBF16_V2)) {
           if (!i[3].absolute || i[3].negative || i[3].is_part()) fail("products of halves");
           const auto magnitude = [](uint32_t bits) { return (bits & 0x7FFF) > 0x7F80 ? 0x7FFFu : bits & 0x7FFF; };
           return t.set(i[0], magnitude(t.plain(i[3]) >> 16) << 16 | magnitude(t.plain(i[3])));
         }
         t.set(i[0], f16_of(t.f(i[3])) << 16 | f16_of(t.f(i[4])));
       }}},
      {"I2FP", {"F32 S32 U32", [](T& t, const I& i) {
         t.set(i[0], i.is(kU32) ? static_cast<float>(t.u(i[1])) : static_cast<float>(t.s(i[1])));
       }}},
      {"I2F", {"RP RM RZ U32 S32 U64 S64 F64", [](T& t, const I& i) {
         const Rounding rounding(i);
         const bool wide = i.is(kU64) || i.is(kS64);
         const uint64_t bits = wide ? t.u64(i[1]) : i.is(kU32) ? t.u(i[1]) : static_cast<uint64_t>(int64_t{t.s(i[1])});
         const bool is_unsigned = i.is(kU32) || i.is(kU64);
         const auto convert = [&](auto zero) {
           using To = decltype(zero);
           return is_unsigned ? static_cast<To>(bits) : static_cast<To>(static_cast<int64_t>(bits));
         };
         if (i.is(kF64)) return t.set(i[0], convert(0.0));
         t.set(i[0], convert(0.0f));
       }}},
      {"F2I", {"FTZ U32 S32 U64 S64 TRUNC FLOOR CEIL NTZ", [](T& t, const I& i) {
         const float x = rounded(i, float_operand(t, i, 1));
         if (i.is(kU64)) return t.set64(i[0], saturated<uint64_t>(x));
         if (i.is(kS64)) return t.set64(i[0], static_cast<uint64_t>(saturated<int64_t>(x)));
         t.set(i[0], i.is(kU32) ? saturated<uint32_t>(x) : static_cast<uint32_t>(saturated<int32_t>(x)));
       }}},
      {"F2F", {"F32 F64 BF16 F16", [](T& t, const I& i) {
         if (i.opcode == "F2F.F64.F32") return t.set(i[0], static_cast<double>(t.f(i[1])));
         if (i.opcode == "F2F.F32.F64") return t.set(i[0], static_cast<float>(t.d(i[1])));
         const bool is_bf16 = i.opcode == "F2F.BF16.F32";
         if (!is_bf16 && i.opcode != "F2F.F16.F32") fail("a conversion");
         t.set(i[0], (is_bf16 ? bf16_of : f16_of)(t.f(i[1])) | 0xFFFF0000);  // the upper half: unknown
       }}},
      {"FRND", {"F64 TRUNC FLOOR CEIL", [](T& t, const I& i) {
         if (i.is(kF64)) return t.set(i[0], rounded(i, t.d(i[1])));
         t.set(i[0], rounded(i, t.f(i[1])));
       }}},
      {"DADD", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], t.d(i[1]) + t.d(i[2]));
       }}},
      {"DMUL", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], t.d(i[1]) * t.d(i[2]));
       }}},
      {"DFMA", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], std::fma(t.d(i[1]), t.d(i[2]), t.d(i[3])));
       }}},
      {"DSETP", {kCompare, [](T& t, const I& i) { set_compared(t, i, compares(i, t.d(i[2]), t.d(i[3]))); }}},
  };
  // clang-format on
  table.insert(rows.begin(), rows.end());
}

}  // namespace machine
