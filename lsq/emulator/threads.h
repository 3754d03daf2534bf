// Threads of the running block: fibers, one at a time, that wait, meet others and fail.
#pragma once

#include <csignal>
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

enum class State { ready, barrier, named_barrier, collective, finished };

struct Thread {
    Index index;
    State state;

    // Its wait.
    const char* operation;
    Site site;

    // Its collective's operands and result.
    Collective kind;
    uint32_t mask, value, source, result;
    void (*together)(void* const* operands);
    void* operands;
};

// The only running launch, as the scheduler sets it.
extern const Launch* launched;
extern std::vector<Thread> threads;
extern Fiber fibers[1024];  // of the threads; their stacks are kept from launch to launch
extern unsigned current;    // the number in its block of the thread that runs
extern std::string fault;   // that ended the launch

// Whether the thread that launches is in a kernel now.
extern volatile std::sig_atomic_t in_kernel;

inline unsigned running_warp() { return current / WARP; }

// Whether an address lies in the block's shared memory.
inline bool in_shared(const void* address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    const Memory fixed = launched->static_shared;
    return at - reinterpret_cast<uintptr_t>(fixed.begin) <
               static_cast<size_t>(fixed.end - fixed.begin) ||
           at - reinterpret_cast<uintptr_t>(emulator_dynamic_shared) < launched->shared;
}

// Whether an address lies on the running thread's stack.
inline bool on_stack(const void* address) { return fibers[current].holds(address); }

// "thread (3, 0, 0)"
std::string describe(const Thread& thread);
std::string describe(Index index);

// Ends the launch, from a thread of a kernel.
[[noreturn]] void fail_thread(const std::string& message);

// Closes the named barriers, for a new block.
void close_barriers();

// "; barrier 3 waits for 64 threads, of which 32 have come: ...", of each that is open.
std::string open_barriers();

// The running thread's last wait in words, or empty.
std::string waited();

// Sets the order of blocks, warps and lanes. 0: forward, 1: backward, others: random with that
// seed. A warp runs until all its threads wait or have finished, so that a missing barrier shows.
void set_order(int order);

// Runs a launch: blocks of 1 to 1024 threads, at least one block. -> its fault, or empty
std::string run(const Launch& launch);

}  // namespace emulator
