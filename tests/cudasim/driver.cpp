// Runs row_norm launchers on the simulator: cases come as text on stdin, tensors as raw bytes in files.
//
//   driver INPUT OUTPUT
//   case forward|backward        begins a case
//   number NAME VALUE            a field of RowNormForward / RowNormBackward (dropout.seed etc. for nested ones)
//   input NAME BYTES SHIFT       a tensor of so many bytes, next in INPUT, placed SHIFT bytes past a 64-byte boundary
//   output NAME BYTES SHIFT      a tensor to be written; filled with NaN before, appended to OUTPUT afterwards
//   run ORDER...                 runs the case under each order of threads
//
// Every tensor is an allocation of its own, so that AddressSanitizer sees each access past either end. Inputs must be
// unchanged afterwards, and outputs the same bits under every order. The launcher's code is printed, one line a case.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "cudasim.h"
#include "launch.h"
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace {

class Tensor {
 public:
  Tensor(size_t bytes, size_t shift) : bytes_(bytes), shift_(shift) {
    if (posix_memalign(&memory_, 64, shift + bytes) != 0) std::abort();
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(memory_, shift / 8 * 8);
#endif
    fill_with_nan();
  }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory_, shift_);
#endif
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

struct Case {
  std::string direction;
  std::map<std::string, double> numbers;
  std::map<std::string, uint64_t> integers;
  std::map<std::string, Tensor> inputs, outputs;
  std::vector<std::string> output_order;

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

onetrip::Dropout dropout_of(const Case& c) {
  return {static_cast<uint64_t>(c.integer("dropout.threshold")), c.number("dropout.scale"),
          static_cast<uint64_t>(c.integer("dropout.seed")), static_cast<uint64_t>(c.integer("dropout.offset")),
          reinterpret_cast<const int64_t*>(c.tensor("dropout.state"))};
}

int run_forward(const Case& c) {
  onetrip::RowNormForward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.x = c.tensor("x"), args.residual = c.tensor("residual"), args.bias = c.tensor("bias");
  args.weight = c.tensor("weight"), args.norm_bias = c.tensor("norm_bias");
  args.y = c.tensor("y"), args.z = c.tensor("z");
  args.mean = reinterpret_cast<float*>(c.tensor("mean")), args.rstd = reinterpret_cast<float*>(c.tensor("rstd"));
  args.x_row_stride = c.integer("x_row_stride"), args.residual_row_stride = c.integer("residual_row_stride");
  args.x_dtype = c.dtype("x_dtype"), args.residual_dtype = c.dtype("residual_dtype"),
  args.bias_dtype = c.dtype("bias_dtype");
  args.weight_dtype = c.dtype("weight_dtype"), args.norm_bias_dtype = c.dtype("norm_bias_dtype");
  args.z_dtype = c.dtype("z_dtype"), args.n_dtype = c.dtype("n_dtype"), args.y_dtype = c.dtype("y_dtype");
  args.norm = static_cast<onetrip::Norm>(c.integer("norm"));
  args.center_z = c.integer("center_z") != 0;
  args.eps = c.number("eps"), args.weight_offset = c.number("weight_offset");
  args.dropout = dropout_of(c);
  return onetrip::row_norm_forward_cuda(args, 0, nullptr);
}

int run_backward(const Case& c) {
  onetrip::RowNormBackward args{};
  args.n_rows = c.integer("n_rows"), args.n_cols = c.integer("n_cols");
  args.dy = c.tensor("dy"), args.dz = c.tensor("dz"), args.z = c.tensor("z"), args.weight = c.tensor("weight");
  args.mean = reinterpret_cast<const float*>(c.tensor("mean")),
  args.rstd = reinterpret_cast<const float*>(c.tensor("rstd"));
  args.dx = c.tensor("dx"), args.dresidual = c.tensor("dresidual");
  args.dbias = c.tensor("dbias"), args.dweight = c.tensor("dweight"), args.dnorm_bias = c.tensor("dnorm_bias");
  args.dy_row_stride = c.integer("dy_row_stride"), args.dz_row_stride = c.integer("dz_row_stride");
  args.z_row_stride = c.integer("z_row_stride");
  args.x_dtype = c.dtype("x_dtype"), args.residual_dtype = c.dtype("residual_dtype"),
  args.bias_dtype = c.dtype("bias_dtype");
  args.weight_dtype = c.dtype("weight_dtype"), args.norm_bias_dtype = c.dtype("norm_bias_dtype");
  args.z_dtype = c.dtype("z_dtype"), args.y_dtype = c.dtype("y_dtype");
  args.norm = static_cast<onetrip::Norm>(c.integer("norm"));
  args.weight_offset = c.number("weight_offset");
  args.dropout = dropout_of(c);
  const int n_wanted = (args.dbias != nullptr) + (args.dweight != nullptr) + (args.dnorm_bias != nullptr);
  const int64_t n_floats = onetrip::row_norm_workspace_cuda(args.n_rows, args.n_cols, n_wanted);
  Tensor workspace(static_cast<size_t>(n_floats) * sizeof(float), 0);
  args.workspace = n_floats != 0 ? reinterpret_cast<float*>(workspace.data()) : nullptr;
  return onetrip::row_norm_backward_cuda(args, 0, nullptr);
}

[[noreturn]] void fail(const std::string& message) {
  std::cerr << "driver: " << message << "\n";
  std::exit(3);
}

// Returns the outputs, one after another.
std::string run(Case& c, int order, int* code) {
  std::map<std::string, std::string> before;
  for (const auto& [name, tensor] : c.inputs) before[name] = tensor.copy();
  for (auto& [name, tensor] : c.outputs) tensor.fill_with_nan();
  cudasim::set_order(static_cast<cudasim::Order>(order));
  cudasim::set_shared_limit(c.integers.count("shared_limit") != 0 ? static_cast<int>(c.integer("shared_limit"))
                                                                  : 227 * 1024);
  *code = c.direction == "forward" ? run_forward(c) : run_backward(c);
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
