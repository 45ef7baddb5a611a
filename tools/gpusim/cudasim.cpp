// The scheduler of cudasim.h: fibers, barriers, shared memory.
#include "cudasim.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#else  // it need not be told which stack is in use
#define __sanitizer_start_switch_fiber(...)
#define __sanitizer_finish_switch_fiber(...)
#endif

// Saves the callee-saved registers and the stack pointer, and goes on where the other fiber left off. swapcontext also
// switches the signal mask: a system call each time, ten times slower.
extern "C" void cudasim_switch(void** from_stack, void* to_stack);
__asm__(
    ".text\n.globl cudasim_switch\n.type cudasim_switch,@function\ncudasim_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

namespace cudasim {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr int kNamedBarriers = 16;
constexpr unsigned kWarp = 32, kMaxThreads = 1024, kMaxClusterBlocks = 8;

enum class State {
  kReady,
  kAtBlockBarrier,
  kAtNamedBarrier,
  kAtClusterBarrier,
  kAtByteBarrier,
  kAtWarpOperation,
  kDone
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  size_t stack_bytes = kStackBytes;
  void* sanitizer_stack = nullptr;
  State state = State::kDone;
  int line = 0;                            // of the block barrier it waits at
  int barrier = 0;                         // the named barrier it waits at
  const uint64_t* byte_barrier = nullptr;  // the one it waits at
  bool arrived_at_cluster = false;
  std::vector<Copy> open_group;
  std::deque<std::vector<Copy>> groups;
  ThreadIndices indices{};
};

struct Warp {
  // Two generations: a lane may bring its next value while another has not yet read this one.
  uint64_t slot[2][kWarp];
  unsigned arrived = 0, mask = 0, generation = 0;
};

struct NamedBarrier {
  int arrived = 0, expected = 0;
};

struct ByteBarrier {
  bool has_expected = false;
  int64_t bytes = 0;  // to come; negative where some came before they were expected
  int phase = 0;
};

struct FreeBytes {
  void operator()(void* bytes) const { std::free(bytes); }
};
using Bytes = std::unique_ptr<void, FreeBytes>;
using Array = std::pair<Bytes, size_t>;

// What a block has of its own.
struct Block {
  std::vector<Warp> warps;
  NamedBarrier named_barriers[kNamedBarriers];
  std::map<const uint64_t*, ByteBarrier> byte_barriers;
  std::map<std::pair<const char*, int>, Array> shared_arrays;
  Bytes dynamic_bytes;
};

std::vector<Block> blocks;  // of the cluster that runs
std::vector<Fiber> fibers;  // of all its blocks, one block's after another's
size_t n_threads = 0;       // a block
bool cluster_has_met = false;
Fiber scheduler;
Fiber* running = nullptr;
Body kernel_body = nullptr;
void* kernel_context = nullptr;
size_t n_dynamic_bytes = 0;
Order order = Order::kInStep;
std::mt19937 random_order{1};

Block& block_of(const Fiber& fiber) { return blocks[fiber.indices.cluster_rank]; }

Bytes new_shared(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 16, bytes) != 0) std::abort();
  return Bytes(memory);
}

void fill_with_nan(void* memory, size_t bytes) { std::memset(memory, 0xFF, bytes); }

void switch_to(Fiber& from, Fiber& to, bool last_time = false) {
  __sanitizer_start_switch_fiber(last_time ? nullptr : &from.sanitizer_stack, to.stack, to.stack_bytes);
  cudasim_switch(&from.stack_pointer, to.stack_pointer);
  const void* stack = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(from.sanitizer_stack, &stack, &bytes);
}

void fiber_main() {
  const void* stack = nullptr;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &scheduler.stack_bytes);
  scheduler.stack = static_cast<char*>(const_cast<void*>(stack));
  kernel_body(kernel_context);
  running->state = State::kDone;
  switch_to(*running, scheduler, true);
  std::abort();
}

void wait(State state) {
  Fiber& self = *running;
  self.state = state;
  switch_to(self, scheduler);
}

void prepare(Fiber& fiber) {
  if (fiber.stack == nullptr) {
    void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for a stack");
    fiber.stack = static_cast<char*>(stack);
  }
  ASAN_UNPOISON_MEMORY_REGION(fiber.stack, kStackBytes);  // red zones of the thread that ran here before
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes);
  *--top = nullptr;  // keeps the stack aligned as the ABI has it at a function's entry
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.state = State::kReady;
  fiber.arrived_at_cluster = false;
  fiber.open_group.clear();
  fiber.groups.clear();
}

