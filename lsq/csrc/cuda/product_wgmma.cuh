// Main loop of an int8 product by wgmma (compute capability 9.0): a warpgroup copies, and two take
// turns, so that one multiplies while the other ends its tile ("ping-pong" of CUTLASS).
//
// A block stays and makes one tile after another. Its copies run on from tile to tile, and each
// stage goes from hand to hand by two named barriers. Within a turn the next step begins before the
// last one is waited for, so that tensor cores stay busy. A warp's sums, 16 rows of every 64, lie
// in registers as those of mma.sync.
#pragma once

#include "barriers.cuh"
#include "product_copies.cuh"
#include "warpgroup.cuh"

namespace lsq {

constexpr int kTilesAtOnce = 2, kTileThreads = kWarpgroup, kCopyThreads = kWarpgroup;
constexpr int kProductThreads = kTilesAtOnce * kTileThreads + kCopyThreads;
constexpr int kProductBlocks = 1;  // that a multiprocessor is to hold
// Registers of all threads at first, as __launch_bounds__ leaves them of 65,536, and then of those
// that copy, and that multiply.
constexpr int kFirstRegisters = 65536 / kProductThreads / 8 * 8;
constexpr int kCopyRegisters = 40, kTileRegisters = 232;
constexpr int kWarpsDown = 4, kWarpsAcross = 1;
constexpr int kWarpColumns = TILE_N;
constexpr int kRowTiles = TILE_M / 64, kColumnTiles = kWarpColumns / 8;
// Shared memory to end a tile: eight rows of each warp (product_rows.cuh), 36 bytes for each row.
constexpr int kEndBytes = kWarpsDown * 8 * 16 * (kWarpColumns / 4 + 2) + 36 * TILE_M;
// Steps whose copies are under way while the next one begins. More than STAGES - 2 would wait for
// ever: a stage is read when the next step begins to multiply, which must have been announced. One
// fewer announces a step earlier than that.
constexpr int kCopiesAhead = STAGES > 3 ? STAGES - 3 : 1;

static_assert(kCopyThreads * kCopyRegisters + kTilesAtOnce * kTileThreads * kTileRegisters <=
                  kProductThreads * kFirstRegisters,
              "a warpgroup would wait for ever for registers that no other gives up");
static_assert(TILE_M % 64 == 0, "whole warpgroups");
static_assert(TILE_M * TILE_N <= 128 * 128, "128 sums of a thread");
static_assert(STAGES >= 3 && STAGES <= 5, "one is filled while two are read; 16 barriers");

// Named barriers, of each stage and each warpgroup.
LSQ_INLINE int barrier_filled(int stage) { return 1 + stage; }
LSQ_INLINE int barrier_read(int stage) { return 1 + STAGES + stage; }
LSQ_INLINE int barrier_turn(int warpgroup) { return 1 + 2 * STAGES + warpgroup; }
LSQ_INLINE int barrier_tile(int warpgroup) { return 3 + 2 * STAGES + warpgroup; }
constexpr int kStageThreads = kTileThreads + kCopyThreads;  // that come to barriers of a stage

// A thread's sums, four per tile as in tensor_core.cuh.
struct Sums {
    int32_t of[kRowTiles][kColumnTiles][4];
};

LSQ_INLINE int tile_thread() { return threadIdx.x % kTileThreads; }
LSQ_INLINE int tile_of_block() { return threadIdx.x / kTileThreads; }
LSQ_INLINE void sync_tile() { sync_barrier<kTileThreads>(barrier_tile(tile_of_block())); }

LSQ_INLINE int warp_row() { return tile_thread() / kWarp * 16; }
LSQ_INLINE int warp_column() { return 0; }
// First row, of a warp's, of the `half`th eight that its sums have.
LSQ_INLINE int row_of_eight(int half) { return half / 2 * 64 + half % 2 * 8; }

LSQ_INLINE int after(int stage) { return stage + 1 == STAGES ? 0 : stage + 1; }

// Begins to multiply a stage, as a group.
LSQ_INLINE void begin_stage(const unsigned char* stage, Sums& sums) {
    const uint64_t b = swizzled_matrix(stage + TILE_M * kStep);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) fence_sums(sums.of[i]);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        const uint64_t a = swizzled_matrix(stage + i * 64 * kStep);
#pragma unroll
        for (int k = 0; k < kStep; k += 32)
            begin_multiplication(sums.of[i], moved(a, k), moved(b, k));
    }
    commit_multiplications();
}

// Waits until all but the newest GROUPS stages are multiplied.
template <int GROUPS>
LSQ_INLINE void wait_stages(Sums& sums) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) wait_multiplications<GROUPS>(sums.of[i]);
}

