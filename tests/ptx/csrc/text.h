// PTX text as statements: names are resolved to register slots, labels to statements.
//
// A slot is 8 bytes of a thread's register file. Special registers and constants have slots, too:
// an operand of an instruction is always a slot.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

// What is wrong with a text, a launch or a running kernel.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class Space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

struct Operand {
    enum Kind { REGISTER, NUMBER, SYMBOL, ADDRESS, VECTOR, SINK };
    Kind kind = SINK;
    int slot = -1;               // REGISTER; ADDRESS: of the base, -1 under a symbol
    int predicate = -1;          // the register behind "|"
    bool negated = false;        // "!"
    bool is_float = false;       // NUMBER: "0f" or "0d"
    uint64_t number = 0;         // NUMBER: bits; ADDRESS: offset
    std::string symbol;          // SYMBOL, ADDRESS
    std::vector<Operand> parts;  // VECTOR
};

struct Statement {
    int line = 0;
    int guard = -1;  // slot of the predicate, or -1
    bool negated = false;
    std::string opcode;
    std::vector<Operand> operands;
    std::string text;
};

struct Variable {
    std::string name;
    Space space;
    uint64_t align = 1, bytes = 0;  // bytes of "extern ... []": 0
    bool dynamic = false;
    std::vector<uint8_t> content;  // of .global
};

struct Register {
    std::string name;
    int bits;  // 1 for predicates
};

// The first slots, in the order of SPECIAL in text.cpp: x, y, z each.
enum Special { TID = 0, NTID = 3, CTAID = 6, NCTAID = 9, LANEID = 12, WARPID = 13, SPECIALS = 14 };

struct KernelText {
    std::string name;
    std::vector<Variable> parameters, variables;
    std::vector<Register> registers;  // by slot
    std::vector<Statement> statements;
    std::map<std::string, int> labels;
    int threads[3] = {0, 0, 0};  // .maxntid
};

struct ModuleText {
    std::string target;
    std::vector<Variable> variables;
    std::vector<KernelText> kernels;
};

ModuleText parse(const std::string& text);

std::vector<std::string> split(const std::string& text, char by);

}  // namespace ptx
