// The loader and the scheduler of machine.h.
#include "machine.h"

#include <elf.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <random>
#include <sstream>

#include "machine_state.h"

namespace machine {

void Warp::block_lanes(uint32_t lanes, Wait why, uint32_t index) {
  blocked |= lanes;
  for (const unsigned lane : Lanes{lanes}) wait[lane] = why, wait_index[lane] = index;
}

// Lanes that wait for one another go on once all of them that have not ended
// are there.
void Warp::check_convergence() {
  for (const unsigned lane : Lanes{live}) {
    if (wait[lane] != Wait::kConvergence) continue;
    const Lanes set{sets[lane][wait_index[lane]] & live};
    bool all = true;
    for (const unsigned other : set) all = all && wait[other] == Wait::kConvergence && pc[other] == pc[lane];
    if (!all) continue;
    for (const unsigned other : set) release(other);
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

namespace {

// Cycles of an access to 32 banks of 4 bytes, in groups of lanes that ask for
// 128 bytes at most; and with no conflict.
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

// accesses: sorted.
void count_vectors(const std::vector<std::pair<uint64_t, unsigned>>& accesses, Vectors& vectors) {
  uint64_t end = 0, sector = ~uint64_t{0};
  for (const auto& [address, bytes] : accesses) {
    if (address + bytes > end) vectors.bytes += address + bytes - std::max(address, end), end = address + bytes;
    if (address / 32 != sector) sector = address / 32, ++vectors.sectors;
  }
}

}  // namespace

void Warp::account(const Instruction& instruction) {
  Counts& counts = running->counts;
  if (!global_accesses.empty()) {
    const bool stores = instruction.base[0] == 'S';
    uint64_t& n = stores ? counts.stored : counts.loaded;
    std::sort(global_accesses.begin(), global_accesses.end());
    if (global_accesses.front().second >= 8 && global_accesses.front() != global_accesses.back()) {
      count_vectors(global_accesses, counts.vectors[stores                         ? "stores"
                                                    : instruction.base == "LDGSTS" ? "copies"
                                                                                   : "loads"]);
    }
    uint64_t last = ~uint64_t{0};
    for (const auto& [address, bytes] : global_accesses) {
      if (address / 32 != last) last = address / 32, ++n;
    }
    global_accesses.clear();
  }
  if (!shared_accesses.empty()) count_banks(shared_accesses, counts), shared_accesses.clear();
}

// One instruction, by the lanes that are furthest behind. False where none can
// go on.
bool Warp::step() {
  const uint32_t ready = live & ~blocked;
  if (ready == 0) return false;
  uint32_t at = ~0u, lanes = 0;
  for (const unsigned lane : Lanes{ready}) {
    if (pc[lane] > at) continue;
    lanes = pc[lane] < at ? 1u << lane : lanes | 1u << lane;
    at = pc[lane];
  }
  if (at >= running->code.instructions.size()) fail("no instruction at " + std::to_string(at));
  Instruction& instruction = running->code.instructions[at];
  ++instruction.count;
  uint32_t active = 0;
  for (const unsigned lane : Lanes{lanes}) {
    ++pc[lane];
    if (!instruction.is_guarded || Thread{*this, lane}.p(instruction.guard)) active |= 1u << lane;
  }
  if (active == 0) return true;
  try {
    if (instruction.of_warp != nullptr) {
      instruction.of_warp(*this, instruction, active);
    } else if (instruction.of_thread != nullptr) {
      for (const unsigned lane : Lanes{active}) {
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

namespace {

// All of them, until none has a thread left. In order: each block as far as it
// can get without the next.
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

std::string json(const Counts& counts) {
  std::ostringstream text;
  text << "{\"instructions\": {";
  const char* separator = "";
  for (const auto& [opcode, n] : counts.instructions) {
    text << separator << '"' << opcode << "\": " << n;
    separator = ", ";
  }
  text << "}, \"loaded\": " << counts.loaded << ", \"stored\": " << counts.stored
       << ", \"shared_cycles\": " << counts.shared_cycles << ", \"shared_least\": " << counts.shared_least
       << ", \"vectors\": {";
  separator = "";
  for (const auto& [kind, vectors] : counts.vectors) {
    text << separator << '"' << kind << "\": {\"sectors\": " << vectors.sectors << ", \"bytes\": " << vectors.bytes
         << "}";
    separator = ", ";
  }
  text << "}}";
  return text.str();
}

struct Program::Impl {
  std::vector<char> cubin;
  std::vector<uint8_t> addresses;  // c[0x4]: of what follows
  std::vector<uint8_t> globals;    // arrays in global memory
  std::map<std::string, std::vector<std::string>> texts;
  std::map<std::string, Code> codes;
  Layout layout{};

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
        codes[of(".nv.shared.")].static_shared =
            std::max<size_t>(section.sh_size, layout.shared_base) - layout.shared_base;
      } else if (name.rfind(".nv.constant2.", 0) == 0) {
        codes[of(".nv.constant2.")].jump_tables = bytes_of(section);
      } else if (name == ".nv.constant4") {
        addresses = bytes_of(section);
      } else if (name == ".nv.global.init") {
        globals = bytes_of(section), globals_index = k;
      } else if (name == ".rela.nv.constant4" || name == ".rel.nv.constant4") {
        relocations = &section;
      } else if (section.sh_type == SHT_SYMTAB) {
        symbols = &section;
      }
    }
    if (relocations == nullptr) return;
    const auto* table = reinterpret_cast<const Elf64_Sym*>(cubin.data() + symbols->sh_offset);
    for (size_t at = 0; at < relocations->sh_size; at += relocations->sh_entsize) {
      Elf64_Rela relocation{};  // before sm_90 without an addend, which stands where the address is to be
      std::memcpy(&relocation, cubin.data() + relocations->sh_offset + at, relocations->sh_entsize);
      if (relocations->sh_type == SHT_REL) std::memcpy(&relocation.r_addend, &addresses.at(relocation.r_offset), 8);
      const Elf64_Sym& symbol = table[ELF64_R_SYM(relocation.r_info)];
      const auto addend = static_cast<uint64_t>(relocation.r_addend);
      const bool is_known = symbol.st_shndx == globals_index;  // else null, which must not be read
      const uint64_t address = is_known ? reinterpret_cast<uint64_t>(globals.data()) + symbol.st_value + addend : 0;
      std::memcpy(&addresses.at(relocation.r_offset), &address, 8);
    }
  }

  // Which architecture, and of each kernel the lines of its section, parsed when it is launched.
  void read(const std::string& path) {
    std::ifstream file(path);
    std::vector<std::string>* lines = nullptr;
    for (std::string line; std::getline(file, line);) {
      const size_t section = line.find(".section\t");
      for (const std::string name : {".target\tsm_", "EF_CUDA_SM"}) {  // the latter of an nvdisasm before CUDA 13
        const size_t arch = line.find(name);
        if (arch != std::string::npos)
          layout = layout_of(static_cast<unsigned>(std::stoul(line.substr(arch + name.size()))));
      }
      if (section != std::string::npos) {
        const size_t text = line.find(".text.");
        lines = text == std::string::npos ? nullptr : &texts[line.substr(text + 6, line.find(',') - text - 6)];
      } else if (lines != nullptr) {
        lines->push_back(line);
      }
    }
    if (texts.empty() || layout.parameters == 0) fail(path + ": no machine code");
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
    std::vector<uint8_t> constants(layout.parameters + launch.parameter_bytes, 0xFF);
    const auto put = [&](size_t at, uint32_t value) { std::memcpy(&constants[at], &value, 4); };
    for (size_t k = 0; k < 3; ++k) put(4 * k, launch.block[k]), put(12 + 4 * k, launch.grid[k]);
    put(0x28, kLocalBytes);  // where the stack begins, downwards
    if (layout.parameters > 0x188) put(0x140, launch.cluster > 1), put(0x188, launch.cluster);
    std::memcpy(&constants[layout.parameters], launch.parameters, launch.parameter_bytes);
    return constants;
  }
};

Program::Program(const std::string& cubin, const std::string& disassembly) : impl_(new Impl) {
  impl_->read(disassembly), impl_->load(cubin);
}
Program::~Program() = default;

size_t Program::static_shared(const std::string& kernel) const {
  const auto found = impl_->codes.find(kernel);
  return found == impl_->codes.end() ? 0 : found->second.static_shared;
}

void Program::run(const std::string& kernel, const Launch& launch, int order) {
  Code& code = impl_->code_of(kernel);
  const std::vector<uint8_t> constants = impl_->constants_of(launch);
  for (Instruction& instruction : code.instructions) instruction.count = 0;
  const unsigned threads = launch.block[0] * launch.block[1] * launch.block[2];
  std::mt19937 random(1);
  const uint64_t n_blocks = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2];
  for (uint64_t first = 0; first < n_blocks; first += launch.cluster) {
    Running running{launch, impl_->layout, code, counts, constants, impl_->addresses, {}, {}};
    for (unsigned rank = 0; rank < launch.cluster; ++rank) {
      const uint64_t index = first + rank;
      Block& block = running.blocks.emplace_back();
      block.index = {static_cast<unsigned>(index % launch.grid[0]),
                     static_cast<unsigned>(index / launch.grid[0] % launch.grid[1]),
                     static_cast<unsigned>(index / launch.grid[0] / launch.grid[1])};
      block.rank = rank, block.n_threads = block.n_live = threads;
      block.shared.assign(code.static_shared + launch.dynamic_shared, 0xFF);
      for (unsigned thread = 0; thread < threads; thread += kLanes) {
        Warp& warp = running.warps.emplace_back(order == 0 ? 0 : 0x7F);
        warp.running = &running, warp.block = &block, warp.first_thread = thread;
        warp.live = threads - thread >= kLanes ? ~0u : (1u << (threads - thread)) - 1;
      }
    }
    run_cluster(running, order, random);
  }
  for (const Instruction& instruction : code.instructions) {
    if (instruction.count != 0) counts.instructions[instruction.opcode] += instruction.count;
  }
}

}  // namespace machine
