// Copies the operands of an int8 product to shared memory: a [M, K] and b [N, K], K a multiple of
// 16.
//
// A block makes a tile of TILE_M x TILE_N sums (-D). K comes in steps of 64, which blocks along the
// third dimension of the grid may share, through STAGES (-D) stages. Within a stage, a row of 64
// bytes is four chunks; chunk c of row r lies at chunk c ^ r / 2 % 4, wgmma's 64-byte swizzle: no
// bank conflicts of copies, nor of reads of a chunk of eight rows. -DFIELD_BITS: b has packed
// fields (product_fields.cuh), and steps are of 128, the span of every width: chunk c lies at
// c ^ r % 8.
#pragma once

#include "tensor_core.cuh"

#ifndef FIELD_BITS
#define FIELD_BITS 0
#endif

namespace lsq {

constexpr int kStep = FIELD_BITS ? 128 : 64;  // bytes of a row of a, which are values along K
constexpr int kChunk = 16, kChunks = kStep / kChunk;
constexpr int kColumnBytes = FIELD_BITS ? kStep * FIELD_BITS / 8 : kStep;  // of a row of b
constexpr int kStageBytes = TILE_M * kStep + TILE_N * kColumnBytes;
// Bytes after which the order of chunks repeats: stages lie at a multiple.
constexpr int kPattern = 8 * kStep;

LSQ_INLINE int64_t block_row() { return static_cast<int64_t>(blockIdx.y) * TILE_M; }
LSQ_INLINE int64_t block_column() { return static_cast<int64_t>(blockIdx.x) * TILE_N; }

LSQ_INLINE int offset_of(int row, int chunk) {
    return row * kStep + (chunk ^ row * kStep / 128 % kChunks) * kChunk;
}

// A thread's copies of an operand's rows [first, first + ROWS): a chunk of every THREADS / 4th row.
template <int THREADS, int ROWS>
struct TileCopy {
    static constexpr int kApart = THREADS / kChunks, kCopies = ROWS / kApart;
    const int8_t* from;
    int64_t inner;
    int left;  // rows from the thread's first one to the last of all

    LSQ_INLINE TileCopy(const int8_t* operand, int64_t first, int64_t rows, int64_t inner)
        : from(operand + (first + row()) * inner + kChunk * chunk()), inner(inner),
          left(static_cast<int>(min(rows - first - row(), static_cast<int64_t>(ROWS)))) {}

    LSQ_INLINE static int row() { return threadIdx.x / kChunks; }
    LSQ_INLINE static int chunk() { return threadIdx.x % kChunks; }

    // Begins to copy step `step`, with zeros beyond the operand.
    LSQ_INLINE void begin(unsigned char* tile, int64_t step) const {
        const bool inside = step * kStep + kChunk * chunk() < inner;
        unsigned char* to = tile + offset_of(row(), chunk());
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            copy_async<kChunk>(to + i * kApart * kStep, from + step * kStep + i * kApart * inner,
                               inside && i * kApart < left);
        }
    }
};

// A block's steps along K, and this thread's copies. OfA, OfB: TileCopy, or one that copies an
// operand as it is stored.
template <class OfA, class OfB>
struct StepCopies {
    const OfA& a;
    const OfB& b;
    unsigned char* stages;
    int64_t first, last;

    LSQ_INLINE StepCopies(const OfA& a, const OfB& b, unsigned char* stages)
        : a(a), b(b), stages(stages) {
        const auto steps = static_cast<uint32_t>((a.inner + kStep - 1) / kStep);
        first = steps * blockIdx.z / gridDim.z, last = steps * (blockIdx.z + 1) / gridDim.z;
    }

    // Begins to copy step `step`, if there is one, rows of a and then of b, as a group.
    LSQ_INLINE void begin(int stage, int64_t step) const {
        unsigned char* tile = stages + stage * kStageBytes;
        if (step < last) a.begin(tile, step), b.begin(tile + TILE_M * kStep, step);
        commit_copies();
    }
};

}  // namespace lsq
