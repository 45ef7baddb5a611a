// The loader, the instructions and the scheduler of machine.h. Compile with -frounding-math.
#include "machine.h"

#include <elf.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <functional>
#include <iterator>
#include <random>
#include <sstream>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>
#include <vector>

// Of AddressSanitizer, in a program that runs under it.
extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void* begin, size_t size);

namespace machine {
namespace {

constexpr unsigned kLanes = 32, kBarriers = 16, kConvergenceBarriers = 16, kInstructionBytes = 16;
constexpr int kZero = 255, kUniformZero = 63, kTrue = 7;  // RZ, URZ, PT
constexpr uint32_t kSharedBase = 0x400;                   // the system's kibibyte lies below a block's own
constexpr unsigned kRankBit = 24;                         // of an address in the shared memory of a cluster
constexpr uint32_t kNan = 0x7FFFFFFF;                     // of arithmetic
constexpr uint64_t kMostSpins = 1000000;
constexpr size_t kParameters = 0x210, kLocalBytes = 4096;

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

// clang-format off
#define ONETRIP_MODIFIERS(F)                                                                                        \
  F(FTZ) F(RM) F(RP) F(RZ) F(X) F(WIDE) F(HI) F(L) F(R) F(W) F(U8) F(S8) F(U16) F(S16) F(U32) F(S32) F(U64) F(S64)  \
  F(F16) F(F32) F(F64) F(BF16) F(64) F(128) F(EX) F(AND) F(OR) F(XOR) F(LT) F(EQ) F(LE) F(GT) F(NE) F(GE) F(LTU)    \
  F(EQU) F(LEU) F(GTU) F(NEU) F(GEU) F(NUM) F(NAN) F(SX32) F(MOV) F(IADD) F(SHL) F(LUT) F(E) F(CONSTANT) F(BYPASS)  \
  F(BFLY) F(IDX) F(UP) F(DOWN) F(ANY) F(ALL) F(TRUNC) F(FLOOR) F(CEIL) F(NTZ) F(PACK_AB) F(MMA) F(XORSIGN) F(EX2)   \
  F(LG2) F(RCP) F(RSQ) F(SQRT) F(RCP64H) F(RSQ64H) F(SYNC) F(DEFER_BLOCKING) F(REL) F(NOINC) F(NODEC) F(DIV)        \
  F(EXCH) F(ARRIVE) F(TRANS64) F(PHASECHK) F(TRYWAIT) F(VIEW) F(ASYNC) F(S) F(IVALL) F(MIN) F(MAX) F(SUM) F(4A)     \
  F(2A) F(LO) F(16) F(M88) F(2) F(4) F(LU) F(BF16_V2)
// clang-format on

enum Modifier {
#define ONETRIP_NAME(name) k##name,
  ONETRIP_MODIFIERS(ONETRIP_NAME)
#undef ONETRIP_NAME
      kModifiers
};
const char* const kModifierNames[] = {
#define ONETRIP_NAME(name) #name,
    ONETRIP_MODIFIERS(ONETRIP_NAME)
#undef ONETRIP_NAME
};
using Modifiers = std::bitset<kModifiers>;

// True where all are known, and added to the set.
bool add_modifiers(const std::string& text, char separator, Modifiers& set) {
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, separator);) {
    const auto end = std::end(kModifierNames), found = std::find(std::begin(kModifierNames), end, word);
    if (found == end) return false;
    set.set(static_cast<size_t>(found - kModifierNames));
  }
  return true;
}

struct Operand {
  enum Kind { kRegister, kUniform, kPredicate, kUniformPredicate, kNumber, kConstant, kMemory, kName };
  struct Term {
    Kind kind;
    int index;
    bool wide;  // a pair of registers
  };
  Kind kind = kName;
  int index = 0;
  bool negative = false, absolute = false, inverted = false;
  bool is_part = false;  // of a register: a half or a byte
  int first_bit = 0;
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

// --- The text that nvdisasm prints.

bool parse_register(const std::string& text, Operand::Kind& kind, int& index) {
  size_t digits = 1;
  bool is_predicate = false;
  if (text.rfind("UR", 0) == 0 || text.rfind("UP", 0) == 0) digits = 2;
  is_predicate = text[digits - 1] == 'P';
  if (text.size() <= digits || (text[digits - 1] != 'R' && !is_predicate)) return false;
  const std::string rest = text.substr(digits);
  const bool none = rest == (is_predicate ? "T" : "Z");
  if (!none && rest.find_first_not_of("0123456789") != std::string::npos) return false;
  if (digits == 2) {
    kind = is_predicate ? Operand::kUniformPredicate : Operand::kUniform;
  } else {
    kind = is_predicate ? Operand::kPredicate : Operand::kRegister;
  }
  index = none ? (is_predicate ? kTrue : digits == 2 ? kUniformZero : kZero) : std::stoi(rest);
  return true;
}

int64_t parse_integer(const std::string& text) {
  const bool negative = text[0] == '-';
  const auto value = static_cast<int64_t>(std::stoull(text.substr(negative || text[0] == '+'), nullptr, 16));
  return negative ? -value : value;
}

// R2.64+UR4+0x10
void parse_address(const std::string& text, Operand& operand) {
  std::string term;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && (i == 0 || (text[i] != '+' && (text[i] != '-' || text[i - 1] == '+')))) {
      term += text[i];
      continue;
    }
    if (term[0] == '+') term = term.substr(1);
    const size_t dot = term.find('.');
    Operand::Term parsed{};
    if (parse_register(term.substr(0, dot), parsed.kind, parsed.index)) {
      const std::string suffix = dot == std::string::npos ? "" : term.substr(dot);
      if (suffix != "" && suffix != ".64") fail("an address of " + text);
      parsed.wide = suffix == ".64";
      operand.terms.push_back(parsed);
    } else {
      operand.offset += parse_integer(term);
    }
    term = i < text.size() ? std::string(1, text[i]) : "";
  }
}

