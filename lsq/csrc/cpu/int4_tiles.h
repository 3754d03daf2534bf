// Int8 products with packed weights of 4 bits; lsq/quant/formats.py (Int4) has their format.
//
// Sums int32 [M, N] of a int8 [M, K] times the codes m * q [N, K] transposed, bit by bit those of
// the unpacked codes. Few rows are multiplied in registers: by q, and the sums of a group by m, or
// by m * q. For more rows, tiles are unpacked into the first cache, for the kernels of int8. a's
// codes are from -127 to 127, so that a group's sum with |q| <= 8 has 16 bits.
#pragma once

#include "../include/int4.h"
#include "tiles.h"

namespace lsq {

// Two tiles of 16 columns by 64 inner elements, side by side. Blocks follow each other along K,
// then come those of the next 32 columns; at the end, 128 times the sum of each column (int32).
struct alignas(64) Int4Block {
    // Unit u has the codes of inner elements 4 u + i at 4 * column + i: in the lower half, and in
    // the upper half those of 32 elements later. A code is q + 8, or 7 - q under a negative
    // multiplier.
    uint8_t pairs[2][kTileUnits / 2][kTileInner];
    int8_t multipliers[2][kTileSide][2];  // of the first 32 inner elements, and of the others
};

// Unpacks a block's codes m * q to two tiles, `distance` bytes apart.
void unpack(const Int4Block& block, int8_t* tiles, int64_t distance);

// Multiplies rows of a product on one thread; see StripMultiplier.
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
    TileSession session_;
};

}  // namespace lsq
