// Int8 products with packed 2:4 sparse weights, in 5/8 of the bytes of tiles.h.
//
// Sums int32 [M, N] of a int8 [M, K] times b int8 [N, K] transposed, those of the dense product. No
// processor here skips zeros, but few rows wait for memory. For few rows tiles are expanded in
// registers, for more in the first cache.
#pragma once

#include "tiles.h"

namespace lsq {

// Half a tile: 16 columns by 32 inner elements, as eight units of four, of which two are kept.
struct alignas(64) SparseHalf {
    // Per column, four bits a unit, two of them set; unit 0 has the lowest.
    uint32_t kept[kTileSide];
    // [pair of units][column][unit of the pair]: the two that are kept.
    int8_t values[kTileUnits / 4][kTileSide][2][2];
};

// Two tiles side by side. Blocks follow each other along K, then come those of the next 32 columns;
// at the end, 128 times the sum of each column (int32).
struct SparseBlock {
    SparseHalf halves[2][2];  // [tile][along K]
};

// A block as two tiles, `distance` bytes apart.
void unpack(const SparseBlock& block, int8_t* tiles, int64_t distance);

// sums [rows, 32], `stride` apart, of `depth` blocks along K; a has 128 added to each code, and
// `columns` are 128 times the sums of the 32 columns.
using SparseKernel = void (*)(const TileRows& a, int64_t rows, const SparseBlock* blocks,
                              int64_t depth, const int32_t* columns, int32_t* sums, int64_t stride);

// Multiplies rows on one thread; see StripMultiplier. product.memory holds blocks.
class SparseMultiplier {
public:
    explicit SparseMultiplier(const TileProduct& product);
    SparseMultiplier(const SparseMultiplier&) = delete;
    SparseMultiplier& operator=(const SparseMultiplier&) = delete;

    void take(int64_t first, int64_t count);
    int64_t height() const { return rounded_up(rows_, kTilePair); }
    void multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const;

private:
    const TileProduct& product_;
    const SparseBlock* blocks_;
    const int32_t* columns_;  // 128 times their sums
    TileRows a_;
    int64_t depth_, rows_;
    SparseKernel kernel_;  // in registers, for the rows that were taken; or null
    TileSession session_;
};

}  // namespace lsq
