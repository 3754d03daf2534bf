// The multiplications of a warpgroup, as functions; kernels/warpgroup.cuh names them. All lanes of a warp come together.
#pragma once

#include "services.h"

#define EMULATOR_HERE emulator::Site site = {__builtin_FILE(), __builtin_LINE()}
#define EMULATOR_NO_CALL __attribute__((always_inline)) inline

// wgmma.fence
EMULATOR_NO_CALL void emulator_fence_sums(EMULATOR_HERE) { emulator_fence_warpgroup(site); }

// wgmma.mma_async.m64nNk32.s32.s8.s8: sums [64, N] += a [64, 32] times b [N, 32] transposed, N = 8 * TILES.
template <int TILES>
EMULATOR_NO_CALL void emulator_multiply_warpgroup(int32_t (&sums)[TILES][4], uint64_t a, uint64_t b, EMULATOR_HERE) {
    emulator_begin_multiplication(sums[0], 8 * TILES, a, b, site);
}

// wgmma.commit_group
EMULATOR_NO_CALL void emulator_commit_warpgroup(EMULATOR_HERE) { emulator_commit_multiplications(site); }

// wgmma.wait_group
EMULATOR_NO_CALL void emulator_wait_warpgroup(size_t groups, EMULATOR_HERE) {
    emulator_wait_multiplications(groups, site);
}

#undef EMULATOR_HERE
#undef EMULATOR_NO_CALL
