// What counters.cpp has counted of the launches of a profile, and how it is handed to Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "counters.h"

namespace emulator {

struct Traffic {
    int64_t requests = 0, bytes = 0, sectors = 0;
    std::vector<bool> touched;  // sectors, each once
};

struct Region {
    uintptr_t begin = 0, end = 0;
    Traffic traffic[3];  // by Access
};

// Accesses to shared memory. A pass serves each bank once, with all lanes that want the same word of it.
struct Shared {
    int64_t requests = 0, passes = 0, least = 0;
};

// A basic block of the module, by its offset in it.
struct Block {
    uintptr_t offset = 0;
    int64_t warps = 0, lanes = 0;
    uint32_t seen[WARP] = {};
    bool active = false;
};

struct Record {
    std::string kernel, module;
    std::vector<Region> regions;  // the last one: memory that was not named
    Shared shared;
    std::vector<Block> blocks;
};

// A JSON list with an object for each launch: `kernel`, `module` (path of its library), `regions`, the last one for all
// other memory: [reads, writes, atomics], each [requests, bytes, sectors, sectors each counted once]; `shared`:
// [requests, passes, passes without conflicts]; `blocks`: [address in the module after the call of the hook, executions
// by warps, by lanes].
std::string in_json(const std::vector<Record>& records);

}  // namespace emulator
