// Unordered accesses to shared memory, and copies (cp.async) and multiplications (wgmma) under way.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "services.h"

namespace emulator {

// All threads have met at a barrier, or the next block begins.
void order_accesses();

// A vector clock: the time of each warp up to which its accesses come before the next one of the
// clock's owner. races.cpp alone uses the last element.
using Seen = std::array<uint64_t, 64>;

// A warp comes to a barrier: who acquires `seen` later comes after all that it has done or seen.
void release(unsigned warp, Seen& seen);
void acquire(unsigned warp, const Seen& seen);

// A warp's time, and whether another warp has acquired what it had done until then.
uint64_t time_of(unsigned warp);
bool has_seen(unsigned warp, unsigned other, uint64_t time);

// The running thread begins a copy to shared memory, by an instruction before `site`: nobody may
// touch that memory until it ends; then the thread's warp counts as its writer.
void begin_copy(const void* to, size_t size, const void* site);
void end_copy(const void* to, size_t size);

// A multiplication of the running thread begins to read 16-byte chunks of shared memory: until it
// ends nobody may write there, and earlier writers must have called emulator_fence_shared.
void begin_reading(const void* from, size_t size);
void end_reading(const void* from, size_t size);

// The block ends: nobody reads any more.
void end_readers();

// Abandons what is under way at the end of a block.
void abandon_asynchronous();

// Names a warpgroup whose threads have begun different multiplications, or is empty.
std::string different_multiplications();

}  // namespace emulator