bool run_if_ready(size_t index) {
  Fiber& fiber = fibers[index];
  if (fiber.state != State::kReady) return false;
  running = &fiber;
  switch_to(scheduler, fiber);
  return true;
}

size_t warps_of_block() { return (n_threads + kWarp - 1) / kWarp; }

// Warps of the cluster are counted through its blocks.
bool run_warp_alone(size_t warp) {
  bool ran = false;
  const size_t first_of_block = warp / warps_of_block() * n_threads, first = warp % warps_of_block() * kWarp;
  for (bool progress = true; progress;) {
    progress = false;
    for (size_t i = first; i < std::min<size_t>(n_threads, first + kWarp); ++i)
      progress |= run_if_ready(first_of_block + i);
    ran |= progress;
  }
  return ran;
}

// Every thread runs once, or every warp as far as it comes. Returns whether any ran.
bool run_round() {
  bool ran = false;
  if (order == Order::kInStep) {
    for (size_t i = 0; i < fibers.size(); ++i) ran |= run_if_ready(i);
    return ran;
  }
  std::vector<size_t> warps(blocks.size() * warps_of_block());
  std::iota(warps.begin(), warps.end(), size_t{0});
  if (order == Order::kWarpsReverse) std::reverse(warps.begin(), warps.end());
  if (order == Order::kWarpsRandom) std::shuffle(warps.begin(), warps.end(), random_order);
  for (size_t warp : warps) ran |= run_warp_alone(warp);
  return ran;
}

// Lets the barrier of a block go once all its threads that have not exited are there. Returns whether it did.
bool release_block_barrier(size_t block) {
  int line = 0;
  const auto first = fibers.begin() + static_cast<std::ptrdiff_t>(block * n_threads);
  const auto last = first + static_cast<std::ptrdiff_t>(n_threads);
  for (auto fiber = first; fiber != last; ++fiber) {
    if (fiber->state == State::kDone) continue;
    if (fiber->state != State::kAtBlockBarrier) return false;
    if (line != 0 && line != fiber->line) fail("__syncthreads at different places (divergent barrier)");
    line = fiber->line;
  }
  for (auto fiber = first; fiber != last; ++fiber) {
    if (fiber->state == State::kAtBlockBarrier) fiber->state = State::kReady;
  }
  return line != 0;
}

// The same for the cluster's, at which threads arrive before they wait.
bool release_cluster_barrier() {
  bool any_waits = false;
  for (const Fiber& fiber : fibers) {
    if (fiber.state != State::kDone && !fiber.arrived_at_cluster) return false;
    any_waits |= fiber.state == State::kAtClusterBarrier;
  }
  if (!any_waits) return false;
  cluster_has_met = true;
  for (Fiber& fiber : fibers) {
    fiber.arrived_at_cluster = false;
    if (fiber.state == State::kAtClusterBarrier) fiber.state = State::kReady;
  }
  return true;
}

bool release_barriers() {
  bool released = false;
  for (size_t block = 0; block < blocks.size(); ++block) released |= release_block_barrier(block);
  return released || release_cluster_barrier();
}

ByteBarrier& find_byte_barrier(size_t block, const uint64_t* barrier) {
  const auto found = blocks[block].byte_barriers.find(barrier);
  if (found == blocks[block].byte_barriers.end()) fail("a barrier that counts bytes was not initialised");
  return found->second;
}

void end_phase_if_over(size_t block, const uint64_t* barrier) {
  ByteBarrier& state = find_byte_barrier(block, barrier);
  if (!state.has_expected || state.bytes != 0) return;
  state.has_expected = false;
  state.phase ^= 1;
  for (size_t i = 0; i < n_threads; ++i) {
    Fiber& fiber = fibers[block * n_threads + i];
    if (fiber.state == State::kAtByteBarrier && fiber.byte_barrier == barrier) fiber.state = State::kReady;
  }
}

// first: the index of the cluster's first block; its blocks follow along x.
void run_cluster(dim3 grid, dim3 block, uint3 first) {
  for (size_t i = 0; i < fibers.size(); ++i) {
    const unsigned rank = static_cast<unsigned>(i / n_threads), linear = static_cast<unsigned>(i % n_threads);
    const uint3 thread{linear % block.x, linear / block.x % block.y, linear / block.x / block.y};
    const uint3 index{first.x + rank, first.y, first.z};
    fibers[i].indices = ThreadIndices{thread, index, block, grid, linear, rank, static_cast<unsigned>(blocks.size())};
    prepare(fibers[i]);
  }
  cluster_has_met = false;
  for (Block& own : blocks) {
    std::fill(own.warps.begin(), own.warps.end(), Warp{});
    std::fill(std::begin(own.named_barriers), std::end(own.named_barriers), NamedBarrier{});
    own.byte_barriers.clear();
    for (auto& [place, array] : own.shared_arrays) fill_with_nan(array.first.get(), array.second);
    if (n_dynamic_bytes != 0) fill_with_nan(own.dynamic_bytes.get(), n_dynamic_bytes);
  }
  const auto done = [](const Fiber& fiber) { return fiber.state == State::kDone; };
  while (!std::all_of(fibers.begin(), fibers.end(), done)) {
    if (!run_round() && !release_barriers()) fail("deadlock: threads wait for others that never come");
  }
}

}  // namespace