Operand parse_operand(std::string text) {
  Operand operand;
  if (text[0] == '`') {
    operand.name = text.substr(2, text.size() - 3);
    return operand;
  }
  if (text.rfind("desc[", 0) == 0) text = text.substr(text.find(']') + 1);
  if (text[0] == '-' && text.find_first_of("RUc|") == 1) operand.negative = true, text = text.substr(1);
  if (text[0] == '~' || text[0] == '!') operand.inverted = true, text = text.substr(1);
  if (text[0] == '|') operand.absolute = true, text.erase(std::remove(text.begin(), text.end(), '|'), text.end());
  if (text.rfind("c[", 0) == 0) {
    operand.kind = Operand::kConstant;
    operand.bank = static_cast<int>(parse_integer(text.substr(2, text.find(']') - 2)));
    const size_t open = text.find('[', 2);
    parse_address(text.substr(open + 1, text.size() - open - 2), operand);
    return operand;
  }
  if (text[0] == '[') {
    operand.kind = Operand::kMemory;
    parse_address(text.substr(1, text.size() - 2), operand);
    return operand;
  }
  std::string suffix, body = text;
  if (text.find_first_of("RU") == 0) {
    const size_t dot = text.find('.');
    suffix = dot == std::string::npos ? "" : text.substr(dot), body = text.substr(0, dot);
  }
  if (parse_register(body, operand.kind, operand.index)) {
    operand.is_part = suffix != "" && suffix != ".64";
    if (suffix == ".H0_H0" || suffix == ".H1_H1") {
      operand.first_bit = 16 * (suffix[2] - '0');
    } else if (suffix.size() == 3 && suffix[1] == 'B') {
      operand.first_bit = 8 * (suffix[2] - '0');
    } else if (suffix != "" && suffix != ".64") {
      fail("operand " + text);
    }
    return operand;
  }
  operand.name = text;
  if (text.find("0x") != std::string::npos && text.find_first_not_of("-0123456789abcdefx") == std::string::npos) {
    operand.kind = Operand::kNumber, operand.bits = static_cast<uint64_t>(parse_integer(text));
  } else if (text == "+INF" || text == "-INF") {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = text[0] == '+' ? INFINITY : -INFINITY;
  } else if (text == "+QNAN" || text == "-QNAN") {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = NAN;
  } else if (text.find_first_of("0123456789") <= 1 && text[0] != 'B' && text[0] != 'S') {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = std::strtod(text.c_str(), nullptr);
  }
  return operand;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

void find_handlers(Instruction& instruction);

// "@!P0 IADD3 R0, P1, R2, -UR4, RZ"; a label stays a name.
Instruction parse_instruction(const std::string& text) {
  Instruction instruction;
  instruction.text = text;
  std::string rest = text.substr(0, text.find("(*"));
  if (rest[0] == '@') {
    const size_t space = rest.find(' ');
    instruction.guard = parse_operand(rest.substr(1, space - 1)), instruction.is_guarded = true;
    rest = trimmed(rest.substr(space));
  }
  const size_t space = rest.find(' ');
  instruction.opcode = rest.substr(0, space);
  const size_t dot = instruction.opcode.find('.');
  instruction.base = instruction.opcode.substr(0, dot);
  std::string operands = space == std::string::npos ? "" : rest.substr(space);
  for (size_t found; (found = operands.find(".reuse")) != std::string::npos;) operands.erase(found, 6);
  std::istringstream words(operands);
  for (std::string word; std::getline(words, word, ',');) {
    std::istringstream parts(word);  // R52 -0x3e40
    for (std::string part; parts >> part;) instruction.operands.push_back(parse_operand(part));
  }
  find_handlers(instruction);
  return instruction;
}

struct Code {
  std::vector<Instruction> instructions;
  size_t static_shared = 0;
  std::vector<uint8_t> jump_tables;  // c[0x2]
};

// --- What runs.

struct Copy {
  uint32_t to;
  uint64_t from;
  size_t bytes;
};

// mbarrier
struct ByteBarrier {
  int64_t expected_arrivals = 0, arrivals = 0, bytes = 0;
  unsigned phase = 0;
};

struct Block {
  std::array<unsigned, 3> index{};
  unsigned rank = 0, n_threads = 0, n_live = 0;
  std::vector<uint8_t> shared;
  std::map<uint32_t, ByteBarrier> byte_barriers;
  std::array<unsigned, kBarriers> arrived{}, expected{};  // expected: 0 of all threads that have not ended
};

struct Running;  // a cluster of blocks

enum class Wait : uint8_t { kNone, kConvergence, kBlock, kCluster };

class Warp {
 public:
  Running* running = nullptr;
  Block* block = nullptr;
  unsigned first_thread = 0;
  uint32_t r[kLanes][256] = {};
  uint8_t p[kLanes] = {};
  uint32_t u[64] = {};
  uint8_t up = 0;
  uint32_t pc[kLanes] = {};
  uint32_t live = 0, blocked = 0;
  Wait wait[kLanes] = {};
  uint32_t wait_index[kLanes] = {};
  unsigned arrived_in[kLanes] = {};                      // which phase of the cluster's barrier
  uint32_t sets[kLanes][kConvergenceBarriers + 1] = {};  // the last one: of WARPSYNC
  std::vector<Copy> open_copies[kLanes];
  std::deque<std::vector<Copy>> copies[kLanes];
  std::vector<uint8_t> local[kLanes];
  bool yields = false;
  // of the instruction that runs
  std::vector<std::pair<uint64_t, unsigned>> global_accesses, shared_accesses;

  bool step();
  void block_lanes(uint32_t lanes, Wait why, uint32_t index);
  void release(unsigned lane) { wait[lane] = Wait::kNone, blocked &= ~(1u << lane); }
  void check_convergence();

 private:
  void account(const Instruction& instruction);
};

struct Running {
  const Launch& launch;
  Code& code;
  Counts& counts;
  const std::vector<uint8_t>& constants;  // c[0x0]
  const std::vector<uint8_t>& addresses;  // c[0x4]
  std::deque<Block> blocks;
  std::deque<Warp> warps;
  std::unordered_set<uint64_t>& loaded;
  std::unordered_set<uint64_t>& stored;
  unsigned cluster_arrived = 0, cluster_phase = 0;
  uint64_t n_spins = 0;  // waits for bytes in vain, one after another

  unsigned n_live() const {
    unsigned n = 0;
    for (const Block& block : blocks) n += block.n_live;
    return n;
  }
  void check_block_barrier(Block& block, unsigned index);
  void check_cluster_barrier();
};

struct Thread {
  Warp& warp;
  unsigned lane;

  uint32_t reg(int index) const { return index == kZero ? 0 : warp.r[lane][index]; }
  uint32_t uniform(int index) const { return index == kUniformZero ? 0 : warp.u[index]; }
  uint32_t word(Operand::Kind kind, int index) const { return kind == Operand::kUniform ? uniform(index) : reg(index); }
  uint64_t pair(Operand::Kind kind, int index) const {
    const bool none = index == (kind == Operand::kUniform ? kUniformZero : kZero);
    return none ? 0 : word(kind, index) | static_cast<uint64_t>(word(kind, index + 1)) << 32;
  }
  uint64_t address(const Operand& o) const {
    uint64_t sum = static_cast<uint64_t>(o.offset);
    for (const auto& term : o.terms) sum += term.wide ? pair(term.kind, term.index) : word(term.kind, term.index);
    return sum;
  }
  uint64_t constant(const Operand& o, size_t bytes) const {
    Running& running = *warp.running;
    const auto at = static_cast<uint32_t>(address(o));
    const auto& bank = o.bank == 0 ? running.constants : o.bank == 2 ? running.code.jump_tables : running.addresses;
    if (o.bank != 0 && o.bank != 2 && o.bank != 4) fail("bank of constants");
    if (at + bytes > bank.size()) fail("constants end at " + std::to_string(bank.size()));
    uint64_t value = 0;
    std::memcpy(&value, &bank[at], bytes);
    return value;
  }

  // The 32 bits, without what stands before them: -, |, ~.
  uint32_t plain(const Operand& o) const {
    switch (o.kind) {
      case Operand::kRegister:
        return reg(o.index) >> o.first_bit;
      case Operand::kUniform:
        return uniform(o.index) >> o.first_bit;
      case Operand::kNumber:
        if (o.is_decimal) fail("a decimal number as an integer");
        return static_cast<uint32_t>(o.bits);
      case Operand::kConstant:
        return static_cast<uint32_t>(constant(o, 4));
      default:
        fail("operand " + o.name + " as a number");
    }
  }
  uint32_t u(const Operand& o) const {
    uint32_t value = plain(o);
    if (o.absolute) value = static_cast<int32_t>(value) < 0 ? 0 - value : value;
    if (o.negative) value = 0 - value;
    return o.inverted ? ~value : value;
  }
  int32_t s(const Operand& o) const { return static_cast<int32_t>(u(o)); }
  // With the carry of a negation: -x is ~x + 1.
  uint64_t carrying(const Operand& o) const { return o.negative && u(o) == 0 ? uint64_t{1} << 32 : u(o); }
  uint64_t u64(const Operand& o) const {
    if (o.negative || o.absolute || o.inverted) fail("a changed 64-bit operand");
    if (o.kind == Operand::kNumber) return o.bits;
    return o.kind == Operand::kConstant ? constant(o, 8) : pair(o.kind, o.index);
  }
  float signed_f(const Operand& o) const {  // before |.| and -
    if (o.kind == Operand::kNumber && o.is_decimal) return static_cast<float>(o.number);
    const uint32_t bits = plain(o);
    float value = 0;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  float f(const Operand& o) const { return with_signs(o, signed_f(o)); }
  template <typename Float>
  static Float with_signs(const Operand& o, Float value) {
    if (o.absolute) value = std::fabs(value);
    return o.negative ? -value : value;
  }
  double d(const Operand& o) const {
    double value = 0;
    if (o.kind == Operand::kNumber) {
      value = o.number;
      if (!o.is_decimal) fail("a double in hexadecimal");
    } else {
      const uint64_t bits = o.kind == Operand::kConstant ? constant(o, 8) : pair(o.kind, o.index);
      std::memcpy(&value, &bits, 8);
    }
    return with_signs(o, value);
  }
  bool p(const Operand& o) const {
    if (o.kind != Operand::kPredicate && o.kind != Operand::kUniformPredicate) fail("operand " + o.name + " as a bool");
    const uint8_t all = o.kind == Operand::kPredicate ? warp.p[lane] : warp.up;
    return (o.index == kTrue || (all >> o.index & 1) != 0) != o.inverted;
  }

  void set(const Operand& o, uint32_t value) { set(o.kind, o.index, value); }
  void set(Operand::Kind kind, int index, uint32_t value) {
    if (kind == Operand::kRegister) {
      if (index != kZero) warp.r[lane][index] = value;
    } else if (kind == Operand::kUniform) {
      if (index != kUniformZero) warp.u[index] = value;
    } else {
      fail("no register to write");
    }
  }
  void set64(const Operand& o, uint64_t value) {
    if (o.index == (o.kind == Operand::kUniform ? kUniformZero : kZero)) return;
    set(o.kind, o.index, static_cast<uint32_t>(value)), set(o.kind, o.index + 1, static_cast<uint32_t>(value >> 32));
  }
  void set(const Operand& o, float value) {
    uint32_t bits = kNan;
    if (value == value) std::memcpy(&bits, &value, 4);
    set(o, bits);
  }
  void set(const Operand& o, double value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, 8);
    set64(o, bits);
  }
  void set_p(const Operand& o, bool value) {
    uint8_t& all = o.kind == Operand::kPredicate ? warp.p[lane] : warp.up;
    if (o.kind != Operand::kPredicate && o.kind != Operand::kUniformPredicate) fail("no predicate to write");
    if (o.index != kTrue) all = static_cast<uint8_t>((all & ~(1u << o.index)) | unsigned{value} << o.index);
  }
  void jump(int target) {
    if (target < 0) fail("no such label");
    warp.pc[lane] = static_cast<uint32_t>(target);
  }

  // Where an address in shared memory lies: of this block, or of any of the cluster.
  uint8_t* shared(uint32_t at, size_t bytes, bool remote = false) {
    Running& running = *warp.running;
    const uint32_t rank = at >> kRankBit, offset = at & ((1u << kRankBit) - 1);
    if (rank >= running.blocks.size() || (!remote && rank != warp.block->rank))
      fail("shared memory of another block: " + std::to_string(at));
    Block& block = running.blocks[rank];
    if (remote && block.n_live == 0) fail("shared memory of a block that has ended");
    if (offset % bytes != 0) fail("misaligned in shared memory: " + std::to_string(offset));
    if (offset < kSharedBase || offset - kSharedBase + bytes > block.shared.size())
      fail("outside shared memory: " + std::to_string(offset));
    return &block.shared[offset - kSharedBase];
  }
  uint8_t* global(uint64_t at, size_t bytes) {
    if (at % bytes != 0) fail("misaligned in global memory");
    if (at < 65536) fail("a null pointer");
    if (__asan_region_is_poisoned != nullptr &&
        __asan_region_is_poisoned(reinterpret_cast<void*>(at), bytes) != nullptr)
      fail("outside of every tensor");
    warp.global_accesses.emplace_back(at, bytes);
    return reinterpret_cast<uint8_t*>(at);
  }
  uint8_t* on_stack(uint64_t at, size_t bytes) {
    auto& local = warp.local[lane];
    local.resize(kLocalBytes);
    if (at % bytes != 0 || at + bytes > kLocalBytes) fail("outside the stack");
    return &local[at];
  }
};

// --- What instructions do.

int error_ulps = 0;

size_t size_of(const Instruction& i) {
  if (i.is(kU8) || i.is(kS8)) return 1;
  if (i.is(kU16) || i.is(kS16)) return 2;
  return i.is(k128) ? 16 : i.is(k64) ? 8 : 4;
}

void load(Thread& t, const Instruction& i, const Operand& to, const uint8_t* from) {
  const size_t bytes = size_of(i);
  uint32_t words[4] = {};
  std::memcpy(words, from, bytes);
  if (i.is(kS8)) words[0] = static_cast<uint32_t>(static_cast<int8_t>(words[0]));
  if (i.is(kS16)) words[0] = static_cast<uint32_t>(static_cast<int16_t>(words[0]));
  if (to.index == (to.kind == Operand::kUniform ? kUniformZero : kZero)) return;
  for (size_t k = 0; k < (bytes + 3) / 4; ++k) t.set(to.kind, to.index + static_cast<int>(k), words[k]);
}

void store(Thread& t, const Instruction& i, const Operand& from, uint8_t* to) {
  const size_t bytes = size_of(i);
  uint32_t words[4] = {};
  for (size_t k = 0; k < (bytes + 3) / 4; ++k)
    words[k] = from.index == kZero ? 0 : t.reg(from.index + static_cast<int>(k));
  std::memcpy(to, words, bytes);
}

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

bool is_predicate(const Operand& o) { return o.kind == Operand::kPredicate || o.kind == Operand::kUniformPredicate; }

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
float flushed_if(bool ftz, float x) { return ftz ? flushed(x) : x; }

class Rounding {
 public:
  explicit Rounding(const Instruction& i) {
    std::fesetround(i.is(kRM) ? FE_DOWNWARD : i.is(kRP) ? FE_UPWARD : i.is(kRZ) ? FE_TOWARDZERO : FE_TONEAREST);
  }
  ~Rounding() { std::fesetround(FE_TONEAREST); }
};

uint32_t bf16_of(float x) {
  uint32_t bits = 0;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7FFF : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
uint32_t f16_of(float x) {
  const auto half = static_cast<_Float16>(x);
  uint16_t bits = 0;
  std::memcpy(&bits, &half, 2);
  return x != x ? 0x7FFF : bits;
}
float from_f16(uint32_t bits) {
  _Float16 half;
  const auto low = static_cast<uint16_t>(bits);
  std::memcpy(&half, &low, 2);
  return static_cast<float>(half);
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

// IADD3, IMAD, LEA: a destination, predicates that take the carries, and the rest.
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
  const unsigned __int128 sum = static_cast<unsigned __int128>(product) + t.u64(o[2]) + carry;
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

template <typename T>
T lesser(bool least, T a, T b) {
  return least ? std::min(a, b) : std::max(a, b);
}

uint32_t extreme(bool is_signed, bool least, uint32_t a, uint32_t b) {
  const auto as_signed = [](uint32_t x) { return static_cast<int32_t>(x); };
  return is_signed ? static_cast<uint32_t>(lesser(least, as_signed(a), as_signed(b))) : lesser(least, a, b);
}

void float_extreme(Thread& t, const Instruction& i) {
  float a = flushed_if(i.is(kFTZ), t.f(i[1])), b = flushed_if(i.is(kFTZ), t.f(i[2]));
  const bool least = t.p(i[3]), has_nan = a != a || b != b;
  if (a != a) a = b;
  if (b != b) b = a;
  float result = i.is(kNAN) && has_nan ? NAN : lesser(least, a, b);
  if (a == b && std::signbit(a) != std::signbit(b)) result = least ? -0.0f : 0.0f;  // -0 < +0
  // Of magnitudes; the signs are those before |.|.
  if (i.is(kXORSIGN))
    result = std::copysign(result, std::signbit(t.signed_f(i[1])) != std::signbit(t.signed_f(i[2])) ? -1.0f : 1.0f);
  t.set(i[0], result);
}

// Whether a / b needs more care than a few operations on normal numbers.
bool needs_care(float a, float b) {
  int exponent_a = 0, exponent_b = 0;
  std::frexp(a, &exponent_a), std::frexp(b, &exponent_b);
  const bool normal = std::isfinite(a) && std::isfinite(b) && a != 0 && b != 0;
  return !normal || exponent_a < -100 || exponent_b < -120 || exponent_b > 120 ||
         std::abs(exponent_a - exponent_b) > 120;
}

void special_register(Thread& t, const Instruction& i) {
  using Read = unsigned (*)(const Thread&, unsigned thread, const unsigned* block);
  static const std::unordered_map<std::string, Read> registers = {
      {"SR_TID.X", [](const Thread&, unsigned thread, const unsigned* block) { return thread % block[0]; }},
      {"SR_TID.Y", [](const Thread&, unsigned thread, const unsigned* block) { return thread / block[0] % block[1]; }},
      {"SR_TID.Z", [](const Thread&, unsigned thread, const unsigned* block) { return thread / block[0] / block[1]; }},
      {"SR_CTAID.X", [](const Thread& t, unsigned, const unsigned*) { return t.warp.block->index[0]; }},
      {"SR_CTAID.Y", [](const Thread& t, unsigned, const unsigned*) { return t.warp.block->index[1]; }},
      {"SR_CTAID.Z", [](const Thread& t, unsigned, const unsigned*) { return t.warp.block->index[2]; }},
      {"SR_LANEID", [](const Thread& t, unsigned, const unsigned*) { return t.lane; }},
      {"SR_CgaCtaId", [](const Thread& t, unsigned, const unsigned*) { return t.warp.block->rank; }},
  };
  const auto found = registers.find(i[1].name);
  if (found == registers.end()) fail("register " + i[1].name);
  t.set(i[0], found->second(t, t.warp.first_thread + t.lane, t.warp.running->launch.block));
}

// Into a uniform register, what all threads must have the same.
template <OfThread of_thread>
void agreed(Warp& warp, const Instruction& i, uint32_t lanes) {
  const auto first = static_cast<unsigned>(__builtin_ctz(lanes));
  Thread t{warp, first};
  of_thread(t, i);
  const uint32_t value = t.u(i[0]);
  for (unsigned lane = first + 1; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    Thread other{warp, lane};
    of_thread(other, i);
    if (other.u(i[0]) != value) fail("a uniform register for what differs between threads");
  }
}

void move(Thread& t, const Instruction& i) { t.set(i[0], t.u(i[1])); }

void shuffle(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint32_t values[kLanes];
  for (unsigned lane = 0; lane < kLanes; ++lane) values[lane] = Thread{warp, lane}.u(i[2]);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    Thread t{warp, lane};
    const uint32_t b = t.u(i[3]), c = t.u(i[4]), segment = c >> 8 & 31, clamp = c & 31;
    const uint32_t last = (lane & segment) | (clamp & ~segment);
    uint32_t source = i.is(kBFLY)   ? lane ^ (b & 31)
                      : i.is(kDOWN) ? lane + (b & 31)
                      : i.is(kUP)   ? lane - (b & 31)
                                    : (lane & segment) | (b & 31 & ~segment);
    const bool within = i.is(kUP) ? static_cast<int32_t>(source) >= static_cast<int32_t>(last) : source <= last;
    if (!within) source = lane;
    if ((lanes >> source & 1) == 0) fail("a shuffle from lane " + std::to_string(source) + ", which is not there");
    t.set_p(i[0], within), t.set(i[1], values[source]);
  }
}

void vote(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint32_t ballot = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) != 0 && Thread{warp, lane}.p(i.operands.back())) ballot |= 1u << lane;
  }
  const bool result = i.is(kANY) ? ballot != 0 : i.is(kALL) ? ballot == lanes : (ballot == lanes || ballot == 0);
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    Thread t{warp, lane};
    for (size_t k = 0; k + 1 < i.operands.size(); ++k) {
      if (is_predicate(i[k])) {
        t.set_p(i[k], result);
      } else {
        t.set(i[k], ballot);
      }
    }
  }
}

