// Named barriers, 1 to 15: groups of warps that wait for each other alone, such as warps that copy
// and warps that multiply. Barrier 0 belongs to __syncthreads.
//
// A barrier opens again as soon as THREADS threads of the block, a multiple of 32, have come to it.
// Its callers must all name the same number.
#pragma once

#include "device.cuh"

namespace lsq {

// Waits until THREADS threads of the block, the callers of both functions, have come to this
// barrier; what they wrote before can be read then. Whole warps must call this together.
template <int THREADS>
LSQ_INLINE void sync_barrier(int barrier) {
    static_assert(THREADS % 32 == 0, "whole warps come to a barrier");
#ifdef LSQ_EMULATOR
    emulator_sync_barrier(barrier, THREADS);
#else
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
#endif
}

// Comes to a barrier and does not wait: those who wait can read what the caller wrote before. Whole
// warps must call this together.
template <int THREADS>
LSQ_INLINE void arrive_barrier(int barrier) {
    static_assert(THREADS % 32 == 0, "whole warps come to a barrier");
#ifdef LSQ_EMULATOR
    emulator_arrive_barrier(barrier, THREADS);
#else
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
#endif
}

}  // namespace lsq
