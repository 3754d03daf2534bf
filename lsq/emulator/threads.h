// The threads of the block that runs: fibers, of which one runs at a time, and what a kernel's
// thread can do: wait, meet others, fail.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fibers.h"
#include "services.h"

namespace emulator {

constexpr unsigned WARP = 32;

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

enum class State { ready, barrier, collective, finished };

struct Thread {
    Index index;
    State state;

    // What it waits for, and where.
    const char* operation;
    Site site;

    // In a collective: what it brings and what it gets.
    Collective kind;
    uint32_t mask, value, source, result;
    void (*together)(void* const* operands);
    void* operands;
};

// The launch that runs, of which there is one at a time; the scheduler sets all this.
extern const Launch* launched;
extern std::vector<Thread> threads;
extern Fiber fibers[1024];  // of the threads; their stacks are kept from launch to launch
extern unsigned current;    // the number in its block of the thread that runs
extern std::string fault;   // that ended the launch

inline unsigned running_warp() { return current / WARP; }

// Whether an address lies in the block's shared memory, static or dynamic.
inline bool in_shared(const void* address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const Memory fixed = launched->static_shared;
    return at - reinterpret_cast<uintptr_t>(fixed.begin) <
               static_cast<size_t>(fixed.end - fixed.begin) ||
           at - reinterpret_cast<uintptr_t>(emulator_dynamic_shared) < launched->shared;
}

// Whether an address lies on the stack of the thread that runs.
inline bool on_stack(const void* address) { return fibers[current].holds(address); }

// "thread (3, 0, 0)"
std::string describe(const Thread& thread);
std::string describe(Index index);

// Within a thread of a kernel: ends the launch.
[[noreturn]] void fail_thread(const std::string& message);

// Within such a thread: where it waited last, in words; empty if nowhere.
std::string waited();

}  // namespace emulator
