// Instructions of machine.h: as nvdisasm prints them, and in parts.
#pragma once
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace machine {

constexpr int kZero = 255, kUniformZero = 63, kTrue = 7;  // RZ, URZ, PT
constexpr unsigned kInstructionBytes = 16;

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// clang-format off
#define ONETRIP_MODIFIERS(F)                                                                                        \
  F(FTZ) F(RM) F(RP) F(RZ) F(X) F(WIDE) F(HI) F(L) F(R) F(W) F(U8) F(S8) F(U16) F(S16) F(U32) F(S32) F(U64) F(S64)  \
  F(F16) F(F32) F(F64) F(BF16) F(64) F(128) F(EX) F(AND) F(OR) F(XOR) F(LT) F(EQ) F(LE) F(GT) F(NE) F(GE) F(LTU)    \
  F(EQU) F(LEU) F(GTU) F(NEU) F(GEU) F(NUM) F(NAN) F(SX32) F(MOV) F(IADD) F(SHL) F(LUT) F(E) F(CONSTANT) F(BYPASS)  \
  F(BFLY) F(IDX) F(UP) F(DOWN) F(ANY) F(ALL) F(TRUNC) F(FLOOR) F(CEIL) F(NTZ) F(PACK_AB) F(MMA) F(XORSIGN) F(EX2)   \
  F(LG2) F(RCP) F(RSQ) F(SQRT) F(RCP64H) F(RSQ64H) F(SYNC) F(DEFER_BLOCKING) F(REL) F(NOINC) F(NODEC) F(DIV)        \
  F(EXCH) F(ARRIVE) F(TRANS64) F(PHASECHK) F(TRYWAIT) F(VIEW) F(ASYNC) F(S) F(IVALL) F(MIN) F(MAX) F(SUM) F(4A) F(EF) \
  F(2A) F(LO) F(16) F(M88) F(MT88) F(2) F(4) F(LU) F(BF16_V2) F(SYS) F(U) F(32) F(CLEAR)
// clang-format on

enum Modifier {
#define ONETRIP_NAME(name) k##name,
  ONETRIP_MODIFIERS(ONETRIP_NAME)
#undef ONETRIP_NAME
      kModifiers
};
using Modifiers = std::bitset<kModifiers>;

// True where all are known, and added to the set.
bool add_modifiers(const std::string& text, char separator, Modifiers& set);

struct Operand {
  enum Kind { kRegister, kUniform, kPredicate, kUniformPredicate, kNumber, kConstant, kMemory, kName };
  struct Term {
    Kind kind;
    int index;
    bool wide;       // a pair of registers
    unsigned shift;  // left: .X4
  };
  Kind kind = kName;
  int index = 0;
  bool negative = false, absolute = false, inverted = false;
  int first_bit = 0, n_bits = 32;  // of a register: all, a half or a byte
  bool is_part() const { return n_bits != 32; }
  bool is_decimal = false;
  uint64_t bits = 0;
  double number = 0;
  int bank = 0;
  int64_t offset = 0;
  std::vector<Term> terms;
  std::string name;
};

struct Thread;
class Warp;
struct Instruction;
using OfThread = void (*)(Thread&, const Instruction&);
using OfWarp = void (*)(Warp&, const Instruction&, uint32_t lanes);

struct Instruction {
  std::string text, opcode, base;
  Operand guard;
  bool is_guarded = false, is_uniform = false;
  std::vector<Operand> operands;
  Modifiers modifiers;
  int target = -1;
  OfThread of_thread = nullptr;
  OfWarp of_warp = nullptr;
  uint64_t count = 0;

  bool is(Modifier modifier) const { return modifiers[modifier]; }
  const Operand& operator[](size_t i) const {
    if (i >= operands.size()) fail("too few operands");
    return operands[i];
  }
};

// "@!P0 IADD3 R0, P1, R2, -UR4, RZ"; a label stays a name.
Instruction parse_instruction(const std::string& text);

std::string trimmed(const std::string& text);

// What differs between architectures, beside the instructions.
struct Layout {
  size_t parameters;     // where they begin in c[0x0]
  uint32_t shared_base;  // where a block's own shared memory begins, above the system's
};
Layout layout_of(unsigned arch);

struct Code {
  std::vector<Instruction> instructions;
  size_t static_shared = 0;
  std::vector<uint8_t> jump_tables;  // c[0x2]
};

}  // namespace machine
