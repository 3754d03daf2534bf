// Runs the threads of a launch on the CPU, one at a time.
#pragma once

#include <string>

#include "threads.h"

namespace emulator {

// Sets the order in which blocks, warps and the lanes of a warp run. 0: forward, 1: backward,
// others: random with that seed. A warp runs until all its threads wait or have finished, so that a
// kernel lacking a barrier reads what is not there.
void set_order(int order);

// Runs all blocks of a launch. Returns a message about what went wrong, empty if nothing did.
// Checks nothing of the launch's shape: blocks have 1 to 1024 threads, grids at least one block.
std::string run(const Launch& launch);

}  // namespace emulator