// Of the lanes' values, into a uniform register.
void reduce(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != warp.live) fail("a warp operation by lanes that are apart");
  const unsigned first = static_cast<unsigned>(__builtin_ctz(lanes));
  uint32_t result = Thread{warp, first}.u(i[1]);
  for (unsigned lane = first + 1; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    const uint32_t value = Thread{warp, lane}.u(i[1]);
    result = i.is(kOR)    ? result | value
             : i.is(kAND) ? result & value
             : i.is(kXOR) ? result ^ value
             : i.is(kSUM) ? result + value
                          : extreme(i.is(kS32), i.is(kMIN), result, value);
  }
  Thread{warp, first}.set(i[0], result);
}

// Products of unsigned bytes of b with the bytes, or the halves, of a.
void dot_product(Thread& t, const Instruction& i) {
  const uint32_t a = t.u(i[1]), b = t.u(i[2]) >> (i.is(kHI) ? 16 : 0);
  const unsigned n = i.is(k4A) ? 4 : 2, bits = 32 / n;
  uint32_t sum = t.u(i[3]);
  for (unsigned k = 0; k < n; ++k) sum += (a >> (bits * k) & ((1u << bits) - 1)) * (b >> (8 * k) & 0xFF);
  t.set(i[0], sum);
}

void branch(Thread& t, const Instruction& i) {
  for (size_t k = 0; k + 1 < i.operands.size(); ++k) {
    if (i.is(kDIV) ? k == 0 : !t.p(i[k])) return;
  }
  t.jump(i.target);
}

