// Main loop of an int8 product by mma.sync: copies fill the other stages. 2 x 2 warps make a
// quarter of the tile each.
#pragma once

#include "product_copies.cuh"

namespace lsq {

constexpr int kProductThreads = 128, kProductBlocks = 2;  // blocks that a multiprocessor is to hold
constexpr int kTileThreads = kProductThreads, kTilesAtOnce = 1, kCopyThreads = kProductThreads;
constexpr int kEndBytes = STAGES * kStageBytes;  // of shared memory to end a tile
constexpr int kWarpsDown = 2, kWarpsAcross = 2;
constexpr int kWarpRows = TILE_M / kWarpsDown, kWarpColumns = TILE_N / kWarpsAcross;
// Tiles of mma in a warp's quarter.
constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = kWarpColumns / 8;

static_assert(TILE_M % 32 == 0 && TILE_N % 64 == 0, "ends take 32 columns of a warp at a time");
static_assert(STAGES >= 2, "one is filled while another is read");

// A thread's sums, four per tile as in tensor_core.cuh.
struct Sums {
    int32_t of[kRowTiles][kColumnTiles][4];
};

LSQ_INLINE int tile_thread() { return threadIdx.x; }
LSQ_INLINE int tile_of_block() { return 0; }
LSQ_INLINE void sync_tile() { __syncthreads(); }

LSQ_INLINE int warp_row() { return threadIdx.x / kWarp / kWarpsAcross * kWarpRows; }
LSQ_INLINE int warp_column() { return threadIdx.x / kWarp % kWarpsAcross * kWarpColumns; }
// First row, of a warp's, of the `half`th eight that its sums have.
LSQ_INLINE int row_of_eight(int half) { return 8 * half; }

// A lane's fragments of 32 values along K.
using RowFragments = uint32_t[kRowTiles][4];
using ColumnFragments = uint32_t[kColumnTiles][2];

// Loads a's fragments from chunk `chunk` of a stage.
LSQ_INLINE void load_fragments(const TileCopy<kProductThreads, TILE_M>&, const unsigned char* stage,
                               int64_t, int chunk, RowFragments& a) {
    const int lane = threadIdx.x % kWarp, row = warp_row() + lane % 16;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
        load_matrices(stage + offset_of(row + 16 * i, chunk + lane / 16), a[i]);
}

// Loads b's fragments.
LSQ_INLINE void load_fragments(const TileCopy<kProductThreads, TILE_N>&, const unsigned char* stage,
                               int64_t, int chunk, ColumnFragments& b) {
    const int lane = threadIdx.x % kWarp,
              column = TILE_M + warp_column() + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int j = 0; j < kColumnTiles; j += 2) {
        uint32_t words[4];
        load_matrices(stage + offset_of(column + 8 * j, chunk + lane / 8 % 2), words);
        b[j][0] = words[0], b[j][1] = words[1], b[j + 1][0] = words[2], b[j + 1][1] = words[3];
    }
}

// Loads those of an operand that is stored in another way.
template <class Operand, class Fragments>
LSQ_INLINE void load_fragments(const Operand& operand, const unsigned char* stage, int64_t step,
                               int chunk, Fragments& fragments) {
    operand.load(stage, step, chunk, fragments);
}

LSQ_INLINE void multiply_fragments(const RowFragments& a, const ColumnFragments& b, Sums& sums) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) multiply(sums.of[i][j], a[i], b[j]);
    }
}

// Calls work(stage, step) for each of this block's steps, once all warps have it. `stages` has
// STAGES * kStageBytes bytes, at a multiple of kPattern.
template <class OfA, class OfB, class Work>
LSQ_INLINE void for_steps(const OfA& a, const OfB& b, unsigned char* stages, const Work& work) {
    const Steps steps(a.inner);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage)
        begin_copies(a, b, stages + stage * kStageBytes, steps.first + stage, steps);
    int now = 0, next = STAGES - 1;
#pragma unroll 1
    for (int64_t step = steps.first; step < steps.last; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this step is there for all warps, and all have read the one before
        begin_copies(a, b, stages + next * kStageBytes, step + STAGES - 1, steps);
        work(stages + now * kStageBytes, step);
        next = now;
        now = now + 1 == STAGES ? 0 : now + 1;
    }
}

// Calls work(tile, sums, shared) for the block's tile, over its part of K. rows_of(tile) and
// columns_of(tile) are the operands. `shared`: the stages, which all have read.
template <class RowsOf, class ColumnsOf, class Work>
LSQ_INLINE void for_tiles(int64_t, int64_t, int64_t, unsigned char* stages, const RowsOf& rows_of,
                          const ColumnsOf& columns_of, const Work& work) {
    const Tile tile{blockIdx.x, blockIdx.y, blockIdx.y * gridDim.x + blockIdx.x};
    const auto a = rows_of(tile);
    const auto b = columns_of(tile);
    Sums sums = {};
    for_steps(a, b, stages, [&](const unsigned char* stage, int64_t step) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += 2) {
            RowFragments rows;
            ColumnFragments columns;
            load_fragments(a, stage, step, chunk, rows);
            load_fragments(b, stage, step, chunk, columns);
            multiply_fragments(rows, columns, sums);
        }
    });
    __syncthreads();
    work(tile, sums, stages);
}

}  // namespace lsq
