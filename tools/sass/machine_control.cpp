// Control, barriers, memory and what warps do together, of machine.h.
#include <algorithm>

#include "machine_instructions.h"

namespace machine {
namespace {

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
  for (const unsigned lane : Lanes{lanes & ~(1u << first)}) {
    Thread other{warp, lane};
    of_thread(other, i);
    if (other.u(i[0]) != value) fail("a uniform register for what differs between threads");
  }
}

void move(Thread& t, const Instruction& i) { t.set(i[0], t.u(i[1])); }

void shuffle(Warp& warp, const Instruction& i, uint32_t lanes) {
  uint32_t values[kLanes];
  for (unsigned lane = 0; lane < kLanes; ++lane) values[lane] = Thread{warp, lane}.u(i[2]);
  for (const unsigned lane : Lanes{lanes}) {
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
  // A vote on what is true asks which lanes are there.
  if (i.operands.back().index != kTrue && lanes != warp.live) fail("a warp operation by lanes that are apart");
  uint32_t ballot = 0;
  for (const unsigned lane : Lanes{lanes}) {
    if (Thread{warp, lane}.p(i.operands.back())) ballot |= 1u << lane;
  }
  const bool result = i.is(kANY) ? ballot != 0 : i.is(kALL) ? ballot == lanes : (ballot == lanes || ballot == 0);
  for (const unsigned lane : Lanes{lanes}) {
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

// Reduces the lanes' values into a uniform register.
void reduce(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != warp.live) fail("a warp operation by lanes that are apart");
  if (!i.is(kOR) && !i.is(kAND) && !i.is(kXOR) && !i.is(kSUM) && !i.is(kMIN) && !i.is(kMAX)) fail("a reduction");
  const unsigned first = static_cast<unsigned>(__builtin_ctz(lanes));
  uint32_t result = Thread{warp, first}.u(i[1]);
  for (const unsigned lane : Lanes{lanes & ~(1u << first)}) {
    const uint32_t value = Thread{warp, lane}.u(i[1]);
    result = i.is(kOR)    ? result | value
             : i.is(kAND) ? result & value
             : i.is(kXOR) ? result ^ value
             : i.is(kSUM) ? result + value
                          : extreme(i.is(kS32), i.is(kMIN), result, value);
  }
  Thread{warp, first}.set(i[0], result);
}

// To an address that is computed from the next instruction's.
void jump_by(Thread& t, const Instruction& i) {
  t.jump(static_cast<int>((t.warp.pc[t.lane] * kInstructionBytes + t.u(i[0]) + t.u(i[1])) / kInstructionBytes));
}

void branch(Thread& t, const Instruction& i) {
  for (size_t k = 0; k + 1 < i.operands.size(); ++k) {
    if (!t.p(i[k])) return;
  }
  t.jump(i.target);
}

// Never taken: the named lanes, or all, must be together.
void branch_if_divergent(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != (i.operands.size() > 1 ? Thread{warp, 0}.u(i[0]) : warp.live))
    fail("a warp operation by lanes that are apart");
}

// By all lanes that are here, or by none.
void branch_together(Warp& warp, const Instruction& i, uint32_t lanes) {
  const uint32_t next = warp.pc[__builtin_ctz(lanes)];
  for (const unsigned lane : Lanes{warp.live & ~warp.blocked & ~lanes}) {
    if (warp.pc[lane] == next) fail("a branch of all lanes by some");
  }
  for (const unsigned lane : Lanes{lanes}) Thread{warp, lane}.jump(i.target);
}

// Named by a number, or by a register that has the threads that it waits for
// above bit 16.
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
  for (const unsigned lane : Lanes{lanes}) warp.arrived_in[lane] = warp.running->cluster_phase;
  warp.running->cluster_arrived += static_cast<unsigned>(__builtin_popcount(lanes));
  warp.running->check_cluster_barrier();
}
void cluster_wait(Warp& warp, const Instruction&, uint32_t lanes) {
  for (const unsigned lane : Lanes{lanes}) {
    if (warp.arrived_in[lane] == warp.running->cluster_phase) warp.block_lanes(1u << lane, Wait::kCluster, 0);
  }
}

// ldmatrix and stmatrix: eight lanes have the addresses of a matrix's rows, of
// eight 16-bit numbers each; every lane has two neighbours of each matrix, which
// lie in a row, or in a column (MT88).
template <bool kStores>
void move_matrices(Warp& warp, const Instruction& i, uint32_t lanes) {
  if (lanes != ~0u) fail("a warp operation by lanes that are apart");
  const unsigned n_matrices = i.is(k4) ? 4 : i.is(k2) ? 2 : 1;
  const Operand &address = i[kStores ? 0 : 1], &first = i[kStores ? 1 : 0];
  uint8_t* rows[kLanes];
  for (unsigned lane = 0; lane < 8 * n_matrices; ++lane) {
    Thread t{warp, lane};
    const auto at = static_cast<uint32_t>(t.address(address));
    warp.shared_accesses.emplace_back(at, 16);
    rows[lane] = t.shared(at, 16);
  }
  for (unsigned lane = 0; lane < kLanes; ++lane) {
    Thread t{warp, lane};
    for (unsigned matrix = 0; matrix < n_matrices; ++matrix) {
      const int index = first.index + static_cast<int>(matrix);
      auto both = std::bit_cast<std::array<uint16_t, 2>>(kStores ? t.reg(index) : 0);
      for (unsigned half = 0; half < 2; ++half) {
        const unsigned along = lane % 4 * 2 + half, across = lane / 4;
        uint8_t* const number = rows[8 * matrix + (i.is(kMT88) ? along : across)] + 2 * (i.is(kMT88) ? across : along);
        if (kStores) {
          std::memcpy(number, &both[half], 2);
        } else {
          std::memcpy(&both[half], number, 2);
        }
      }
      if (!kStores) t.set(first.kind, index, std::bit_cast<uint32_t>(both));
    }
  }
}

unsigned convergence_barrier(const Instruction& i, size_t operand = 0) {
  const std::string& name = i[operand].name;
  if (name[0] != 'B') fail("barrier of convergence");
  return static_cast<unsigned>(std::stoi(name.substr(1)));
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
  if (found == barriers.end()) fail("a barrier of bytes that was not initialized");
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
  for (; groups.size() > t.u(i[1]); groups.erase(groups.begin())) {
    for (const Copy& copy : groups.front())
      std::memcpy(t.shared(copy.to, copy.bytes), reinterpret_cast<const void*>(copy.from), copy.bytes);
  }
}

using T = Thread;
using I = Instruction;

}  // namespace