void branch_if_divergent(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != Thread{warp, 0}.u(i[0])) fail("a warp operation by lanes that are apart");
}

// Named by a number, or by a register that has the threads that it waits for above bit 16.
void block_barrier(Warp& warp, const Instruction& i, uint32_t lanes) {
  Thread t{warp, static_cast<unsigned>(__builtin_ctz(lanes))};
  const bool has_threads = i.operands.size() > 1, packed = i[0].kind == Operand::kRegister;
  const unsigned index = packed ? t.u(i[0]) & 0xFFFF : t.u(i[0]);
  const unsigned threads = !has_threads ? 0 : i[1].kind == Operand::kRegister ? t.u(i[1]) >> 16 : t.u(i[1]);
  if (index >= kBarriers) fail("barrier " + std::to_string(index));
  warp.block_lanes(lanes, Wait::kBlock, index);
  warp.block->arrived[index] += static_cast<unsigned>(__builtin_popcount(lanes)), warp.block->expected[index] = threads;
  warp.running->check_block_barrier(*warp.block, index);
}

void cluster_arrive(Warp& warp, const Instruction&, uint32_t lanes) {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) warp.arrived_in[lane] = warp.running->cluster_phase;
  }
  warp.running->cluster_arrived += static_cast<unsigned>(__builtin_popcount(lanes));
  warp.running->check_cluster_barrier();
}
void cluster_wait(Warp& warp, const Instruction&, uint32_t lanes) {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) != 0 && warp.arrived_in[lane] == warp.running->cluster_phase)
      warp.block_lanes(1u << lane, Wait::kCluster, 0);
  }
}

// ldmatrix: eight lanes have the addresses of a matrix's rows, 16 bytes each; every lane takes 4 bytes of each matrix.
void load_matrices(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != ~0u) fail("a warp operation by lanes that are apart");
  const unsigned n_matrices = i.is(k4) ? 4 : i.is(k2) ? 2 : 1;
  const uint8_t* rows[kLanes];
  for (unsigned lane = 0; lane < 8 * n_matrices; ++lane) {
    Thread t{warp, lane};
    const auto at = static_cast<uint32_t>(t.address(i[1]));
    warp.shared_accesses.emplace_back(at, 16);
    rows[lane] = t.shared(at, 16);
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    for (unsigned matrix = 0; matrix < n_matrices; ++matrix) {
      uint32_t word = 0;
      std::memcpy(&word, rows[8 * matrix + lane / 4] + lane % 4 * 4, 4);
      Thread{warp, lane}.set(i[0].kind, i[0].index + static_cast<int>(matrix), word);
    }
  }
}

unsigned convergence_barrier(const Instruction& i) {
  if (i.operands.empty() || i[0].name[0] != 'B') fail("barrier of convergence");
  return static_cast<unsigned>(std::stoi(i[0].name.substr(1)));
}

void leave(Warp& warp, const Instruction&, uint32_t lanes) {
  warp.live &= ~lanes;
  warp.block->n_live -= static_cast<unsigned>(__builtin_popcount(lanes));
  warp.check_convergence();
  for (unsigned index = 0; index < kBarriers; ++index) warp.running->check_block_barrier(*warp.block, index);
  warp.running->check_cluster_barrier();
}

void over(ByteBarrier& barrier) {
  if (barrier.arrivals == barrier.expected_arrivals && barrier.bytes == 0) ++barrier.phase, barrier.arrivals = 0;
}

ByteBarrier& byte_barrier(Thread& t, uint32_t at, bool remote) {
  t.shared(at, 8, remote);
  auto& barriers = t.warp.running->blocks[at >> kRankBit].byte_barriers;
  const auto found = barriers.find(at & ((1u << kRankBit) - 1));
  if (found == barriers.end()) fail("a barrier of bytes that nobody has made");
  return found->second;
}