void set_order(Order new_order) { order = new_order; }
const ThreadIndices& current() { return running->indices; }

void fail(const char* message) {
  const ThreadIndices indices = running != nullptr ? running->indices : ThreadIndices{};
  std::fprintf(stderr, "cudasim: %s (block %u, thread %u)\n", message, indices.block.x, indices.linear);
  std::abort();
}

void block_barrier(int line) {
  running->line = line;
  wait(State::kAtBlockBarrier);
}

void named_barrier(int barrier, int threads) {
  if (barrier < 1 || barrier >= kNamedBarriers) fail("named barriers are 1 to 15");
  if (threads <= 0 || threads % static_cast<int>(kWarp) != 0) fail("a named barrier counts whole warps");
  NamedBarrier& state = block_of(*running).named_barriers[barrier];
  if (state.arrived == 0) state.expected = threads;
  if (state.expected != threads) fail("threads expect different numbers at one named barrier");
  if (++state.arrived == threads) {
    state.arrived = 0;
    for (Fiber& fiber : fibers) {
      const bool same_block = fiber.indices.cluster_rank == running->indices.cluster_rank;
      if (fiber.state == State::kAtNamedBarrier && same_block && fiber.barrier == barrier) fiber.state = State::kReady;
    }
  } else {
    running->barrier = barrier;
    wait(State::kAtNamedBarrier);
  }
}

const uint64_t* warp_exchange(unsigned mask, uint64_t value) {
  const unsigned lane = running->indices.linear % kWarp, base_in_block = running->indices.linear - lane;
  const size_t base = running->indices.cluster_rank * n_threads + base_in_block;
  Warp& warp = block_of(*running).warps[base_in_block / kWarp];
  // The lanes of a partial warp that do not exist take no part: hardware ignores their bits of a full mask.
  const size_t n_lanes = std::min<size_t>(kWarp, n_threads - base_in_block);
  if (n_lanes < kWarp) mask &= (1u << n_lanes) - 1;
  if ((mask >> lane & 1u) == 0) fail("a lane is not in its own mask");
  for (unsigned other = 0; other < n_lanes; ++other) {
    if ((mask >> other & 1u) != 0 && fibers[base + other].state == State::kDone)
      fail("a warp operation names a lane that has exited");
  }
  if (warp.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) fail("lanes meet in a warp operation with different masks");
  const unsigned generation = warp.generation % 2;
  warp.slot[generation][lane] = value;
  warp.arrived |= 1u << lane;
  if (warp.arrived == mask) {
    warp.arrived = 0;
    ++warp.generation;
    for (unsigned other = 0; other < n_lanes; ++other) {
      Fiber& fiber = fibers[base + other];
      if ((mask >> other & 1u) != 0 && fiber.state == State::kAtWarpOperation) fiber.state = State::kReady;
    }
  } else {
    wait(State::kAtWarpOperation);
  }
  return warp.slot[generation];
}

void* shared_array(const char* file, int line, size_t bytes) {
  auto& array = block_of(*running).shared_arrays[{file, line}];
  if (array.first == nullptr) {
    array = {new_shared(bytes), bytes};
    fill_with_nan(array.first.get(), bytes);
  }
  if (array.second != bytes) fail("a shared array changes its size");
  return array.first.get();
}

void* dynamic_shared() { return block_of(*running).dynamic_bytes.get(); }

void cluster_arrive() {
  if (running->arrived_at_cluster) fail("a thread arrives twice at the cluster's barrier");
  running->arrived_at_cluster = true;
}

void cluster_wait() {
  if (!running->arrived_at_cluster) fail("a thread waits at the cluster's barrier without having arrived");
  wait(State::kAtClusterBarrier);
}

