// What runs in machine.h: a cluster of blocks, its warps and their threads.
#pragma once
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "machine.h"
#include "machine_text.h"

// A function of AddressSanitizer; null in a program that does not run under it.
extern "C" __attribute__((weak)) void* __asan_region_is_poisoned(void* begin, size_t size);

namespace machine {

constexpr unsigned kLanes = 32, kBarriers = 16, kConvergenceBarriers = 16;
constexpr unsigned kRankBit = 24;      // of an address in the shared memory of a cluster
constexpr uint32_t kNan = 0x7FFFFFFF;  // of arithmetic
constexpr uint64_t kMostSpins = 1000000;
constexpr uint32_t kPoison = 0xFFC1FFC1;  // what was not written: as one float or two halves a NaN
constexpr size_t kLocalBytes = 4096;

// The lanes of a mask, the lowest first: for (const unsigned lane : Lanes{mask}).
struct Lanes {
  uint32_t mask;
  unsigned operator*() const { return static_cast<unsigned>(__builtin_ctz(mask)); }
  void operator++() { mask &= mask - 1; }
  bool operator!=(const Lanes& other) const { return mask != other.mask; }
  Lanes begin() const { return *this; }
  Lanes end() const { return {0}; }
};

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
  uint32_t r[kLanes][256];
  uint8_t p[kLanes];
  uint32_t u[64];
  uint8_t up;
  uint32_t pc[kLanes] = {};
  uint32_t live = 0, blocked = 0;
  Wait wait[kLanes] = {};
  uint32_t wait_index[kLanes] = {};
  unsigned arrived_in[kLanes] = {};                      // which phase of the cluster's barrier
  uint32_t sets[kLanes][kConvergenceBarriers + 1] = {};  // the last one: of WARPSYNC
  std::vector<Copy> open_copies[kLanes];
  std::vector<std::vector<Copy>> copies[kLanes];  // groups, the oldest first
  std::vector<uint8_t> local[kLanes];
  bool yields = false;
  // of the instruction that runs
  std::vector<std::pair<uint64_t, unsigned>> global_accesses, shared_accesses;

  // predicates: all, at first
  explicit Warp(uint8_t predicates) : up(predicates) {
    std::fill_n(&r[0][0], kLanes * 256, kPoison), std::fill_n(u, 64, kPoison), std::fill_n(p, kLanes, predicates);
  }
  bool step();
  void block_lanes(uint32_t lanes, Wait why, uint32_t index);
  void release(unsigned lane) { wait[lane] = Wait::kNone, blocked &= ~(1u << lane); }
  void check_convergence();

 private:
  void account(const Instruction& instruction);
};

struct Running {
  const Launch& launch;
  const Layout& layout;
  Code& code;
  Counts& counts;
  const std::vector<uint8_t>& constants;  // c[0x0]
  const std::vector<uint8_t>& addresses;  // c[0x4]
  std::deque<Block> blocks;
  std::deque<Warp> warps;
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
    for (const auto& term : o.terms)
      sum += (term.wide ? pair(term.kind, term.index) : word(term.kind, term.index)) << term.shift;
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

  static uint32_t part(const Operand& o, uint32_t word) {
    return word >> o.first_bit & static_cast<uint32_t>((uint64_t{1} << o.n_bits) - 1);
  }
  // The 32 bits, without what stands before them: -, |, ~.
  uint32_t plain(const Operand& o) const {
    switch (o.kind) {
      case Operand::kRegister:
        return part(o, reg(o.index));
      case Operand::kUniform:
        return part(o, uniform(o.index));
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
    if (o.negative) fail("a changed 64-bit operand");
    return signed_u64(o);
  }
  // The same, where a minus may stand before it.
  uint64_t signed_u64(const Operand& o) const {
    if (o.absolute || o.inverted) fail("a changed 64-bit operand");
    const uint64_t value = o.kind == Operand::kNumber     ? o.bits
                           : o.kind == Operand::kConstant ? constant(o, 8)
                                                          : pair(o.kind, o.index);
    return o.negative ? 0 - value : value;
  }
  float signed_f(const Operand& o) const {  // before |.| and -
    if (o.kind == Operand::kNumber && o.is_decimal) return static_cast<float>(o.number);
    return std::bit_cast<float>(plain(o));
  }
  float f(const Operand& o) const { return with_signs(o, signed_f(o)); }
  template <typename Float>
  static Float with_signs(const Operand& o, Float value) {
    if (o.absolute) value = std::fabs(value);
    return o.negative ? -value : value;
  }
  double d(const Operand& o) const {
    if (o.kind == Operand::kNumber) {
      if (!o.is_decimal) fail("a double in hexadecimal");
      return with_signs(o, o.number);
    }
    return with_signs(o, std::bit_cast<double>(o.kind == Operand::kConstant ? constant(o, 8) : pair(o.kind, o.index)));
  }
  bool p(const Operand& o) const {
    if (o.kind != Operand::kPredicate && o.kind != Operand::kUniformPredicate) fail("operand " + o.name + " as a bool");
    const uint8_t all = o.kind == Operand::kPredicate ? warp.p[lane] : warp.up;
    return (o.index == kTrue || (all >> o.index & 1) != 0) != o.inverted;
  }

  void set(const Operand& o, uint32_t value) {
    if (o.is_part()) fail("a part of a register to write");
    set(o.kind, o.index, value);
  }
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
  void set(const Operand& o, float value) { set(o, value == value ? std::bit_cast<uint32_t>(value) : kNan); }
  void set(const Operand& o, double value) { set64(o, std::bit_cast<uint64_t>(value)); }
  void set_p(const Operand& o, bool value) {
    uint8_t& all = o.kind == Operand::kPredicate ? warp.p[lane] : warp.up;
    if (o.kind != Operand::kPredicate && o.kind != Operand::kUniformPredicate) fail("no predicate to write");
    if (o.index != kTrue) all = static_cast<uint8_t>((all & ~(1u << o.index)) | unsigned{value} << o.index);
  }
  void jump(int target) {
    if (target < 0) fail("no such label");
    warp.pc[lane] = static_cast<uint32_t>(target);
  }

  // Where an address in shared memory lies: of this block, or of any of the
  // cluster.
  uint8_t* shared(uint32_t at, size_t bytes, bool remote = false) {
    Running& running = *warp.running;
    const uint32_t rank = at >> kRankBit, offset = at & ((1u << kRankBit) - 1);
    if (rank >= running.blocks.size() || (!remote && rank != warp.block->rank))
      fail("shared memory of another block: " + std::to_string(at));
    Block& block = running.blocks[rank];
    if (remote && block.n_live == 0) fail("shared memory of a block that has ended");
    if (offset % bytes != 0) fail("misaligned in shared memory: " + std::to_string(offset));
    const uint32_t base = running.layout.shared_base;
    if (offset < base || offset - base + bytes > block.shared.size())
      fail("outside shared memory: " + std::to_string(offset));
    return &block.shared[offset - base];
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

}  // namespace machine