void byte_barriers(Thread& t, const Instruction& i) {
  const auto at = static_cast<uint32_t>(t.address(i[1]));
  if (i.is(kEXCH)) {
    ByteBarrier barrier;
    barrier.expected_arrivals = 0x100000 - (t.u(i[2]) >> 1);
    t.shared(at, 8);
    t.warp.block->byte_barriers[at & ((1u << kRankBit) - 1)] = barrier;
  } else if (i.is(kARRIVE)) {
    ByteBarrier& barrier = byte_barrier(t, at, false);
    barrier.bytes += t.u(i[2]), ++barrier.arrivals;
    over(barrier);
  } else {
    const bool is_over = (byte_barrier(t, at, false).phase & 1) != t.u(i[2]) >> 31;
    t.set_p(i[0], is_over);
    t.warp.yields = t.warp.yields || !is_over;
    uint64_t& n_spins = t.warp.running->n_spins;
    n_spins = is_over ? 0 : n_spins + 1;
    if (n_spins > kMostSpins) fail("bytes that never come");
  }
}

void store_remote(Thread& t, const Instruction& i) {
  const Operand& address = i[0];
  const uint64_t both = t.address(address);  // of the value, and of the barrier
  const size_t bytes = size_of(i);
  store(t, i, i[1], t.shared(static_cast<uint32_t>(both), bytes, true));
  ByteBarrier& barrier = byte_barrier(t, static_cast<uint32_t>(both >> 32), true);
  barrier.bytes -= static_cast<int64_t>(bytes);
  over(barrier);
}

void copy_async(Thread& t, const Instruction& i) {
  const Copy copy{static_cast<uint32_t>(t.address(i[0])), t.address(i[1]), size_of(i)};
  std::memset(t.shared(copy.to, copy.bytes), 0xFF, copy.bytes);
  t.global(copy.from, copy.bytes);
  t.warp.open_copies[t.lane].push_back(copy);
}
void commit_copies(Thread& t, const Instruction&) {
  t.warp.copies[t.lane].push_back(std::move(t.warp.open_copies[t.lane]));
  t.warp.open_copies[t.lane].clear();
}
void wait_for_copies(Thread& t, const Instruction& i) {
  auto& groups = t.warp.copies[t.lane];
  for (; groups.size() > t.u(i[1]); groups.pop_front()) {
    for (const Copy& copy : groups.front())
      std::memcpy(t.shared(copy.to, copy.bytes), reinterpret_cast<const void*>(copy.from), copy.bytes);
  }
}

struct Handler {
  const char* modifiers;  // that are understood
  OfThread of_thread;
  OfWarp of_warp;
};
using T = Thread;
using I = Instruction;

