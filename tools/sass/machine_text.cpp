// The text that nvdisasm prints, taken apart.
#include "machine_text.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "machine_instructions.h"

namespace machine {
namespace {

const char* const kModifierNames[] = {
#define ONETRIP_NAME(name) #name,
    ONETRIP_MODIFIERS(ONETRIP_NAME)
#undef ONETRIP_NAME
};

}  // namespace

// True where all are known, and added to the set.
bool add_modifiers(const std::string& text, char separator, Modifiers& set) {
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, separator);) {
    const auto end = std::end(kModifierNames), found = std::find(std::begin(kModifierNames), end, word);
    if (found == end) return false;
    set.set(static_cast<size_t>(found - kModifierNames));
  }
  return true;
}

bool parse_register(const std::string& text, Operand::Kind& kind, int& index) {
  size_t digits = 1;
  bool is_predicate = false;
  if (text.rfind("UR", 0) == 0 || text.rfind("UP", 0) == 0) digits = 2;
  is_predicate = text[digits - 1] == 'P';
  if (text.size() <= digits || (text[digits - 1] != 'R' && !is_predicate)) return false;
  const std::string rest = text.substr(digits);
  const bool none = rest == (is_predicate ? "T" : "Z");
  if (!none && rest.find_first_not_of("0123456789") != std::string::npos) return false;
  if (digits == 2) {
    kind = is_predicate ? Operand::kUniformPredicate : Operand::kUniform;
  } else {
    kind = is_predicate ? Operand::kPredicate : Operand::kRegister;
  }
  index = none ? (is_predicate ? kTrue : digits == 2 ? kUniformZero : kZero) : std::stoi(rest);
  return true;
}

int64_t parse_integer(const std::string& text) {
  const bool negative = text[0] == '-';
  const auto value = static_cast<int64_t>(std::stoull(text.substr(negative || text[0] == '+'), nullptr, 16));
  return negative ? -value : value;
}

// R2.64+UR4+0x10
void parse_address(const std::string& text, Operand& operand) {
  std::string term;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && (i == 0 || (text[i] != '+' && (text[i] != '-' || text[i - 1] == '+')))) {
      term += text[i];
      continue;
    }
    if (term[0] == '+') term = term.substr(1);
    const size_t dot = term.find('.');
    Operand::Term parsed{};
    if (parse_register(term.substr(0, dot), parsed.kind, parsed.index)) {
      const std::string suffix = dot == std::string::npos ? "" : term.substr(dot);
      static const std::map<std::string, unsigned> scales = {{"", 0}, {".64", 0}, {".X4", 2}, {".X8", 3}, {".X16", 4}};
      const auto scale = scales.find(suffix);
      if (scale == scales.end()) fail("an address of " + text);
      parsed.wide = suffix == ".64", parsed.shift = scale->second;
      operand.terms.push_back(parsed);
    } else {
      operand.offset += parse_integer(term);
    }
    term = i < text.size() ? std::string(1, text[i]) : "";
  }
}

Operand parse_operand(std::string text) {
  Operand operand;
  if (text[0] == '`') {
    operand.name = text.substr(2, text.size() - 3);
    return operand;
  }
  if (text.rfind("desc[", 0) == 0) text = text.substr(text.find(']') + 1);
  if (text[0] == '-' && text.find_first_of("RUc|") == 1) operand.negative = true, text = text.substr(1);
  if (text[0] == '~' || text[0] == '!') operand.inverted = true, text = text.substr(1);
  if (text[0] == '|') operand.absolute = true, text.erase(std::remove(text.begin(), text.end(), '|'), text.end());
  if (text.rfind("c[", 0) == 0) {
    operand.kind = Operand::kConstant;
    operand.bank = static_cast<int>(parse_integer(text.substr(2, text.find(']') - 2)));
    const size_t open = text.find('[', 2);
    parse_address(text.substr(open + 1, text.size() - open - 2), operand);
    return operand;
  }
  if (text[0] == '[') {
    operand.kind = Operand::kMemory;
    parse_address(text.substr(1, text.size() - 2), operand);
    return operand;
  }
  std::string suffix, body = text;
  if (text.find_first_of("RU") == 0) {
    const size_t dot = text.find('.');
    suffix = dot == std::string::npos ? "" : text.substr(dot), body = text.substr(0, dot);
  }
  if (parse_register(body, operand.kind, operand.index)) {
    if (suffix == ".H0_H0" || suffix == ".H1_H1") {
      operand.n_bits = 16, operand.first_bit = 16 * (suffix[2] - '0');
    } else if (suffix.size() == 3 && suffix[1] == 'B' && suffix[2] >= '0' && suffix[2] <= '3') {
      operand.n_bits = 8, operand.first_bit = 8 * (suffix[2] - '0');
    } else if (suffix != "" && suffix != ".64") {
      fail("operand " + text);
    }
    return operand;
  }
  operand.name = text;
  if (text.find("0x") != std::string::npos && text.find_first_not_of("-0123456789abcdefx") == std::string::npos) {
    operand.kind = Operand::kNumber, operand.bits = static_cast<uint64_t>(parse_integer(text));
  } else if (text == "+INF" || text == "-INF") {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = text[0] == '+' ? INFINITY : -INFINITY;
  } else if (text == "+QNAN" || text == "-QNAN") {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = NAN;
  } else if (text.find_first_of("0123456789") <= 1 && text[0] != 'B' && text[0] != 'S') {
    operand.kind = Operand::kNumber, operand.is_decimal = true, operand.number = std::strtod(text.c_str(), nullptr);
  }
  return operand;
}

std::string trimmed(const std::string& text) {
  const size_t first = text.find_first_not_of(" \t");
  return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

// "@!P0 IADD3 R0, P1, R2, -UR4, RZ"; a label stays a name.
Instruction parse_instruction(const std::string& text) {
  Instruction instruction;
  instruction.text = text;
  std::string rest = text.substr(0, text.find("(*"));
  if (rest[0] == '@') {
    const size_t space = rest.find(' ');
    instruction.guard = parse_operand(rest.substr(1, space - 1)), instruction.is_guarded = true;
    rest = trimmed(rest.substr(space));
  }
  const size_t space = rest.find(' ');
  instruction.opcode = rest.substr(0, space);
  const size_t dot = instruction.opcode.find('.');
  instruction.base = instruction.opcode.substr(0, dot);
  std::string operands = space == std::string::npos ? "" : rest.substr(space);
  for (size_t found; (found = operands.find(".reuse")) != std::string::npos;) operands.erase(found, 6);
  std::istringstream words(operands);
  for (std::string word; std::getline(words, word, ',');) {
    std::istringstream parts(word);  // R52 -0x3e40
    for (std::string part; parts >> part;) instruction.operands.push_back(parse_operand(part));
  }
  find_handlers(instruction);
  static const std::set<std::string> global = {"LDG", "STG", "LD", "ST"};
  if (global.count(instruction.base) != 0 && instruction.is(kE)) {  // sm_75 does not say that they are 64 bits
    for (Operand& operand : instruction.operands) {
      for (Operand::Term& term : operand.terms) term.wide = true;
    }
  }
  return instruction;
}

Layout layout_of(unsigned arch) {
  if (arch == 90) return {0x210, 0x400};
  if (arch != 70 && arch != 75 && arch != 80) fail("machine code of sm_" + std::to_string(arch));
  return {0x160, 0};
}

}  // namespace machine
