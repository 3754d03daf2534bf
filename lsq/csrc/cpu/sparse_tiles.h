// Int8 products with weights that are 2:4 sparse and stay packed in memory, in 5/8 of the bytes of
// tiles.h.
//
// Sums int32 [M, N] of a int8 [M, K] times b int8 [N, K] transposed: those of the dense product. No
// processor here skips zeros; but few rows wait for memory, which has less to bring. Of few rows,
// tiles are expanded in registers on their way to VNNI; of more, in the first cache, for the
// kernels of dense tiles.
#pragma once

#include "tiles.h"

namespace lsq {

// 16 columns by 32 inner elements, half a tile: eight units of four elements, of which two are
// kept.
struct alignas(64) SparseHalf {
    // Of a column, four bits a unit, the lowest ones of unit 0: two are set.
    uint32_t kept[kTileSide];
    // [pair of units][column][unit of the pair]: the two that are kept.
    int8_t values[kTileUnits / 4][kTileSide][2][2];
};

// Two tiles side by side. Blocks that follow each other along K lie behind each other, and behind
// all of them those of the next 32 columns; at the end, 128 times the sum of each column (int32).
struct SparseBlock {
    SparseHalf halves[2][2];  // [tile][along K]
};

inline int64_t sparse_blocks(int64_t columns, int64_t inner) {
    return rounded_up(columns, kTilePair) / kTilePair * inner_tiles(inner);
}

// A block as two tiles, `distance` bytes apart.
void unpack(const SparseBlock& block, int8_t* tiles, int64_t distance);

// sums [rows, 32], `stride` apart, of `depth` blocks along K; a has 128 added to each code, and
// `columns` are 128 times the sums of the 32 columns.
using SparseKernel = void (*)(const TileRows& a, int64_t rows, const SparseBlock* blocks,
                              int64_t depth, const int32_t* columns, int32_t* sums, int64_t stride);

// Of few rows in registers; null: this processor has none.
SparseKernel sparse_kernel();

// Rows of a product on one thread, as StripMultiplier has them; product.memory holds blocks.
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
#if defined(LSQ_AMX)
    std::optional<WholeTiles> tiles_;
#endif
};

}  // namespace lsq