const std::unordered_map<std::string, Handler>& handlers() {
  static const auto ignored = [](T&, const I&) {};
  static const char* const kCompare = "LT EQ LE GT NE GE LTU EQU LEU GTU NEU GEU NUM NAN AND OR XOR FTZ";
  static const char* const kMemory = "E U8 S8 U16 S16 64 128 CONSTANT";
  // clang-format off
  static const std::unordered_map<std::string, Handler> table = {
      {"NOP", {"", ignored, nullptr}},
      {"YIELD", {"", ignored, nullptr}},
      {"CCTL", {"IVALL", ignored, nullptr}},
      {"FENCE", {"VIEW ASYNC S", ignored, nullptr}},
      {"EXIT", {"", nullptr, leave}},
      {"BRA", {"DIV", branch, nullptr}},
      {"BRX", {"", [](T& t, const I& i) { t.jump(static_cast<int>((t.warp.pc[t.lane] * kInstructionBytes + t.u(i[0]) +
                                                                   t.u(i[1])) / kInstructionBytes)); }, nullptr}},
      {"BRXU", {"", [](T& t, const I& i) { handlers().at("BRX").of_thread(t, i); }, nullptr}},
      {"CALL", {"REL NOINC", [](T& t, const I& i) { t.jump(i.target); }, nullptr}},
      {"RET", {"REL NODEC", [](T& t, const I& i) { t.jump(static_cast<int>(t.u(i[0]) / kInstructionBytes)); }, nullptr}},
      {"BSSY", {"", nullptr, [](Warp& w, const I& i, uint32_t lanes) {
         for (unsigned lane = 0; lane < kLanes; ++lane) {
           if (lanes >> lane & 1) w.sets[lane][convergence_barrier(i)] = lanes;
         }
       }}},
      {"BSYNC", {"", nullptr, [](Warp& w, const I& i, uint32_t lanes) {
         w.block_lanes(lanes, Wait::kConvergence, convergence_barrier(i));
         w.check_convergence();
       }}},
      {"BREAK", {"", nullptr, [](Warp& w, const I& i, uint32_t lanes) {
         const unsigned index = convergence_barrier(i);
         for (unsigned lane = 0; lane < kLanes; ++lane) {
           if (w.sets[lane][index] & lanes) w.sets[lane][index] &= ~lanes;
         }
         w.check_convergence();
       }}},
      {"WARPSYNC", {"ALL", nullptr, [](Warp& w, const I& i, uint32_t lanes) {
         if (!i.is(kALL)) fail("WARPSYNC of some lanes");
         for (unsigned lane = 0; lane < kLanes; ++lane) {
           if (lanes >> lane & 1) w.sets[lane][kConvergenceBarriers] = ~0u;
         }
         w.block_lanes(lanes, Wait::kConvergence, kConvergenceBarriers);
         w.check_convergence();
       }}},
      {"BAR", {"SYNC DEFER_BLOCKING", nullptr, block_barrier}},
      {"UCGABAR_ARV", {"", nullptr, cluster_arrive}},
      {"UCGABAR_WAIT", {"", nullptr, cluster_wait}},
      {"SYNCS", {"EXCH ARRIVE PHASECHK TRANS64 TRYWAIT 64", byte_barriers, nullptr}},
      {"STAS", {"64", store_remote, nullptr}},
      {"LDGSTS", {"E BYPASS 128", copy_async, nullptr}},
      {"LDGDEPBAR", {"", commit_copies, nullptr}},
      {"DEPBAR", {"LE", wait_for_copies, nullptr}},
      {"SHFL", {"BFLY IDX UP DOWN", nullptr, shuffle}},
      {"REDUX", {"OR AND XOR SUM MIN MAX S32", nullptr, reduce}},
      {"LDSM", {"16 M88 2 4", nullptr, load_matrices}},
      {"VOTE", {"ANY ALL", nullptr, vote}},
      {"VOTEU", {"ANY ALL", nullptr, vote}},

      {"S2R", {"", special_register, nullptr}},
      {"S2UR", {"", nullptr, agreed<special_register>}},
      {"CS2R", {"", [](T& t, const I& i) {
         if (i[1].name != "SRZ") fail("register " + i[1].name);
         t.set64(i[0], 0);
       }, nullptr}},
      {"R2UR", {"", nullptr, agreed<move>}},
      {"MOV", {"", move, nullptr}},
      {"LDC", {"U8 S8 U16 S16 64", [](T& t, const I& i) {
         uint8_t bytes[16] = {};
         const uint64_t value = t.constant(i[1], size_of(i));
         std::memcpy(bytes, &value, 8);
         load(t, i, i[0], bytes);
       }, nullptr}},
      {"LDG", {kMemory, [](T& t, const I& i) { load(t, i, i[0], t.global(t.address(i[1]), size_of(i))); }, nullptr}},
      {"LD", {kMemory, [](T& t, const I& i) { load(t, i, i[0], t.global(t.address(i[1]), size_of(i))); }, nullptr}},
      {"STG", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.global(t.address(i[0]), size_of(i))); }, nullptr}},
      {"ST", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.global(t.address(i[0]), size_of(i))); }, nullptr}},
      {"LDS", {kMemory, [](T& t, const I& i) {
         const auto at = static_cast<uint32_t>(t.address(i[1]));
         t.warp.shared_accesses.emplace_back(at, size_of(i));
         load(t, i, i[0], t.shared(at, size_of(i)));
       }, nullptr}},
      {"STS", {kMemory, [](T& t, const I& i) {
         const auto at = static_cast<uint32_t>(t.address(i[0]));
         t.warp.shared_accesses.emplace_back(at, size_of(i));
         store(t, i, i[1], t.shared(at, size_of(i)));
       }, nullptr}},
      {"LDL", {"U8 S8 U16 S16 64 128 LU", [](T& t, const I& i) {
         load(t, i, i[0], t.on_stack(t.address(i[1]), size_of(i)));
       }, nullptr}},
      {"STL", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.on_stack(t.address(i[0]), size_of(i))); }, nullptr}},

      {"IADD3", {"X", add, nullptr}},
      {"IMAD", {"MOV IADD SHL U32 WIDE HI X", multiply_add, nullptr}},
      {"LEA", {"HI X SX32", scaled_add, nullptr}},
      {"SHF", {"L R W U32 S32 U64 S64 HI", shift, nullptr}},
      {"LOP3", {"LUT", logic, nullptr}},
      {"PLOP3", {"LUT", predicate_logic, nullptr}},
      {"ISETP", {"LT EQ LE GT NE GE U32 EX AND OR XOR", compare_integers, nullptr}},
      {"IDP", {"4A 2A LO HI U8 U16", dot_product, nullptr}},
      {"PRMT", {"", permute, nullptr}},
      {"SEL", {"", [](T& t, const I& i) { t.set(i[0], t.u(i[t.p(i[3]) ? 1 : 2])); }, nullptr}},
      {"IABS", {"", [](T& t, const I& i) { t.set(i[0], static_cast<uint32_t>(std::abs(int64_t{t.s(i[1])}))); }, nullptr}},
      {"VIADD", {"", [](T& t, const I& i) { t.set(i[0], t.u(i[1]) + t.u(i[2])); }, nullptr}},
      {"VIMNMX", {"U32", [](T& t, const I& i) {
         t.set(i[0], extreme(!i.is(kU32), t.p(i[3]), t.u(i[1]), t.u(i[2])));
       }, nullptr}},
      {"VIADDMNMX", {"U32", [](T& t, const I& i) {
         t.set(i[0], extreme(!i.is(kU32), t.p(i[4]), t.u(i[1]) + t.u(i[2]), t.u(i[3])));
       }, nullptr}},
      {"VIMNMX3", {"U32", [](T& t, const I& i) {
         const bool is_signed = !i.is(kU32), least = t.p(i[4]);
         t.set(i[0], extreme(is_signed, least, extreme(is_signed, least, t.u(i[1]), t.u(i[2])), t.u(i[3])));
       }, nullptr}},
      {"SGXT", {"U32", [](T& t, const I& i) {  // the low bits, extended
         const uint32_t n = t.u(i[2]);
         if (n == 0 || n > 31) fail("a field of so many bits");
         const uint32_t field = t.u(i[1]) << (32 - n);
         t.set(i[0], i.is(kU32) ? field >> (32 - n) : static_cast<uint32_t>(static_cast<int32_t>(field) >> (32 - n)));
       }, nullptr}},
      {"P2R", {"", [](T& t, const I& i) { pack_predicates(t, i, t.warp.p[t.lane]); }, nullptr}},
      {"UP2UR", {"", [](T& t, const I& i) { pack_predicates(t, i, t.warp.up); }, nullptr}},
      {"R2P", {"", [](T& t, const I& i) {
         const uint32_t mask = t.u(i[2]) & 0x7F;
         t.warp.p[t.lane] = static_cast<uint8_t>((t.warp.p[t.lane] & ~mask) | (t.u(i[1]) & mask));
       }, nullptr}},

      {"FADD", {"FTZ", [](T& t, const I& i) {
         const bool ftz = i.is(kFTZ);
         t.set(i[0], flushed_if(ftz, flushed_if(ftz, t.f(i[1])) + flushed_if(ftz, t.f(i[2]))));
       }, nullptr}},
      {"FMUL", {"FTZ", [](T& t, const I& i) {
         const bool ftz = i.is(kFTZ);
         t.set(i[0], flushed_if(ftz, flushed_if(ftz, t.f(i[1])) * flushed_if(ftz, t.f(i[2]))));
       }, nullptr}},
      {"FFMA", {"FTZ RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         const auto in = [&](size_t k) { return flushed_if(i.is(kFTZ), t.f(i[k])); };
         t.set(i[0], flushed_if(i.is(kFTZ), std::fma(in(1), in(2), in(3))));
       }, nullptr}},
      {"FSETP", {kCompare, [](T& t, const I& i) {
         set_compared(t, i, compares(i, flushed_if(i.is(kFTZ), t.f(i[2])), flushed_if(i.is(kFTZ), t.f(i[3]))));
       }, nullptr}},
      {"FSEL", {"", [](T& t, const I& i) {  // a NaN stays as it is
         const float value = t.f(i[t.p(i[3]) ? 1 : 2]);
         uint32_t bits = 0;
         std::memcpy(&bits, &value, 4);
         t.set(i[0], bits);
       }, nullptr}},
      {"FMNMX", {"FTZ NAN XORSIGN", float_extreme, nullptr}},
      {"FCHK", {"", [](T& t, const I& i) { t.set_p(i[0], needs_care(t.f(i[1]), t.f(i[2]))); }, nullptr}},
      {"MUFU", {"EX2 LG2 RCP RSQ SQRT RCP64H RSQ64H", [](T& t, const I& i) {
         if (!i.is(kRCP64H) && !i.is(kRSQ64H)) return t.set(i[0], approximate(i, t.f(i[1])));
         const uint64_t bits = uint64_t{t.u(i[1])} << 32;  // of the high word, the high word
         double value = 0;
         std::memcpy(&value, &bits, 8);
         value = i.is(kRCP64H) ? 1 / value : 1 / std::sqrt(value);
         uint64_t result = 0;
         std::memcpy(&result, &value, 8);
         t.set(i[0], static_cast<uint32_t>(result >> 32));
       }, nullptr}},
      {"F2FP", {"BF16 F16 F32 PACK_AB", [](T& t, const I& i) {
         const auto convert = i.is(kBF16) ? bf16_of : f16_of;
         t.set(i[0], convert(t.f(i[1])) << 16 | convert(t.f(i[2])));
       }, nullptr}},
      {"HADD2", {"F32", [](T& t, const I& i) {  // a half, unpacked
         if (i[1].kind != Operand::kRegister || i[1].index != kZero || i[2].kind != Operand::kRegister) fail("a sum of halves");
         t.set(i[0], Thread::with_signs(i[2], from_f16(t.plain(i[2]))));
       }, nullptr}},
      {"HFMA2", {"MMA BF16_V2", [](T& t, const I& i) {  // two halves: as a constant, or their magnitudes
         if (i[1].index != kZero || i[2].index != kZero) fail("products of halves");
         if (i.is(kBF16_V2)) {
           if (!i[1].negative || !i[3].absolute || i[3].negative || i[3].is_part) fail("products of halves");
           const auto magnitude = [](uint32_t bits) { return (bits & 0x7FFF) > 0x7F80 ? 0x7FFFu : bits & 0x7FFF; };
           return t.set(i[0], magnitude(t.plain(i[3]) >> 16) << 16 | magnitude(t.plain(i[3])));
         }
         t.set(i[0], f16_of(t.f(i[3])) << 16 | f16_of(t.f(i[4])));
       }, nullptr}},
      {"I2FP", {"F32 S32 U32", [](T& t, const I& i) {
         t.set(i[0], i.is(kU32) ? static_cast<float>(t.u(i[1])) : static_cast<float>(t.s(i[1])));
       }, nullptr}},
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
       }, nullptr}},
      {"F2I", {"FTZ U32 S32 U64 S64 TRUNC FLOOR CEIL NTZ", [](T& t, const I& i) {
         const float x = rounded(i, flushed_if(i.is(kFTZ), t.f(i[1])));
         if (i.is(kU64)) return t.set64(i[0], saturated<uint64_t>(x));
         if (i.is(kS64)) return t.set64(i[0], static_cast<uint64_t>(saturated<int64_t>(x)));
         t.set(i[0], i.is(kU32) ? saturated<uint32_t>(x) : static_cast<uint32_t>(saturated<int32_t>(x)));
       }, nullptr}},
      {"F2F", {"F32 F64 BF16 F16", [](T& t, const I& i) {
         if (i.opcode == "F2F.F64.F32") return t.set(i[0], static_cast<double>(t.f(i[1])));
         if (i.opcode == "F2F.F32.F64") return t.set(i[0], static_cast<float>(t.d(i[1])));
         const bool is_bf16 = i.opcode == "F2F.BF16.F32";
         if (!is_bf16 && i.opcode != "F2F.F16.F32") fail("a conversion");
         t.set(i[0], (is_bf16 ? bf16_of : f16_of)(t.f(i[1])) | 0xFFFF0000);  // what becomes of the upper half is unknown
       }, nullptr}},
      {"FRND", {"F64 TRUNC FLOOR CEIL", [](T& t, const I& i) {
         if (i.is(kF64)) return t.set(i[0], rounded(i, t.d(i[1])));
         t.set(i[0], rounded(i, t.f(i[1])));
       }, nullptr}},
      {"DADD", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], t.d(i[1]) + t.d(i[2]));
       }, nullptr}},
      {"DMUL", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], t.d(i[1]) * t.d(i[2]));
       }, nullptr}},
      {"DFMA", {"RM RP RZ", [](T& t, const I& i) {
         const Rounding rounding(i);
         t.set(i[0], std::fma(t.d(i[1]), t.d(i[2]), t.d(i[3])));
       }, nullptr}},
      {"DSETP", {kCompare, [](T& t, const I& i) { set_compared(t, i, compares(i, t.d(i[2]), t.d(i[3]))); }, nullptr}},
  };
  // clang-format on
  return table;
}

