// machine.h for callers of a shared library: triton_machine.py. A function returns null where all is well, else
// what is wrong, valid until the next call.
#include <exception>
#include <string>

#include "machine.h"

namespace {

std::string answer;

template <typename Action>
const char* guarded(Action action) {
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    answer = error.what();
    return answer.c_str();
  }
}

}  // namespace

extern "C" const char* machine_load(const char* cubin, const char* disassembly, machine::Program** program) {
  return guarded([&] { *program = new machine::Program(cubin, disassembly); });
}

extern "C" const char* machine_run(machine::Program* program, const char* kernel, const machine::Launch* launch,
                                   int order) {
  return guarded([&] { program->run(kernel, *launch, order); });
}
