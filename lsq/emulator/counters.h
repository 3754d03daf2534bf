// What the launches of a profile do, counted: accesses to memory as warps make them, and executions
// of code.
//
// A GPU serves the lanes of a warp that execute one instruction together as one request. Here a
// request is what the lanes of a warp access at one instruction, reached on one path of
// calls, for the n-th time since all of them last met at a barrier or a collective. Lanes that go
// round a loop different numbers of times are paired from its beginning, as they are on a GPU.
#pragma once

#include "threads.h"

namespace emulator {

// Whether a profile is being made, and whether one of its launches runs; nothing below is called
// elsewhere.
extern bool profiling, counting;

enum class Access { read, write, atomic };

// By the thread that runs. `site`: of the instruction.
void count_access(const void* address, size_t size, Access access, const void* site);

// While it lives, what happens belongs to this launch, if a profile is being made.
class CountedLaunch {
public:
    explicit CountedLaunch(const Launch& launch);
    ~CountedLaunch() { counting = false; }
    CountedLaunch(const CountedLaunch&) = delete;
    CountedLaunch& operator=(const CountedLaunch&) = delete;
};

void begin_counted_block();

// The lanes of the warp that runs have met, or have come to their end.
void settle_warp();

}  // namespace emulator
