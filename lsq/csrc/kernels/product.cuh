// The main loop of an int8 product: a [M, K] times b [N, K] transposed, int32 sums in registers. K is a multiple of 16.
//
// A block makes a tile of TILE_M x TILE_N sums (-D), 2 x 2 warps a quarter each. K comes in steps of 64, which blocks along
// the third dimension of the grid may share (product_split.cuh), through STAGES (-D) stages of shared memory: while one is
// multiplied, copies fill the others. Within a stage, a row of 64 bytes is four
// chunks; chunk c of row r lies at place c ^ r / 2 % 4 of it, so that neither copies nor ldmatrix, which take the same
// chunk of eight rows, meet in a bank.
#pragma once

#include "tensor_core.cuh"

namespace lsq {

constexpr int kProductThreads = 128;
constexpr int kStep = 64, kChunk = 16, kChunks = kStep / kChunk;  // bytes, which are values along K
constexpr int kWarpRows = TILE_M / 2, kWarpColumns = TILE_N / 2;
constexpr int kRowTiles = kWarpRows / 16, kColumnTiles = kWarpColumns / 8;  // of mma, in a warp's quarter
constexpr int kStageBytes = (TILE_M + TILE_N) * kStep;

static_assert(TILE_M % 32 == 0 && TILE_N % 64 == 0, "ends take 32 columns of a warp at a time");
static_assert(STAGES >= 2, "one is filled while another is read");

// Of a thread: see tensor_core.cuh for a tile's four.
struct Sums {
    int32_t of[kRowTiles][kColumnTiles][4];
};

__device__ __forceinline__ int warp_row() { return threadIdx.x / kWarp / 2 * kWarpRows; }
__device__ __forceinline__ int warp_column() { return threadIdx.x / kWarp % 2 * kWarpColumns; }
__device__ __forceinline__ int64_t block_row() { return static_cast<int64_t>(blockIdx.y) * TILE_M; }
__device__ __forceinline__ int64_t block_column() { return static_cast<int64_t>(blockIdx.x) * TILE_N; }

__device__ __forceinline__ int place_of(int row, int chunk) {
    return row * kStep + (chunk ^ row / 2 % kChunks) * kChunk;
}

// What this thread copies of an operand's rows [first, first + ROWS): a chunk of every 32nd row.
template <int ROWS>
struct TileCopy {
    static constexpr int kApart = kProductThreads / kChunks, kCopies = ROWS / kApart;
    const int8_t* from;
    int64_t inner;
    int left;  // rows from the thread's first one to the last of all

    __device__ __forceinline__ TileCopy(const int8_t* operand, int64_t first, int64_t rows, int64_t inner)
        : from(operand + (first + row()) * inner + kChunk * chunk()), inner(inner),
          left(static_cast<int>(min(rows - first - row(), static_cast<int64_t>(ROWS)))) {}

    __device__ __forceinline__ static int row() { return threadIdx.x / kChunks; }
    __device__ __forceinline__ static int chunk() { return threadIdx.x % kChunks; }

    // Begins to copy step `step`; what lies beyond the operand is zeros.
    __device__ __forceinline__ void begin(unsigned char* tile, int64_t step) const {
        const bool inside = step * kStep + kChunk * chunk() < inner;
        unsigned char* to = tile + place_of(row(), chunk());
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            copy_async<kChunk>(to + i * kApart * kStep, from + step * kStep + i * kApart * inner,
                               inside && i * kApart < left);
        }
    }
};

// Adds what a stage holds, rows of a and then rows of b.
__device__ __forceinline__ void multiply_stage(const unsigned char* stage, Sums& sums) {
    const int lane = threadIdx.x % kWarp;
    const int row = warp_row() + lane % 16, column = TILE_M + warp_column() + lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kChunks; k += 2) {
        uint32_t a[kRowTiles][4], b[kColumnTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) load_matrices(stage + place_of(row + 16 * i, k + lane / 16), a[i]);
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += 2) {
            uint32_t words[4];
            load_matrices(stage + place_of(column + 8 * j, k + lane / 8 % 2), words);
            b[j][0] = words[0], b[j][1] = words[1], b[j + 1][0] = words[2], b[j + 1][1] = words[3];
        }
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) multiply(sums.of[i][j], a[i], b[j]);
        }
    }
}

// The sums of this block's tile, over its part of K. `stages` has STAGES * kStageBytes bytes, at a multiple of 128.
__device__ __forceinline__ void accumulate(const TileCopy<TILE_M>& a, const TileCopy<TILE_N>& b, unsigned char* stages,
                                           Sums& sums) {
    const auto steps = static_cast<uint32_t>((a.inner + kStep - 1) / kStep);
    const int64_t first = steps * blockIdx.z / gridDim.z, last = steps * (blockIdx.z + 1) / gridDim.z;
    const auto fill = [&](int stage, int64_t step) {
        unsigned char* tile = stages + stage * kStageBytes;
        if (step < last) a.begin(tile, step), b.begin(tile + TILE_M * kStep, step);
        commit_copies();  // an empty group keeps the count
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; ++stage) fill(stage, first + stage);
    int now = 0, next = STAGES - 1;
#pragma unroll 1
    for (int64_t step = first; step < last; ++step) {
        wait_copies<STAGES - 2>();
        __syncthreads();  // this step is there for all warps, and all have read the one before
        fill(next, step + STAGES - 1);
        multiply_stage(stages + now * kStageBytes, sums);
        next = now;
        now = now + 1 == STAGES ? 0 : now + 1;
    }
}

}  // namespace lsq
