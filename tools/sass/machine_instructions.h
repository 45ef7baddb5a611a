// What the instructions of machine.h do.
#pragma once
#include <string>
#include <unordered_map>

#include "machine_state.h"

namespace machine {

// One of the two does it: for each thread, or for a warp's lanes together.
struct Handler {
  Handler(const char* understood, OfThread each) : modifiers(understood), of_thread(each) {}
  Handler(const char* understood, OfWarp together) : modifiers(understood), of_warp(together) {}
  const char* modifiers;  // that are understood
  OfThread of_thread = nullptr;
  OfWarp of_warp = nullptr;
};
using Handlers = std::unordered_map<std::string, Handler>;
void add_control_and_memory(Handlers& table);
void add_arithmetic(Handlers& table);

// Leaves an instruction that is not understood without a handler: it is an error
// where it is to run.
void find_handlers(Instruction& instruction);

bool is_predicate(const Operand& operand);

// The least or the largest.
uint32_t extreme(bool is_signed, bool least, uint32_t a, uint32_t b);

}  // namespace machine