// The block's tiles, and its steps of each.
struct BlockTiles {
    uint32_t across, all;
    Steps steps;

    LSQ_INLINE BlockTiles(int64_t rows, int64_t columns, int64_t inner)
        : across(tiles_across(columns)), steps(inner) {
        all = across * max(static_cast<uint32_t>((rows + TILE_M - 1) / TILE_M), 1u);
    }

    LSQ_INLINE Tile at(uint32_t number) const {
        return {number % across, number / across, number};
    }
};

// Copies all steps of all tiles. The warps that copy call this.
template <class RowsOf, class ColumnsOf>
LSQ_INLINE void copy_tiles(const BlockTiles& tiles, unsigned char* stages, const RowsOf& rows_of,
                           const ColumnsOf& columns_of) {
    int next = 0, announced = 0;  // stages
    int used = 0;                 // stages that have been filled once
    int ahead = 0;                // steps that are not announced yet
    const auto announce = [&] {
        fence_shared();
        arrive_barrier<kStageThreads>(barrier_filled(announced));
        announced = after(announced);
    };
#pragma unroll 1
    for (uint32_t number = blockIdx.x; number < tiles.all; number += gridDim.x) {
        const auto a = rows_of(tiles.at(number));
        const auto b = columns_of(tiles.at(number));
#pragma unroll 1
        for (int64_t step = tiles.steps.first; step < tiles.steps.last; ++step) {
            if (used == STAGES)
                sync_barrier<kStageThreads>(barrier_read(next));
            else
                ++used;
            begin_copies(a, b, stages + next * kStageBytes, step, tiles.steps);
            next = after(next);
            if (ahead < kCopiesAhead) {
                ++ahead;
                continue;
            }
            wait_copies<kCopiesAhead>();
            announce();
        }
    }
    wait_copies<0>();
#pragma unroll
    for (int step = 0; step < kCopiesAhead; ++step)
        if (step < ahead) announce();
    // Waits until the last stages have been read, so that no barrier stays open.
    for (next = used == STAGES ? next : 0; used; --used, next = after(next))
        sync_barrier<kStageThreads>(barrier_read(next));
}

// Multiplies the steps of a tile, from stage `now` on, when it is this warpgroup's turn.
LSQ_INLINE void multiply_tile(const BlockTiles& tiles, uint32_t number, int now,
                              const unsigned char* stages, Sums& sums) {
    constexpr int kBoth = 2 * kTileThreads;
    const int own = tile_of_block();
    if (number != blockIdx.x) sync_barrier<kBoth>(barrier_turn(own));
    int before = now;
#pragma unroll 1
    for (int64_t step = tiles.steps.first; step < tiles.steps.last; ++step) {
        sync_barrier<kStageThreads>(barrier_filled(now));
        begin_stage(stages + now * kStageBytes, sums);
        wait_stages<1>(sums);
        if (step > tiles.steps.first) arrive_barrier<kStageThreads>(barrier_read(before));
        before = now, now = after(now);
    }
    if (number + gridDim.x < tiles.all) arrive_barrier<kBoth>(barrier_turn(1 - own));
    wait_stages<0>(sums);
    if (tiles.steps.first < tiles.steps.last) arrive_barrier<kStageThreads>(barrier_read(before));
}

// Calls work(tile, sums, shared) for every tile of the block, over its part of K, by the threads
// that have the sums. rows_of(tile) and columns_of(tile) are the operands. `stages` has
// STAGES * kStageBytes bytes, at a multiple of kPattern, and behind them kEndBytes for each
// warpgroup, which are `shared`.
template <class RowsOf, class ColumnsOf, class Work>
LSQ_INLINE void for_tiles(int64_t rows, int64_t columns, int64_t inner, unsigned char* stages,
                          const RowsOf& rows_of, const ColumnsOf& columns_of, const Work& work) {
    const BlockTiles tiles(rows, columns, inner);
    if (tile_of_block() == kTilesAtOnce) {
        give_registers<kCopyRegisters>();
        return copy_tiles(tiles, stages, rows_of, columns_of);
    }
    take_registers<kTileRegisters>();
    const int64_t steps = tiles.steps.last - tiles.steps.first;
    int first = static_cast<int>(steps * tile_of_block() % STAGES);
    unsigned char* shared = stages + STAGES * kStageBytes + tile_of_block() * kEndBytes;
#pragma unroll 1
    for (uint32_t number = blockIdx.x + tile_of_block() * gridDim.x; number < tiles.all;
         number += kTilesAtOnce * gridDim.x) {
        Sums sums = {};
        multiply_tile(tiles, number, first, stages, sums);
        first = static_cast<int>((first + kTilesAtOnce * steps) % STAGES);
        work(tiles.at(number), sums, shared);
    }
}

}  // namespace lsq
