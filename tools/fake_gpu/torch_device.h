// What the fake GPU consists of: memory, streams, random numbers, hooks, synchronization. torch_device.cpp alone
// includes it.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace {

using at::Tensor;
using c10::DeviceType;
using c10::IValue;

constexpr int kDevices = 1;

// ---- memory

std::atomic<int64_t> allocated{0}, peak{0};

struct Block {
  explicit Block(size_t rounded) : memory(std::aligned_alloc(kAlignment, rounded)), bytes(rounded) {
    TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr, "the fake GPU is out of memory");
    std::memset(memory, 0xFF, bytes);
    const int64_t now = allocated += static_cast<int64_t>(bytes);
    for (int64_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
    }
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    allocated -= static_cast<int64_t>(bytes);
    std::free(memory);
  }
  static constexpr size_t kAlignment = 512;  // as a GPU's allocator has it
  void* memory;
  size_t bytes;
};

// What a graph does, and the memory that was allocated while it was captured, which stays its own.
struct Graph {
  std::vector<std::function<void()>> work;
  std::vector<std::shared_ptr<Block>> blocks;
};
std::atomic<Graph*> capture{nullptr};  // by one thread at a time, for all: backward has threads of its own

// New memory holds NaN.
struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const at::Device device(DeviceType::CUDA, 0);
    if (bytes == 0) return {nullptr, device};
    const size_t rounded = (bytes + Block::kAlignment - 1) / Block::kAlignment * Block::kAlignment;
    auto* block = new std::shared_ptr<Block>(std::make_shared<Block>(rounded));
    if (Graph* graph = capture) graph->blocks.push_back(*block);
    const auto release = [](void* context) { delete static_cast<std::shared_ptr<Block>*>(context); };
    return {(*block)->memory, block, release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Allocator allocator;

// ---- streams, of which only the number is known

thread_local c10::StreamId current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  at::Device exchangeDevice(at::Device) const override { return getDevice(); }
  at::Device getDevice() const override { return at::Device(DeviceType::CUDA, 0); }
  void setDevice(at::Device device) const override { TORCH_CHECK(device.index() < kDevices, "invalid device ordinal"); }
  void uncheckedSetDevice(at::Device) const noexcept override {}
  c10::Stream getStream(at::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream getDefaultStream(at::Device device) const override { return c10::Stream(c10::Stream::UNSAFE, device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), std::exchange(current_stream, stream.id()));
  }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
};

// ---- random numbers: what (seed, offset) give, the CPU's generator draws

struct GeneratorImpl final : c10::GeneratorImpl {
  GeneratorImpl() : c10::GeneratorImpl(at::Device(DeviceType::CUDA, 0), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  // As a GPU's generator has it: 8 bytes of seed, 8 of offset.
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const Tensor state = at::empty({16}, at::kByte);
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    seed_ = other->current_seed(), offset_ = other->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return clone(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl;
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }
  // A generator of the CPU's for one operator, four offsets a call as on a GPU.
  at::Generator next() {
    const std::lock_guard<std::mutex> lock(mutex_);
    at::Generator drawn = at::detail::createCPUGenerator(seed_ * 0x9E3779B97F4A7C15ull + offset_);
    offset_ += 4;
    return drawn;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator last_generator;  // that Python made: its first is the GPU's own
at::Generator& default_generator() {
  static auto& generator = *new at::Generator(last_generator);
  return generator;
}

at::Generator next_of(const at::Generator& generator) {
  auto* impl = dynamic_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(impl != nullptr, "Expected a 'cuda' device type for generator but found '", generator.device(), "'");
  return impl->next();
}

// For an operator that takes no generator: the CPU's own one draws as the GPU's would.
class CpuGeneratorReplaced {
 public:
  explicit CpuGeneratorReplaced(bool needed) : needed_(needed) {
    if (!needed_) return;
    own_ = at::detail::getDefaultCPUGenerator().get_state();
    at::Generator drawing = next_of(default_generator());
    at::Generator(at::detail::getDefaultCPUGenerator()).set_current_seed(drawing.current_seed());
  }
  CpuGeneratorReplaced(const CpuGeneratorReplaced&) = delete;
  CpuGeneratorReplaced& operator=(const CpuGeneratorReplaced&) = delete;
  ~CpuGeneratorReplaced() {
    if (needed_) at::Generator(at::detail::getDefaultCPUGenerator()).set_state(own_);
  }

 private:
  bool needed_;
  Tensor own_;
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  std::string showConfig() const override { return ""; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return last_generator = at::make_generator<GeneratorImpl>();
  }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(DeviceType::CUDA, 0); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// ---- synchronisation

int sync_mode = 0;  // as set_sync_debug_mode: 2 is an error

void synchronises(const char* what) {
  TORCH_CHECK(capture == nullptr, "operation not permitted when stream is capturing: ", what);
  TORCH_CHECK(sync_mode < 2, "called a synchronizing CUDA operation: ", what);
}

}  // namespace
