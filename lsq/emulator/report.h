// Words about launches, threads and what they wait for.
#pragma once

#include <string>
#include <vector>

#include "threads.h"

namespace emulator {

// "0x7f"
std::string hexadecimal(uint64_t value);

// "reduce.cuh:41"
std::string describe(Site site);

// "thread (3, 0, 0)"
std::string describe(const Thread& thread);

// "kernel lsq_sum, block (2, 0, 0): "
std::string describe_block(const char* kernel, Index block);

// What all threads wait for: the first that waits for something, and how many more do.
std::string describe_all(const std::vector<Thread>& threads);

bool same(Site a, Site b);

}  // namespace emulator
