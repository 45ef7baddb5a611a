// Runs launchers on the simulator: cases come as text on stdin, tensors as raw bytes in files. Each family of operators
// has a file of its own that includes this one and defines launch().
//
//   driver INPUT OUTPUT
//   case forward|backward        begins a case
//   number NAME VALUE            a field of the launcher's struct (dropout.seed etc. for nested ones)
//   input NAME BYTES SHIFT       a tensor of so many bytes, next in INPUT, placed SHIFT bytes past a 64-byte boundary
//   output NAME BYTES SHIFT      a tensor to be written; filled with NaN before, appended to OUTPUT afterwards
//   run ORDER...                 runs the case under each order of threads; from 10 on: its machine code (machine.h)
//   error ULPS                   moves the results of MUFU in what follows
//   machine CUBIN DISASSEMBLY COUNTS   what that is, and the file for what each such run takes, a line of JSON a run
//
// Every tensor is an allocation of its own, so that AddressSanitizer sees each access past either end. Inputs must be
// unchanged afterwards, and outputs the same bits under every order. The launcher's code is printed, one line a case.
#pragma once
#include <sanitizer/asan_interface.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "cudasim.h"
#include "launch.h"
#include "machine_driver.h"

namespace {

constexpr int kFirstMachineOrder = 10;

class Tensor {
 public:
  Tensor(size_t bytes, size_t shift) : bytes_(bytes), shift_(shift) {
    if (posix_memalign(&memory_, 64, shift + bytes) != 0) std::abort();
    ASAN_POISON_MEMORY_REGION(memory_, shift / 8 * 8);
    fill_with_nan();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
    ASAN_UNPOISON_MEMORY_REGION(memory_, shift_);
    std::free(memory_);
  }
  char* data() const { return static_cast<char*>(memory_) + shift_; }
  size_t bytes() const { return bytes_; }
  void fill_with_nan() { std::memset(data(), 0xFF, bytes_); }
  std::string copy() const { return std::string(data(), bytes_); }

 private:
  void* memory_ = nullptr;
  size_t bytes_, shift_;
};

// Memory of so many floats; null where they are none.
class Workspace : public Tensor {
 public:
  explicit Workspace(int64_t n_floats) : Tensor(static_cast<size_t>(n_floats) * sizeof(float), 0) {}
  float* floats() const { return bytes() != 0 ? reinterpret_cast<float*>(data()) : nullptr; }
};

struct Case {
  std::string direction;
  std::map<std::string, double> numbers;
  std::map<std::string, uint64_t> integers;
  std::map<std::string, Tensor> inputs, outputs;
  std::vector<std::string> output_order;
  int device = 0;

  char* tensor(const std::string& name) const {
    const auto input = inputs.find(name), output = outputs.find(name);
    return input != inputs.end() ? input->second.data() : output != outputs.end() ? output->second.data() : nullptr;
  }
  int64_t integer(const std::string& name) const {
    const auto found = integers.find(name);
    return found != integers.end() ? static_cast<int64_t>(found->second) : 0;
  }
  float number(const std::string& name) const {
    const auto found = numbers.find(name);
    return found != numbers.end() ? static_cast<float>(found->second) : 0.0f;
  }
  onetrip::DType dtype(const std::string& name) const { return static_cast<onetrip::DType>(integer(name)); }
};

// A field of a launcher's arguments from the tensor or the number of its name; null or 0 where the case has none.
template <typename Field>
void set(Field& field, const Case& c, const std::string& name) {
  if constexpr (std::is_pointer_v<Field>) {
    field = reinterpret_cast<Field>(c.tensor(name));
  } else if constexpr (std::is_floating_point_v<Field>) {
    field = c.number(name);
  } else {
    field = static_cast<Field>(c.integer(name));
  }
}
#define SET(field) set(args.field, c, #field)
#define SET_DROPOUT() \
  SET(dropout.threshold), SET(dropout.scale), SET(dropout.seed), SET(dropout.offset), SET(dropout.state)

int launch(const Case& c);  // of the family: returns the launcher's code

[[noreturn]] void fail(const std::string& message) {
  std::cerr << "driver: " << message << "\n";
  std::exit(3);
}

// Returns the outputs, one after another.
std::string run(Case& c, int order, int* code) {
  std::map<std::string, std::string> before;
  for (const auto& [name, tensor] : c.inputs) before[name] = tensor.copy();
  for (auto& [name, tensor] : c.outputs) tensor.fill_with_nan();
  machine::use(order >= kFirstMachineOrder, order - kFirstMachineOrder);
  if (order < kFirstMachineOrder) cudasim::set_order(static_cast<cudasim::Order>(order));
  const auto given = [&](const char* name, int64_t otherwise) {
    return static_cast<int>(c.integers.count(name) != 0 ? c.integer(name) : otherwise);
  };
  c.device = cudasim::use_gpu({given("shared_limit", 227 * 1024), given("reserved_shared", 1024),
                               given("clusters", 1) != 0, given("copies", 1) != 0});
  *code = launch(c);
  machine::report();
  for (const auto& [name, tensor] : c.inputs) {
    if (tensor.copy() != before[name]) fail("input " + name + " was modified");
  }
  std::string outputs;
  for (const std::string& name : c.output_order) outputs += c.outputs.at(name).copy();
  return outputs;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: driver INPUT OUTPUT");
  std::ifstream input(argv[1], std::ios::binary);
  std::ofstream output(argv[2], std::ios::binary);
  Case current;
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    std::string command, name;
    words >> command >> name;
    if (command == "case") {
      current = Case{};
      current.direction = name;
    } else if (command == "number") {
      std::string value;
      words >> value;
      current.numbers[name] = std::strtod(value.c_str(), nullptr);
      current.integers[name] = std::strtoull(value.c_str(), nullptr, 10);
    } else if (command == "input" || command == "output") {
      size_t bytes = 0, shift = 0;
      words >> bytes >> shift;
      auto& tensors = command == "input" ? current.inputs : current.outputs;
      Tensor& tensor = tensors.try_emplace(name, bytes, shift).first->second;
      if (command == "input") {
        input.read(tensor.data(), static_cast<std::streamsize>(bytes));
      } else {
        current.output_order.push_back(name);
      }
    } else if (command == "machine") {
      std::string disassembly, counts;
      words >> disassembly >> counts;
      machine::load(name, disassembly, counts);
    } else if (command == "error") {
      machine::set_error(std::stoi(name));
    } else if (command == "run") {
      int code = 0;
      const std::string first = run(current, std::stoi(name), &code);
      for (int order = 0; words >> order;) {
        if (run(current, order, &code) != first)
          fail("results depend on the order of threads (" + std::to_string(order) + ")");
      }
      output.write(first.data(), static_cast<std::streamsize>(first.size()));
      std::cout << code << "\n";
    } else {
      fail("unknown command " + command);
    }
  }
  return input ? 0 : (fail("INPUT is shorter than its description"), 3);
}
