// Accesses to shared memory that no barrier orders.
#pragma once

#include "services.h"

namespace emulator {

// A launch begins: nobody has touched this memory. `dynamic` bytes belong to emulator_dynamic_shared.
void watch_shared(Memory static_shared, size_t dynamic);

// All threads of the block have met at a barrier, or the next block begins: what they do from now on comes after.
void order_accesses();

}  // namespace emulator
