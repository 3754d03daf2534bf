// Copies the operands of an int8 product to shared memory: a [M, K] and b [N, K], K a multiple of
// 16.
//
// Tiles have TILE_M x TILE_N sums (-D). K comes in steps of 64, which blocks along the third
// dimension of the grid may share, through STAGES (-D) stages. Within a stage, a row of 64 bytes is
// four chunks; chunk c of row r lies at chunk c ^ r / 2 % 4: no bank conflicts of copies, nor of
// reads of a chunk of eight rows. Steps are of 128 by wgmma, and if b has packed fields
// (-DFIELD_BITS, product_fields.cuh), of which it is the span of every width: chunk c lies at
// c ^ r % 8. Both are swizzles of wgmma.
#pragma once

#include "tensor_core.cuh"

#ifndef FIELD_BITS
#define FIELD_BITS 0
#endif
#ifndef WGMMA
#define WGMMA 0
#endif

namespace lsq {

// Bytes of a row of a in a stage, which are values along K.
constexpr int kStep = FIELD_BITS || WGMMA ? 128 : 64;
constexpr int kChunk = 16, kChunks = kStep / kChunk;
constexpr int kColumnBytes = FIELD_BITS ? kStep * FIELD_BITS / 8 : kStep;  // of a row of b
constexpr int kStageBytes = TILE_M * kStep + TILE_N * kColumnBytes;
// Bytes after which the order of chunks repeats: stages lie at a multiple.
constexpr int kPattern = 8 * kStep;

// The place of a tile among those of a product.
struct Tile {
    uint32_t across, down;
    uint32_t number;  // of the tile, row by row

    LSQ_INLINE int64_t row() const { return static_cast<int64_t>(down) * TILE_M; }
    LSQ_INLINE int64_t column() const { return static_cast<int64_t>(across) * TILE_N; }
};

LSQ_INLINE uint32_t tiles_across(int64_t columns) {
    return static_cast<uint32_t>((columns + TILE_N - 1) / TILE_N);
}

LSQ_INLINE int offset_of(int row, int chunk) {
    return row * kStep + (chunk ^ row * kStep / 128 % kChunks) * kChunk;
}

// The copies that one of THREADS threads makes of an operand's rows [first, first + ROWS).
template <int THREADS, int ROWS>
struct TileCopy {
    static constexpr int kApart = THREADS / kChunks, kCopies = ROWS / kApart;
    const int8_t* from;
    int64_t inner;
    int left;  // rows from the thread's first one to the last of all

    LSQ_INLINE TileCopy(const int8_t* operand, int64_t first, int64_t rows, int64_t inner)
        : from(operand + (first + row()) * inner + kChunk * chunk()), inner(inner),
          left(static_cast<int>(min(rows - first - row(), static_cast<int64_t>(ROWS)))) {}

    LSQ_INLINE static int row() { return threadIdx.x % THREADS / kChunks; }
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

// A block's steps along K.
struct Steps {
    int64_t first, last;

    LSQ_INLINE explicit Steps(int64_t inner) {
        const auto steps = static_cast<uint32_t>((inner + kStep - 1) / kStep);
        first = steps * blockIdx.z / gridDim.z, last = steps * (blockIdx.z + 1) / gridDim.z;
    }
};

// Begins this thread's copies of step `step`, if there is one, rows of a and then of b, as a group.
// OfA, OfB: TileCopy, or one that copies an operand as it is stored.
template <class OfA, class OfB>
LSQ_INLINE void begin_copies(const OfA& a, const OfB& b, unsigned char* stage, int64_t step,
                             const Steps& steps) {
    if (step < steps.last) a.begin(stage, step), b.begin(stage + TILE_M * kStep, step);
    commit_copies();
}

}  // namespace lsq
