// Counts of a profile's launches: memory accesses as warps make them, and executions of code.
//
// A GPU serves lanes of a warp at one instruction together, as one request. Here a request is the
// lanes' accesses at one instruction, on one path of calls, for the n-th time since all lanes last
// met at a barrier or a collective. Lanes that loop unequally often are paired from the first turn,
// as on a GPU.
#pragma once

#include "threads.h"

namespace emulator {

// Whether a profile is made, and one of its launches runs; else nothing below is called.
extern bool profiling, counting;

enum class Access { read, write, atomic };

// By the thread that runs. `site`: of the instruction.
void count_access(const void* address, size_t size, Access access, const void* site);

// Assigns counts to this launch as long as it lives, if a profile is made.
class CountedLaunch {
public:
    explicit CountedLaunch(const Launch& launch);
    ~CountedLaunch() { counting = false; }
    CountedLaunch(const CountedLaunch&) = delete;
    CountedLaunch& operator=(const CountedLaunch&) = delete;
};

void begin_counted_block();

// The running warp's lanes have met or finished.
void settle_warp();

}  // namespace emulator
