// Main loop of an int8 product by mma.sync: copies fill the other stages. 2 x 2 warps make a
// quarter of the tile each.
#pragma once

#include "product_copies.cuh"

namespace lsq {

constexpr int kProductThreads = 128, kProductBlocks = 2;  // blocks that a multiprocessor is to hold
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

LSQ_INLINE int warp_row() { return threadIdx.x / kWarp / kWarpsAcross * kWarpRows; }
LSQ_INLINE int warp_column() { return threadIdx.x / kWarp % kWarpsAcross * kWarpColumns; }

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
    const StepCopies copies(a, b, stages);
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) copies.begin(stage, copies.first + stage);
    int now = 0, next = STAGES - 1;
#pragma unroll 1
    for (int64_t step = copies.first; step < copies.last; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this step is there for all warps, and all have read the one before
        copies.begin(next, step + STAGES - 1);
        work(stages + now * kStageBytes, step);
        next = now;
        now = now + 1 == STAGES ? 0 : now + 1;
    }
}

// The sums of this block's tile, over its part of K.
template <class OfA = TileCopy<kProductThreads, TILE_M>,
          class OfB = TileCopy<kProductThreads, TILE_N>>
LSQ_INLINE void accumulate(const OfA& a, const OfB& b, unsigned char* stages, Sums& sums) {
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
}

}  // namespace lsq
