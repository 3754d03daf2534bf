// Main loop of an int8 product by wgmma (compute capability 9.0): a warpgroup makes 64 rows of the
// tile, each warp 16 of them, with all columns. Sums lie in registers as those of mma.sync.
//
// The next step begins before the last one is waited for, so that tensor cores stay busy. Copies
// fill the other stages.
#pragma once

#include "product_copies.cuh"
#include "warpgroup.cuh"

namespace lsq {

constexpr int kProductThreads = TILE_M / 64 * kWarpgroup;
// That a multiprocessor is to hold.
constexpr int kProductBlocks = TILE_M * TILE_N >= 128 * 128 ? 1 : 2;
constexpr int kWarpsDown = TILE_M / 16, kWarpsAcross = 1;
constexpr int kWarpRows = 16, kWarpColumns = TILE_N;
constexpr int kRowTiles = 1, kColumnTiles = kWarpColumns / 8;

static_assert(TILE_M % 64 == 0, "whole warpgroups");
static_assert(STAGES >= 3, "one is filled while two are read");

// A thread's sums, four per tile as in tensor_core.cuh.
struct Sums {
    int32_t of[kRowTiles][kColumnTiles][4];
};

LSQ_INLINE int warp_row() { return threadIdx.x / kWarp * kWarpRows; }
LSQ_INLINE int warp_column() { return 0; }

// Begins to multiply a stage, as a group.
LSQ_INLINE void begin_stage(const unsigned char* stage, Sums& sums) {
    const uint64_t a = swizzled_matrix(stage + threadIdx.x / kWarpgroup * 64 * kStep);
    const uint64_t b = swizzled_matrix(stage + TILE_M * kStep);
    fence_sums(sums.of[0]);
#pragma unroll
    for (int k = 0; k < kStep; k += 32) begin_multiplication(sums.of[0], moved(a, k), moved(b, k));
    commit_multiplications();
}

// The sums of this block's tile, over its part of K. `stages` has STAGES * kStageBytes bytes, at a
// multiple of kPattern.
LSQ_INLINE void accumulate(const TileCopy<kProductThreads, TILE_M>& a,
                           const TileCopy<kProductThreads, TILE_N>& b, unsigned char* stages,
                           Sums& sums) {
    const StepCopies copies(a, b, stages);
#pragma unroll
    for (int stage = 0; stage < STAGES - 2; ++stage) copies.begin(stage, copies.first + stage);
    int now = 0, next = STAGES - 2;
#pragma unroll 1
    for (int64_t step = copies.first; step < copies.last; ++step) {
        wait_copies<STAGES - 3>();
        fence_shared();
        // This step is there for all warps, and all have multiplied the last but one.
        __syncthreads();
        begin_stage(stages + now * kStageBytes, sums);
        copies.begin(next, step + STAGES - 2);
        wait_multiplications<1>(sums.of[0]);
        now = now + 1 == STAGES ? 0 : now + 1;
        next = next + 1 == STAGES ? 0 : next + 1;
    }
    wait_multiplications<0>(sums.of[0]);
}

}  // namespace lsq
