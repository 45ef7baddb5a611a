// Executes a kernel's machine code (SASS of sm_70, sm_75, sm_80, sm_90) on the CPU, for tests: what nvcc, ptxas and
// Triton made of a source, where the simulator of cudasim.h runs the source itself.
//
// A cubin is loaded with its disassembly by nvdisasm. Every thread has registers, every warp its divergence, every
// block its shared memory (registers and memory are filled with NaN); blocks, or clusters of them, run one after
// another. Addresses of global memory are addresses of this process: under AddressSanitizer an access out of bounds is
// found. So are misaligned accesses, accesses outside a block's shared memory, warp operations that name an absent
// lane, deadlocks, stores into a block of the cluster that has not begun or has ended. A copy that was not waited for
// has not arrived. Every instruction that is not known exactly is an error. What NVIDIA does not document was read from
// compiled code; results of the approximating unit (MUFU) are the nearest, moved by set_error(). Blind to memory-model
// effects, and to the waits between instructions that ptxas encodes beside them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

namespace machine {

struct Launch {
  unsigned grid[3], block[3];
  unsigned cluster;  // blocks of a cluster, along x; 1: none
  size_t dynamic_shared;
  const void* parameters;
  size_t parameter_bytes;
};

// A warp's accesses to global memory with vectors: the 32-byte sectors that they touch, and the bytes that they ask
// for.
struct Vectors {
  uint64_t sectors = 0, bytes = 0;
};

// What one or several launches took.
struct Counts {
  std::map<std::string, uint64_t> instructions;  // by opcode: executed, of warps
  uint64_t loaded = 0, stored = 0;               // 32-byte sectors of global memory, of each warp's accesses
  std::map<std::string, Vectors> vectors;  // of 8 bytes a lane or more, of several addresses: loads, stores, copies
  uint64_t shared_cycles = 0, shared_least = 0;  // of warps' accesses to shared memory, with and without bank conflicts
};

std::string json(const Counts& counts);

class Program {
 public:
  // Throws std::runtime_error where a file is not what it should be.
  Program(const std::string& cubin, const std::string& disassembly);
  ~Program();
  // order: 0, 1, 2: which warp goes on where several can, each as far as it can alone: the first, the last, any.
  // Predicates that were not set are false in the first, true in the others.
  // Throws std::runtime_error, saying where, for all that is wrong.
  void run(const std::string& kernel, const Launch& launch, int order);
  size_t static_shared(const std::string& kernel) const;

  Counts counts;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Moves every result of MUFU by so many units in the last place.
void set_error(int ulps);

}  // namespace machine
