// Runs the threads of a launch on the CPU, one at a time.
#pragma once

#include <cstdint>
#include <string>

#include "services.h"

namespace emulator {

struct Index {
    unsigned x, y, z;
};

struct Launch {
    const char* name;
    void (*kernel)(void** arguments);
    Index grid;
    Index block;
    size_t shared;         // bytes of dynamic shared memory
    Memory static_shared;  // of the kernel's module
    void** arguments;
};

// In which order blocks, warps and the lanes of a warp run. 0: forward, 1: backward, others: random with that seed.
// A warp runs until all its threads wait or have finished, so that a kernel lacking a barrier reads what is not there.
void set_order(int order);

// Runs all blocks of a launch. The message that says what went wrong, empty if nothing did.
// Checks nothing of the launch's shape: blocks have 1 to 1024 threads, grids at least one block.
std::string run(const Launch& launch);

// Within a thread of a kernel: ends the launch.
[[noreturn]] void fail_thread(const std::string& message);

// Within such a thread: where it waited last, in words; empty if nowhere.
std::string waited();

// Whether an address lies on the stack of the thread that runs.
bool on_stack(const void* address);

// The number in its block of the thread that runs, and of its warp.
unsigned running_thread();
unsigned running_warp();

}  // namespace emulator
