// a of an int8 product from codes [K, M], whose rows are steps along K: transposed on the way from
// shared memory to registers. ldmatrix transposes pairs of bytes, and permutations part them.
//
// A fragment has 16 neighbouring columns of the codes. Its row `group` is column 2 * group, its row
// group + 8 the next one: `row_of`.
#pragma once

#include "product_mma.cuh"

namespace lsq {

// Row of a fragment's 16 that holds row `row` of eight, in the first or second half.
LSQ_INLINE int row_of(int half, int row) { return 2 * row + half; }

struct TransposedRows {
    static constexpr int kAcross = TILE_M / kChunk;  // chunks of a row of the codes
    static constexpr int kApart = kProductThreads / kAcross, kCopies = kStep / kApart;
    const int8_t* from;
    int64_t columns, rows, inner;
    bool has_column;

    // codes [rows, columns]; columns [first, first + TILE_M) are wanted; `inner`: K, at least
    // `rows`, with zeros beyond them.
    LSQ_INLINE TransposedRows(const int8_t* codes, int64_t first, int64_t columns, int64_t rows,
                              int64_t inner)
        : from(codes + (row() * columns + first + kChunk * chunk())), columns(columns), rows(rows),
          inner(inner), has_column(first + kChunk * chunk() < columns) {}

    LSQ_INLINE static int row() { return threadIdx.x / kAcross; }
    LSQ_INLINE static int chunk() { return threadIdx.x % kAcross; }
    // The rows that ldmatrix reads together, 0, 1, 4, 5, 8, ... or 2, 3, 6, 7, 10, ..., lie in
    // different banks.
    LSQ_INLINE static int offset_of(int row, int chunk) {
        const int turn = kAcross == 8 ? row / 4 * 2 + row % 2 : row / 4;
        return row * TILE_M + (chunk ^ turn % kAcross) * kChunk;
    }

    // Begins to copy step `step`, with zeros beyond the codes.
    LSQ_INLINE void begin(unsigned char* tile, int64_t step) const {
        const int left = static_cast<int>(min(rows - step * kStep, static_cast<int64_t>(kStep)));
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
            copy_async<kChunk>(tile + offset_of(row() + i * kApart, chunk()),
                               from + (step * kStep + i * kApart) * columns,
                               has_column && row() + i * kApart < left);
        }
    }

    LSQ_INLINE void load(const unsigned char* stage, int64_t, int chunk, RowFragments& a) const {
        const int lane = threadIdx.x % kWarp;
        const int first = kChunk * (chunk + lane / 16);  // along K, of the lane's matrix
        const int row = first + lane % 8 / 2 * 4 + lane % 2 + lane / 8 % 2 * 2;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            uint32_t pairs[4];
            load_matrices<4, true>(stage + offset_of(row, warp_row() / kChunk + i), pairs);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32_t low = pairs[2 * half], high = pairs[2 * half + 1];
                a[i][2 * half] = __byte_perm(low, high, 0x6420);
                a[i][2 * half + 1] = __byte_perm(low, high, 0x7531);
            }
        }
    }
};

}  // namespace lsq