// A uniform instruction does once, with uniform registers, what the one without the U does for each thread.
void find_handlers(Instruction& instruction) {
  const auto& table = handlers();
  auto found = table.find(instruction.base);
  if (found == table.end() && instruction.base[0] == 'U') {
    found = table.find(instruction.base.substr(1));
    instruction.is_uniform = found != table.end() && found->second.of_thread != nullptr;
    if (!instruction.is_uniform) found = table.end();
  }
  if (found == table.end()) return;  // refused where it is to run
  const size_t dot = instruction.opcode.find('.');
  Modifiers understood;
  add_modifiers(found->second.modifiers, ' ', understood);
  if (dot != std::string::npos && !add_modifiers(instruction.opcode.substr(dot + 1), '.', instruction.modifiers))
    return;
  if ((instruction.modifiers & ~understood).any()) return;
  instruction.of_thread = found->second.of_thread, instruction.of_warp = found->second.of_warp;
  if (instruction.base == "BRA" && instruction.is(kDIV)) {
    instruction.of_thread = nullptr, instruction.of_warp = branch_if_divergent;
  }
}

void Warp::block_lanes(uint32_t lanes, Wait why, uint32_t index) {
  blocked |= lanes;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if (lanes >> lane & 1) wait[lane] = why, wait_index[lane] = index;
  }
}

// Lanes that wait for one another go on once all of them that have not ended are there.
void Warp::check_convergence() {
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((live >> lane & 1) == 0 || wait[lane] != Wait::kConvergence) continue;
    const uint32_t set = sets[lane][wait_index[lane]] & live;
    bool all = true;
    for (unsigned other = 0; other < kLanes; ++other) {
      if (set >> other & 1) all = all && wait[other] == Wait::kConvergence && pc[other] == pc[lane];
    }
    for (unsigned other = 0; all && other < kLanes; ++other) {
      if (set >> other & 1) release(other);
    }
  }
}

void Running::check_block_barrier(Block& block, unsigned index) {
  const unsigned expected = block.expected[index] != 0 ? block.expected[index] : block.n_live;
  if (block.arrived[index] == 0 || block.arrived[index] < expected) return;
  if (block.arrived[index] > expected) fail("more threads at a barrier than it is for");
  block.arrived[index] = 0;
  for (Warp& warp : warps) {
    for (unsigned lane = 0; warp.block == &block && lane < kLanes; ++lane) {
      if (warp.wait[lane] == Wait::kBlock && warp.wait_index[lane] == index) warp.release(lane);
    }
  }
}

void Running::check_cluster_barrier() {
  if (cluster_arrived == 0 || cluster_arrived < n_live()) return;
  cluster_arrived = 0, ++cluster_phase;
  for (Warp& warp : warps) {
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      if (warp.wait[lane] == Wait::kCluster) warp.release(lane);
    }
  }
}

// Cycles of an access to 32 banks of 4 bytes, in groups of lanes that ask for 128 bytes at most; and with no conflict.
void count_banks(const std::vector<std::pair<uint64_t, unsigned>>& accesses, Counts& counts) {
  const size_t lanes = kLanes * 4 / std::max(4u, accesses.front().second);
  for (size_t first = 0; first < accesses.size(); first += lanes) {
    std::array<uint64_t, 32> words;
    size_t n = 0;
    for (size_t k = first; k < std::min(first + lanes, accesses.size()); ++k) {
      for (unsigned byte = 0; byte < accesses[k].second; byte += 4) words[n++] = (accesses[k].first + byte) / 4;
    }
    std::sort(words.begin(), words.begin() + n);
    std::array<unsigned, 32> of_bank{};
    for (size_t k = 0; k < n; ++k) of_bank[words[k] % 32] += k == 0 || words[k] != words[k - 1];
    counts.shared_cycles += *std::max_element(of_bank.begin(), of_bank.end()), ++counts.shared_least;
  }
}

void Warp::account(const Instruction& instruction) {
  Counts& counts = running->counts;
  if (!global_accesses.empty()) {
    const bool stores = instruction.base[0] == 'S';
    auto& seen = stores ? running->stored : running->loaded;
    uint64_t& n = stores ? counts.stored : counts.loaded;
    std::sort(global_accesses.begin(), global_accesses.end());
    uint64_t last = ~uint64_t{0};
    for (const auto& [address, bytes] : global_accesses) {
      if (address / 32 != last) last = address / 32, ++n, seen.insert(last);
    }
    global_accesses.clear();
  }
  if (!shared_accesses.empty()) count_banks(shared_accesses, counts), shared_accesses.clear();
}

// One instruction, by the lanes that are furthest behind. False where none can go on.
bool Warp::step() {
  const uint32_t ready = live & ~blocked;
  if (ready == 0) return false;
  uint32_t at = ~0u, lanes = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((ready >> lane & 1) == 0 || pc[lane] > at) continue;
    lanes = pc[lane] < at ? 1u << lane : lanes | 1u << lane;
    at = pc[lane];
  }
  if (at >= running->code.instructions.size()) fail("no instruction at " + std::to_string(at));
  Instruction& instruction = running->code.instructions[at];
  ++instruction.count;
  uint32_t active = 0;
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    if ((lanes >> lane & 1) == 0) continue;
    ++pc[lane];
    if (!instruction.is_guarded || Thread{*this, lane}.p(instruction.guard)) active |= 1u << lane;
  }
  if (active == 0) return true;
  try {
    if (instruction.of_warp != nullptr) {
      instruction.of_warp(*this, instruction, active);
    } else if (instruction.of_thread != nullptr) {
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        if ((active >> lane & 1) == 0) continue;
        Thread thread{*this, lane};
        instruction.of_thread(thread, instruction);
        if (instruction.is_uniform) break;
      }
    } else {
      fail("unknown instruction");
    }
  } catch (const std::exception& error) {
    std::ostringstream where;
    where << error.what() << ": /*" << std::hex << at * kInstructionBytes << "*/ " << instruction.text << std::dec
          << ", block " << block->index[0] << " thread " << first_thread;
    fail(where.str());
  }
  account(instruction);
  return true;
}

// All of them, until none has a thread left. In order: each block as far as it can get without the next.
void run_cluster(Running& running, int order, std::mt19937& random) {
  const size_t n = running.warps.size(), of_block = n / running.blocks.size();
  const auto run = [&](size_t warp, size_t most, bool& ran) {
    Warp& chosen = running.warps[order == 1 ? n - 1 - warp : warp];
    chosen.yields = false;
    bool has_run = false;
    for (size_t k = 0; k < most && !chosen.yields && chosen.step(); ++k) has_run = true;
    ran = ran || has_run;
    return has_run && !chosen.yields;
  };
  while (running.n_live() != 0) {
    bool ran = false;
    if (order == 2) {
      for (size_t k = 0; k < n; ++k) run(random() % n, random() % 200 + 1, ran);
      for (const Warp& warp : running.warps) ran = ran || (warp.live & ~warp.blocked) != 0;
    } else {
      for (size_t first = 0; first < n; first += of_block) {
        for (bool again = true; again;) {
          again = false;
          for (size_t k = first; k < first + of_block; ++k) again = run(k, ~size_t{0}, ran) || again;
        }
      }
    }
    if (!ran) fail("a deadlock");
  }
}

