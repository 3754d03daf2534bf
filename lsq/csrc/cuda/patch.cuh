// Patches of 32 rows x 256 columns for element-wise kernels: a warp takes 4 rows, 8 columns a
// thread. blockIdx.x goes along the rows, blockIdx.y along the N columns, a multiple of 8.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Rows of a thread; those of a block are 8 * kPatchRows.
constexpr int kPatchThreads = 256, kPatchRows = 4;

LSQ_INLINE int64_t patch_row() {
    return (static_cast<int64_t>(blockIdx.x) * (kPatchThreads / kWarp) + threadIdx.x / kWarp) *
           kPatchRows;
}
LSQ_INLINE int64_t patch_column() {
    return (static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp) * kVector;
}

}  // namespace lsq