void* remote_shared(void* mine, int rank) {
  if (rank < 0 || static_cast<size_t>(rank) >= blocks.size()) fail("no such block in the cluster");
  if (!cluster_has_met) fail("a store into another block's shared memory before all have begun");
  for (size_t i = 0; i < n_threads; ++i) {
    if (fibers[static_cast<size_t>(rank) * n_threads + i].state == State::kDone)
      fail("a store into the shared memory of a block that has ended");
  }
  const auto inside = [mine](const void* array, size_t bytes) {
    return mine >= array && static_cast<char*>(mine) < static_cast<const char*>(array) + bytes;
  };
  Block &own = block_of(*running), &other = blocks[static_cast<size_t>(rank)];
  if (n_dynamic_bytes != 0 && inside(own.dynamic_bytes.get(), n_dynamic_bytes)) {
    return static_cast<char*>(other.dynamic_bytes.get()) +
           (static_cast<char*>(mine) - static_cast<char*>(own.dynamic_bytes.get()));
  }
  for (auto& [place, array] : own.shared_arrays) {
    if (!inside(array.first.get(), array.second)) continue;
    const auto found = other.shared_arrays.find(place);
    if (found == other.shared_arrays.end()) fail("a store into an array that the other block has not declared");
    return static_cast<char*>(found->second.first.get()) +
           (static_cast<char*>(mine) - static_cast<char*>(array.first.get()));
  }
  fail("a store into shared memory that is none");
}

void byte_barrier_init(uint64_t* barrier) {
  if (cluster_has_met) fail("a barrier that counts bytes is initialised after the cluster's first meeting");
  if (!block_of(*running).byte_barriers.try_emplace(barrier).second)
    fail("a barrier that counts bytes is used already");
}

void byte_barrier_expect(uint64_t* barrier, int bytes) {
  const size_t block = running->indices.cluster_rank;
  ByteBarrier& state = find_byte_barrier(block, barrier);
  if (state.has_expected) fail("two threads say how many bytes a barrier is to expect");
  state.has_expected = true;
  state.bytes += bytes;
  end_phase_if_over(block, barrier);
}

void byte_barrier_wait(uint64_t* barrier, int parity) {
  const ByteBarrier& state = find_byte_barrier(running->indices.cluster_rank, barrier);
  if (state.phase != parity) return;
  running->byte_barrier = barrier;
  wait(State::kAtByteBarrier);
}

void store_remote_counted(void* mine, int rank, const void* value, size_t bytes, uint64_t* barrier) {
  const auto* const remote_barrier = static_cast<const uint64_t*>(remote_shared(barrier, rank));
  std::memcpy(remote_shared(mine, rank), value, bytes);
  find_byte_barrier(static_cast<size_t>(rank), remote_barrier).bytes -= static_cast<int64_t>(bytes);
  end_phase_if_over(static_cast<size_t>(rank), remote_barrier);
}

void copy_async(void* shared, const void* global, size_t bytes) {
  const auto misaligned = [bytes](const void* address) { return reinterpret_cast<uintptr_t>(address) % bytes != 0; };
  if (misaligned(shared) || misaligned(global)) fail("a misaligned asynchronous copy");
  fill_with_nan(shared, bytes);
  running->open_group.push_back({shared, global, bytes});
}

void copy_async_commit() {
  running->groups.push_back(std::move(running->open_group));
  running->open_group.clear();
}

void copy_async_wait(int n_pending) {
  while (running->groups.size() > static_cast<size_t>(n_pending)) {
    for (const Copy& copy : running->groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    running->groups.pop_front();
  }
}

cudaError_t run_grid(Body body, void* context, dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster_blocks) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> one_launch_at_a_time(mutex);
  n_threads = static_cast<size_t>(block.x) * block.y * block.z;
  if (n_threads == 0 || n_threads > kMaxThreads || shared_bytes > static_cast<size_t>(gpu_in_use().shared_limit))
    return cudaErrorInvalidConfiguration;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaErrorInvalidConfiguration;
  if (cluster_blocks == 0 || cluster_blocks > kMaxClusterBlocks || grid.x % cluster_blocks != 0)
    return cudaErrorInvalidConfiguration;
  const size_t n_fibers = n_threads * cluster_blocks;
  while (fibers.size() > n_fibers) {
    if (fibers.back().stack != nullptr) munmap(fibers.back().stack, kStackBytes);
    fibers.pop_back();
  }
  fibers.resize(n_fibers);
  blocks.clear();
  blocks.resize(cluster_blocks);
  n_dynamic_bytes = shared_bytes;
  for (Block& own : blocks) {
    own.warps.resize(warps_of_block());
    if (shared_bytes != 0) own.dynamic_bytes = new_shared(shared_bytes);
  }
  kernel_body = body;
  kernel_context = context;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; x += cluster_blocks) run_cluster(grid, block, uint3{x, y, z});
    }
  }
  running = nullptr;
  return cudaSuccess;
}

}  // namespace cudasim
