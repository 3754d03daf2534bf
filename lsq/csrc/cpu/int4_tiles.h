// Int8 products with weights of 4 bits that stay packed in memory; lsq/quant/formats.py (Int4) has
// their format.
//
// Sums int32 [M, N] of a int8 [M, K] times the codes m * q [N, K] transposed: the very integers
// that int8 products of the unpacked codes make. Few rows are multiplied by codes in registers: by
// q, and the sums of a group by m, or by m * q. Of more rows, tiles are unpacked into the first
// cache, for the kernels of int8. a's codes are from -127 to 127: so the sum of a group, of |q| <=
// 8, has 16 bits.
#pragma once

#include "../include/int4.h"
#include "tiles.h"

namespace lsq {

// Two tiles of 16 columns by 64 inner elements, side by side. Blocks that follow each other along K
// lie behind each other, and behind all of them those of the next 32 columns; at the end, 128 times
// the sum of each column (int32).
struct alignas(64) Int4Block {
    // Of unit u, the codes of its inner elements 4 u + i at 4 * column + i: in the lower half, and
    // those of 32 elements later in the upper half. A code is q + 8, or 7 - q where the multiplier
    // is below 0, so that it counts positively.
    uint8_t pairs[2][kTileUnits / 2][kTileInner];
    int8_t multipliers[2][kTileSide][2];  // of the first 32 inner elements, and of the others
};

inline int64_t int4_blocks(int64_t columns, int64_t inner) {
    return rounded_up(columns, kTilePair) / kTilePair * inner_tiles(inner);
}

// Of a row and a block.
struct Int4Start {
    // -8 times the sum of its first 32 codes, and -128 times that of the others.
    int32_t first, second;
    int16_t sums[2];        // these

    uint32_t both() const {
        return static_cast<uint16_t>(sums[0]) | static_cast<uint32_t>(sums[1]) << 16;
    }
};

// Rows of codes for kernels of few rows: tiles along K are `step` bytes apart.
struct Int4Rows {
    const int8_t* data;
    int64_t stride, step;
    const Int4Start* starts;  // [rows, depth]
};

// sums [rows, 32], `stride` apart, of `depth` blocks along K.
using Int4Kernel = void (*)(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                            int32_t* sums, int64_t stride);

Int4Kernel int4_kernel_of(Instructions instructions);

// Rows up to which it is faster than unpacking tiles.
int64_t int4_rows(Instructions instructions);

// What a block's codes m * q are: two tiles, `distance` bytes apart.
void unpack(const Int4Block& block, int8_t* tiles, int64_t distance);

#if defined(LSQ_AMX)
// Where blocks are unpacked to: tiles of int8, `depth` of the left and behind them those of the
// right.
struct Int4Tiles {
    int8_t* data;
    int64_t depth;  // fewer than those of the product: the next ones take the place of the first
};

// The same of up to 32 rows by unpacked blocks, one of which is unpacked while another one is
// multiplied.
void multiply_unpacked(const TileRows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                       const Int4Tiles& to, int32_t* sums, int64_t stride);
#endif

// Rows of a product on one thread, as StripMultiplier has them.
class Int4Multiplier {
public:
    explicit Int4Multiplier(const TileProduct& product);
    Int4Multiplier(const Int4Multiplier&) = delete;
    Int4Multiplier& operator=(const Int4Multiplier&) = delete;

    void take(int64_t first, int64_t count);
    int64_t height() const { return height_; }
    void multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const;

private:
    void take_sums();

    const TileProduct& product_;
    const Int4Block* blocks_;
    const int32_t* columns_;  // 128 times their sums
    TileRows a_;
    int64_t depth_, rows_, height_;
    bool few_;  // rows, which are multiplied in registers
#if defined(LSQ_AMX)
    std::optional<WholeTiles> tiles_;
#endif
};

}  // namespace lsq
