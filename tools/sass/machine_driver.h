// Runs machine code (machine.h) where the simulator would run a kernel's source: see driver.h.
#pragma once
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>

#include "cudasim.h"
#include "machine.h"

namespace machine {
namespace {

std::unique_ptr<Program> program;
std::ofstream counts_file;
int machine_order = 0;

std::string name_of(const void* kernel) {
  Dl_info info{};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) cudasim::fail("a kernel without a name");
  return info.dli_sname;
}

int static_shared(const void* kernel) { return static_cast<int>(program->static_shared(name_of(kernel))); }

void load(const std::string& cubin, const std::string& disassembly, const std::string& counts) {
  program = std::make_unique<Program>(cubin, disassembly);
  counts_file.open(counts);
  cudasim::static_shared = static_shared;
}

cudaError_t execute(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster_blocks,
                    const std::vector<unsigned char>& parameters) {
  const std::string name = name_of(kernel);
  if (program->static_shared(name) + shared_bytes > static_cast<size_t>(cudasim::gpu_in_use().shared_limit))
    return cudaErrorInvalidValue;
  const Launch launch{{grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
                      cluster_blocks,           shared_bytes,
                      parameters.data(),        parameters.size()};
  try {
    program->run(name, launch, machine_order);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "machine: %s\n", error.what());
    std::exit(3);
  }
  return cudaSuccess;
}

void use(bool machine_code, int order) {
  cudasim::executor = machine_code ? execute : nullptr;
  machine_order = order;
  if (program != nullptr) program->counts = {};
}

// A line for what ran since use().
void report() {
  if (cudasim::executor == nullptr) return;
  counts_file << json(program->counts) << std::endl;
}

}  // namespace
}  // namespace machine