bool is_predicate(const Operand& o) { return o.kind == Operand::kPredicate || o.kind == Operand::kUniformPredicate; }

void add_control_and_memory(Handlers& table) {
  static const auto ignored = [](T&, const I&) {};
  static const char* const kMemory = "E EF U8 S8 U16 S16 64 128 CONSTANT SYS U";  // U: of all loads of sm_75 alike
  // clang-format off
  const Handlers rows = {
      {"NOP", {"", ignored}},
      {"YIELD", {"", ignored}},
      {"PREEXIT", {"", ignored}},  // kernels run one after the other
      {"ACQBULK", {"", ignored}},
      {"CCTL", {"IVALL", ignored}},
      {"FENCE", {"VIEW ASYNC S", ignored}},
      {"EXIT", {"", leave}},
      {"BRA", {"DIV U", branch}},
      {"BRX", {"", jump_by}},
      {"BRXU", {"", jump_by}},
      {"CALL", {"REL NOINC", [](T& t, const I& i) { t.jump(i.target); }}},
      {"RET", {"REL NODEC", [](T& t, const I& i) { t.jump(static_cast<int>(t.u(i[0]) / kInstructionBytes)); }}},
      {"BSSY", {"", [](Warp& w, const I& i, uint32_t lanes) {
         for (const unsigned lane : Lanes{lanes}) w.sets[lane][convergence_barrier(i)] = lanes;
       }}},
      {"BSYNC", {"", [](Warp& w, const I& i, uint32_t lanes) {
         w.block_lanes(lanes, Wait::kConvergence, convergence_barrier(i));
         w.check_convergence();
       }}},
      {"BREAK", {"", [](Warp& w, const I& i, uint32_t lanes) {
         const unsigned index = convergence_barrier(i);
         for (auto& sets : w.sets) sets[index] &= ~lanes;
         w.check_convergence();
       }}},
      {"BMOV", {"32 CLEAR", [](Warp& w, const I& i, uint32_t lanes) {  // taken from the barrier, and dropped
         if (!i.is(k32) || !i.is(kCLEAR) || i[0].index != kZero) fail("a barrier of convergence as a number");
         for (const unsigned lane : Lanes{lanes}) w.sets[lane][convergence_barrier(i, 1)] = 0;
       }}},
      {"WARPSYNC", {"ALL", [](Warp& w, const I& i, uint32_t lanes) {
         for (const unsigned lane : Lanes{lanes}) {
           const uint32_t all = i.is(kALL) ? ~0u : Thread{w, lane}.u(i[0]);
           if ((all >> lane & 1) == 0) fail("a lane that does not wait for itself");
           w.sets[lane][kConvergenceBarriers] = all;
         }
         w.block_lanes(lanes, Wait::kConvergence, kConvergenceBarriers);
         w.check_convergence();
       }}},
      {"BAR", {"SYNC DEFER_BLOCKING", block_barrier}},
      {"UCGABAR_ARV", {"", cluster_arrive}},
      {"UCGABAR_WAIT", {"", cluster_wait}},
      {"SYNCS", {"EXCH ARRIVE PHASECHK TRANS64 TRYWAIT 64", byte_barriers}},
      {"STAS", {"64", store_remote}},
      {"LDGSTS", {"E BYPASS 64 128", copy_async}},
      {"LDGDEPBAR", {"", commit_copies}},
      {"DEPBAR", {"LE", wait_for_copies}},
      {"SHFL", {"BFLY IDX UP DOWN", shuffle}},
      {"REDUX", {"OR AND XOR SUM MIN MAX S32", reduce}},
      {"LDSM", {"16 M88 MT88 2 4", move_matrices<false>}},
      {"STSM", {"16 M88 MT88 2 4", move_matrices<true>}},
      {"VOTE", {"ANY ALL", vote}},
      {"VOTEU", {"ANY ALL", vote}},

      {"S2R", {"", special_register}},
      {"S2UR", {"", agreed<special_register>}},
      {"CS2R", {"", [](T& t, const I& i) {
         if (i[1].name != "SRZ") fail("register " + i[1].name);
         t.set64(i[0], 0);
       }}},
      {"R2UR", {"", agreed<move>}},
      {"MOV", {"", move}},
      {"LDC", {"U8 S8 U16 S16 64", [](T& t, const I& i) {
         load(t, i, i[0], std::bit_cast<std::array<uint8_t, 8>>(t.constant(i[1], size_of(i))).data());
       }}},
      {"LDG", {kMemory, [](T& t, const I& i) { load(t, i, i[0], t.global(t.address(i[1]), size_of(i))); }}},
      {"LD", {kMemory, [](T& t, const I& i) { load(t, i, i[0], t.global(t.address(i[1]), size_of(i))); }}},
      {"STG", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.global(t.address(i[0]), size_of(i))); }}},
      {"ST", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.global(t.address(i[0]), size_of(i))); }}},
      {"LDS", {kMemory, [](T& t, const I& i) {
         const auto at = static_cast<uint32_t>(t.address(i[1]));
         t.warp.shared_accesses.emplace_back(at, size_of(i));
         load(t, i, i[0], t.shared(at, size_of(i)));
       }}},
      {"STS", {kMemory, [](T& t, const I& i) {
         const auto at = static_cast<uint32_t>(t.address(i[0]));
         t.warp.shared_accesses.emplace_back(at, size_of(i));
         store(t, i, i[1], t.shared(at, size_of(i)));
       }}},
      {"LDL", {"U8 S8 U16 S16 64 128 LU", [](T& t, const I& i) {
         load(t, i, i[0], t.on_stack(t.address(i[1]), size_of(i)));
       }}},
      {"STL", {kMemory, [](T& t, const I& i) { store(t, i, i[1], t.on_stack(t.address(i[0]), size_of(i))); }}},
  };
  // clang-format on
  table.insert(rows.begin(), rows.end());
}

// A uniform instruction does once, with uniform registers, what the one without
// the U does for each thread.
void find_handlers(Instruction& instruction) {
  static const Handlers table = [] {
    Handlers all;
    add_control_and_memory(all), add_arithmetic(all);
    return all;
  }();
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
  if (instruction.base == "BRA" && (instruction.is(kDIV) || instruction.is(kU))) {
    instruction.of_thread = nullptr;
    instruction.of_warp = instruction.is(kDIV) ? branch_if_divergent : branch_together;
  }
}

}  // namespace machine
