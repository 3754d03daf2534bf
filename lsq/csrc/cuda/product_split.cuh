// Adds up the parts of a product whose steps along K are split among gridDim.z blocks: all but the
// last block of a tile to be done leave their sums in memory, and that one adds them to its own.
// Sums of integers are the same in any order.
#pragma once

#include "product.cuh"
#include "reduce.cuh"

namespace lsq {

// -> whether this block has the whole sums now. parts int32 [tiles, gridDim.z, TILE_M * TILE_N],
// each as it lies in registers; a ticket a tile. All threads of the block must call this.
__device__ __forceinline__ bool add_up_parts(Sums& sums, int32_t* parts, uint32_t* tickets) {
    if (gridDim.z == 1) return true;
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    int32_t* first = parts + tile * gridDim.z * (TILE_M * TILE_N) + 4 * threadIdx.x;
    const auto quad = [&](int64_t part, int i, int j) {
        return first + part * (TILE_M * TILE_N) + (i * kColumnTiles + j) * 4 * kProductThreads;
    };
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
            const int32_t* four = sums.of[i][j];
            store_words(quad(blockIdx.z, i, j), make_int4(four[0], four[1], four[2], four[3]));
        }
    }
    if (!last_of(tickets + tile, gridDim.z)) return false;
#pragma unroll 1
    for (int64_t part = 0; part < gridDim.z; ++part) {
        if (part == blockIdx.z) continue;
#pragma unroll 1
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int at = 0; at < kRowTiles; ++at) {  // registers have no index
                if (at != i) continue;
#pragma unroll
                for (int j = 0; j < kColumnTiles; ++j) {
                    const int4 four = load_words<int4>(quad(part, at, j));
                    sums.of[at][j][0] += four.x, sums.of[at][j][1] += four.y;
                    sums.of[at][j][2] += four.z, sums.of[at][j][3] += four.w;
                }
            }
        }
    }
    return true;
}

}  // namespace lsq
