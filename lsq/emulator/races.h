// Accesses to shared memory that no barrier orders.
#pragma once

#include "services.h"

namespace emulator {

// All threads of the block have met at a barrier, or the next block begins: what they do from now
// on comes after.
void order_accesses();

// The thread that runs begins a copy to shared memory, by an instruction that stands before `site`:
// until it ends, nobody may touch that memory. What was copied counts as written by the warp of
// that thread when the copy ends.
void begin_copy(const void* to, size_t size, const void* site);
void end_copy(const void* to, size_t size);

// A multiplication of the thread that runs begins to read chunks of 16 bytes of shared memory:
// until it ends, nobody may write there, and who wrote before has let it see that
// (emulator_fence_shared). They count as read by the thread's warp in the end.
void begin_reading(const void* from, size_t size);
void end_reading(const void* from, size_t size);

// The block has come to its end: nobody reads, and what it has written the next one finds by
// mistake.
void end_readers();

}  // namespace emulator