std::vector<char> contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

void set_error(int ulps) { error_ulps = ulps; }

std::string json(const Counts& counts) {
  std::ostringstream text;
  text << "{\"instructions\": {";
  const char* separator = "";
  for (const auto& [opcode, n] : counts.instructions) {
    text << separator << '"' << opcode << "\": " << n;
    separator = ", ";
  }
  text << "}, \"loaded\": " << counts.loaded << ", \"stored\": " << counts.stored
       << ", \"first_loaded\": " << counts.first_loaded << ", \"first_stored\": " << counts.first_stored
       << ", \"shared_cycles\": " << counts.shared_cycles << ", \"shared_least\": " << counts.shared_least << "}";
  return text.str();
}

struct Program::Impl {
  std::vector<char> cubin;
  std::vector<uint8_t> addresses;  // c[0x4]: of what follows
  std::vector<uint8_t> globals;    // arrays in global memory
  std::map<std::string, std::vector<std::string>> texts;
  std::map<std::string, Code> codes;

  void load(const std::string& path) {
    cubin = contents(path);
    if (cubin.size() < sizeof(Elf64_Ehdr) || std::memcmp(cubin.data(), ELFMAG, SELFMAG) != 0) fail(path + ": no ELF");
    const auto* header = reinterpret_cast<const Elf64_Ehdr*>(cubin.data());
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(cubin.data() + header->e_shoff);
    const char* names = cubin.data() + sections[header->e_shstrndx].sh_offset;
    const auto bytes_of = [&](const Elf64_Shdr& section) {
      const auto* first = reinterpret_cast<const uint8_t*>(cubin.data()) + section.sh_offset;
      return std::vector<uint8_t>(first, first + section.sh_size);
    };
    const Elf64_Shdr *symbols = nullptr, *relocations = nullptr;
    unsigned globals_index = 0;
    for (unsigned k = 0; k < header->e_shnum; ++k) {
      const Elf64_Shdr& section = sections[k];
      const std::string name = names + section.sh_name;
      const auto of = [&](const std::string& prefix) { return name.substr(prefix.size()); };
      if (name.rfind(".nv.shared._Z", 0) == 0 ||
          (name.rfind(".nv.shared.", 0) == 0 && name.find("reserved") == std::string::npos)) {
        codes[of(".nv.shared.")].static_shared = std::max<size_t>(section.sh_size, kSharedBase) - kSharedBase;
      } else if (name.rfind(".nv.constant2.", 0) == 0) {
        codes[of(".nv.constant2.")].jump_tables = bytes_of(section);
      } else if (name == ".nv.constant4") {
        addresses = bytes_of(section);
      } else if (name == ".nv.global.init") {
        globals = bytes_of(section), globals_index = k;
      } else if (name == ".rela.nv.constant4") {
        relocations = &section;
      } else if (section.sh_type == SHT_SYMTAB) {
        symbols = &section;
      }
    }
    if (relocations == nullptr) return;
    const auto* table = reinterpret_cast<const Elf64_Sym*>(cubin.data() + symbols->sh_offset);
    for (size_t k = 0; k < relocations->sh_size / sizeof(Elf64_Rela); ++k) {
      const auto& relocation = reinterpret_cast<const Elf64_Rela*>(cubin.data() + relocations->sh_offset)[k];
      const Elf64_Sym& symbol = table[ELF64_R_SYM(relocation.r_info)];
      if (symbol.st_shndx != globals_index) fail("an address of what is no array in global memory");
      const uint64_t address =
          reinterpret_cast<uint64_t>(globals.data()) + symbol.st_value + static_cast<uint64_t>(relocation.r_addend);
      std::memcpy(&addresses.at(relocation.r_offset), &address, 8);
    }
  }

  // Of each kernel the lines of its section, parsed when it is launched.
  void read(const std::string& path) {
    std::ifstream file(path);
    std::vector<std::string>* lines = nullptr;
    for (std::string line; std::getline(file, line);) {
      const size_t section = line.find(".section\t");
      if (section != std::string::npos) {
        const size_t text = line.find(".text.");
        lines = text == std::string::npos ? nullptr : &texts[line.substr(text + 6, line.find(',') - text - 6)];
      } else if (lines != nullptr) {
        lines->push_back(line);
      }
    }
    if (texts.empty()) fail(path + ": no machine code");
  }

  Code& code_of(const std::string& kernel) {
    if (texts.count(kernel) == 0) fail("no kernel " + kernel);
    Code& code = codes[kernel];
    if (!code.instructions.empty()) return code;
    std::map<std::string, int> labels;
    for (const std::string& line : texts[kernel]) {
      const size_t comment = line.find("/*");
      if (comment == std::string::npos) {
        const std::string label = trimmed(line);
        if ((label[0] == '.' || label[0] == '$') && label.back() == ':')
          labels[label.substr(0, label.size() - 1)] = static_cast<int>(code.instructions.size());
        continue;
      }
      const size_t text = line.find("*/") + 2, end = line.rfind(';');
      if (end == std::string::npos || end < text) continue;
      if (std::stoull(line.substr(comment + 2), nullptr, 16) != code.instructions.size() * kInstructionBytes)
        fail("an address out of turn: " + line);
      const std::string instruction = trimmed(line.substr(text, end - text));
      try {
        code.instructions.push_back(parse_instruction(instruction));
      } catch (const std::exception& error) {
        fail(std::string(error.what()) + " in " + instruction);
      }
    }
    for (Instruction& instruction : code.instructions) {
      for (const Operand& operand : instruction.operands) {
        const auto label = operand.kind == Operand::kName ? labels.find(operand.name) : labels.end();
        if (label != labels.end()) instruction.target = label->second;
      }
    }
    return code;
  }

  std::vector<uint8_t> constants_of(const Launch& launch) const {
    std::vector<uint8_t> constants(kParameters + launch.parameter_bytes);
    const auto put = [&](size_t at, uint32_t value) { std::memcpy(&constants[at], &value, 4); };
    for (size_t k = 0; k < 3; ++k) put(4 * k, launch.block[k]), put(12 + 4 * k, launch.grid[k]);
    put(0x28, kLocalBytes);  // where the stack begins, downwards
    put(0x140, launch.cluster > 1), put(0x188, launch.cluster);
    std::memcpy(&constants[kParameters], launch.parameters, launch.parameter_bytes);
    return constants;
  }
};

Program::Program(const std::string& cubin, const std::string& disassembly) : impl_(new Impl) {
  impl_->load(cubin), impl_->read(disassembly);
}
Program::~Program() = default;

void Program::run(const std::string& kernel, const Launch& launch, int order) {
  Code& code = impl_->code_of(kernel);
  const std::vector<uint8_t> constants = impl_->constants_of(launch);
  std::unordered_set<uint64_t> loaded, stored;
  for (Instruction& instruction : code.instructions) instruction.count = 0;
  const unsigned threads = launch.block[0] * launch.block[1] * launch.block[2];
  std::mt19937 random(1);
  const uint64_t n_blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  for (uint64_t first = 0; first < n_blocks; first += launch.cluster) {
    Running running{launch, code, counts, constants, impl_->addresses, {}, {}, loaded, stored};
    for (unsigned rank = 0; rank < launch.cluster; ++rank) {
      const uint64_t index = first + rank;
      Block& block = running.blocks.emplace_back();
      block.index = {static_cast<unsigned>(index % launch.grid[0]),
                     static_cast<unsigned>(index / launch.grid[0] % launch.grid[1]),
                     static_cast<unsigned>(index / launch.grid[0] / launch.grid[1])};
      block.rank = rank, block.n_threads = block.n_live = threads;
      block.shared.assign(code.static_shared + launch.dynamic_shared, 0xFF);
      for (unsigned thread = 0; thread < threads; thread += kLanes) {
        Warp& warp = running.warps.emplace_back();
        warp.running = &running, warp.block = &block, warp.first_thread = thread;
        warp.live = threads - thread >= kLanes ? ~0u : (1u << (threads - thread)) - 1;
      }
    }
    run_cluster(running, order, random);
  }
  for (const Instruction& instruction : code.instructions) {
    if (instruction.count != 0) counts.instructions[instruction.opcode] += instruction.count;
  }
  counts.first_loaded += loaded.size(), counts.first_stored += stored.size();
}

}  // namespace machine
