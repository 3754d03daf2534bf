// Transposes codes: a block takes a tile of 128 x 128 through shared memory, 16 bytes at a time.
//
// Thread t holds 4 rows x 16 columns, from row 4 * (t / 8) and column 16 * (t % 8) on. Bytes are
// exchanged in registers, 4 x 4 at a time; shared memory holds each column as 32 words of 4 rows,
// with 16-byte chunks permuted by the thread's column group against bank conflicts.
#pragma once

#include "vectors.cuh"

namespace lsq {

constexpr int kTile = 128, kTileThreads = 256;
constexpr int kGroupRows = 4, kGroupColumns = 16;  // of one thread

// Four rows of four bytes become four columns.
LSQ_INLINE void transpose_bytes(uint32_t (&word)[4]) {
    const uint32_t low01 = __byte_perm(word[0], word[1], 0x5140),
                   high01 = __byte_perm(word[0], word[1], 0x7362);
    const uint32_t low23 = __byte_perm(word[2], word[3], 0x5140),
                   high23 = __byte_perm(word[2], word[3], 0x7362);
    word[0] = __byte_perm(low01, low23, 0x5410);
    word[1] = __byte_perm(low01, low23, 0x7632);
    word[2] = __byte_perm(high01, high23, 0x5410);
    word[3] = __byte_perm(high01, high23, 0x7632);
}

// A tile by its numbers along rows and columns, and the thread's first row and column.
struct TilePosition {
    int64_t down, along;

    LSQ_INLINE int64_t row() const {
        return down * kTile + threadIdx.x / (kTile / kGroupColumns) * kGroupRows;
    }
    LSQ_INLINE int64_t column() const {
        return along * kTile + threadIdx.x % (kTile / kGroupColumns) * kGroupColumns;
    }
};

// Writes the tile, of which every thread holds 16 columns as words of 4 rows, to out [columns,
// padded], multiples of 16. All threads of the block must call this.
LSQ_INLINE void store_transposed(const TilePosition position,
                                 const uint32_t (&column_word)[kGroupColumns], int8_t* out,
                                 int64_t columns, int64_t padded) {
    constexpr int kChunks = kTile / 16;  // 16-byte chunks of a column
    __shared__ uint4 tile[kTile * kChunks];
    uint32_t* words = reinterpret_cast<uint32_t*>(tile);
    const int column_group = threadIdx.x % kChunks, row_group = threadIdx.x / kChunks;
    const int word = row_group ^ (column_group * 4);
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i)
        words[(16 * column_group + i) * (kTile / 4) + word] = column_word[i];
    __syncthreads();
    const int chunk = threadIdx.x % kChunks;
    const int64_t first_row = position.down * kTile + 16 * chunk;
#pragma unroll
    for (int pass = 0; pass < kTile * kChunks / kTileThreads; ++pass) {
        const int column = pass * (kTileThreads / kChunks) + threadIdx.x / kChunks;
        const int64_t out_row = position.along * kTile + column;
        if (out_row >= columns || first_row >= padded) continue;
        const uint4 values = load_words<uint4>(tile + column * kChunks + (chunk ^ (column / 16)));
        store_words(out + out_row * padded + first_row, values);
    }
}

}  // namespace lsq
