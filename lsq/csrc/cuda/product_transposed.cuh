// Operands of an int8 product whose codes lie along K: a [K, M], b [K, N]. A warp transposes them
// when it loads fragments: ldmatrix transposes pairs of bytes, and __byte_perm separates the bytes.
//
// A fragment takes 16 neighbouring columns of the codes. The even columns become the first eight
// rows of a's fragment, and the odd ones the other eight (`row_of`); of b they become fragments
// 2 * j and 2 * j + 1.
#pragma once

#include "product_mma.cuh"

namespace lsq {

// The column, of 16, that becomes row `row` of the first or second eight.
LSQ_INLINE int row_of(int half, int row) { return 2 * row + half; }

// Columns [first, first + WIDTH) of codes.
template <int WIDTH>
struct TransposedTile {
    static constexpr int kAcross = WIDTH / kChunk;  // chunks of a row
    static constexpr int kApart = kProductThreads / kAcross, kCopies = kStep / kApart;
    const int8_t* from;
    int64_t columns, rows, inner;
    bool has_column;

    // codes [rows, columns]; `inner`: K, at least `rows`, with zeros beyond them.
    LSQ_INLINE TransposedTile(const int8_t* codes, int64_t first, int64_t columns, int64_t rows,
                              int64_t inner)
        : from(codes + (row() * columns + first + kChunk * chunk())), columns(columns), rows(rows),
          inner(inner), has_column(first + kChunk * chunk() < columns) {}

    LSQ_INLINE static int row() { return threadIdx.x / kAcross; }
    LSQ_INLINE static int chunk() { return threadIdx.x % kAcross; }
    // Bytes from the tile's start to a chunk. Rows that ldmatrix reads together (0, 1, 4, 5, 8, ...
    // or 2, 3, 6, 7, 10, ...) lie in different banks.
    LSQ_INLINE static int offset_of(int row, int chunk) {
        const int turn = kAcross == 8 ? row / 4 * 2 + row % 2 : row / 4;
        return row * WIDTH + (chunk ^ turn % kAcross) * kChunk;
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

    // Loads the words of columns [column, column + 16), a multiple of 16, for 32 values along K
    // from chunk `chunk` on: words[even or odd columns][half of the 32 values].
    LSQ_INLINE static void load16(const unsigned char* tile, int chunk, int column,
                                  uint32_t (&words)[2][2]) {
        const int lane = threadIdx.x % kWarp, first = kChunk * (chunk + lane / 16);
        const int row = first + lane % 8 / 2 * 4 + lane % 2 + lane / 8 % 2 * 2;
        uint32_t pairs[4];
        load_matrices<4, true>(tile + offset_of(row, column / kChunk), pairs);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            words[0][half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x6420);
            words[1][half] = __byte_perm(pairs[2 * half], pairs[2 * half + 1], 0x7531);
        }
    }
};

struct TransposedRows : TransposedTile<TILE_M> {
    using TransposedTile::TransposedTile;

    LSQ_INLINE void load(const unsigned char* stage, int64_t, int chunk, RowFragments& a) const {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            uint32_t words[2][2];
            load16(stage, chunk, warp_row() + 16 * i, words);
            a[i][0] = words[0][0], a[i][1] = words[1][0];
            a[i][2] = words[0][1], a[i][3] = words[1][1];
        }
    }
};

struct TransposedColumns : TransposedTile<TILE_N> {
    using TransposedTile::TransposedTile;

    LSQ_INLINE void load(const unsigned char* stage, int64_t, int chunk, ColumnFragments& b) const {
#pragma unroll
        for (int j = 0; j < kColumnTiles; j += 2) {
            uint32_t words[2][2];
            load16(stage + TILE_M * kStep, chunk, warp_column() + 8 * j, words);
#pragma unroll
            for (int half = 0; half < 2; ++half)
                b[j + half][0] = words[half][0], b[j + half][1] = words[half][1];
        }
    }
};

}  // namespace lsq
