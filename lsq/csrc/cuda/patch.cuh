// Patches of 32 rows x 256 columns, for kernels that look at each value by itself: a warp takes 8
// columns a thread, and 4 rows.
//
// Patches go along the rows with blockIdx.x, along the columns with blockIdx.y. N columns, a
// multiple of 8.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Rows of a thread; those of a block are 8 * kPatchRows.
constexpr int kPatchThreads = 256, kPatchRows = 4;

__device__ __forceinline__ int64_t patch_row() {
    return (static_cast<int64_t>(blockIdx.x) * (kPatchThreads / kWarp) + threadIdx.x / kWarp) *
           kPatchRows;
}
__device__ __forceinline__ int64_t patch_column() {
    return (static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp) * kVector;
}

}  // namespace lsq
