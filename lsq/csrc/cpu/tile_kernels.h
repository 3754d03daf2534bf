// Kernels that multiply packed tiles with the instructions of a processor.
#pragma once

#include <algorithm>

#include "tiles.h"

namespace lsq {

// Two tiles of `b` side by side, `distance` bytes apart, for `depth` tiles along K.
struct PairOfColumns {
    const int8_t* data;
    int64_t distance, depth;
    // [32], 128 times the sum of each column of b; null: add to the existing sums.
    const int32_t* sums;
    int64_t ahead;  // what lies so many bytes behind is needed next, and fetched; 0: nothing
};

// sums [32, 32] of the first two tiles of rows, `stride` apart. Those of the first `rows` count;
// the others may be missing.
using Kernel = void (*)(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride,
                        int64_t rows);

Kernel kernel_of(Instructions instructions);

// Whether `a` is handed over with 128 added to each element, which the instructions take as
// unsigned.
inline bool biased(Instructions instructions) {
    return instructions == Instructions::avx_vnni || instructions == Instructions::avx512_vnni;
}

// Sums of columns [begin, end) of a packed weight: unpack(block, tiles, distance) makes tiles, a
// few at a time. `columns`: 128 times the sums of all columns.
template <class Block>
void multiply_expanded(const TileProduct& product, const TileRows& a, int64_t rows,
                       const Block* blocks, const int32_t* columns, Kept<int8_t>& memory,
                       int64_t begin, int64_t end, int32_t* sums, int64_t stride) {
    // For one pair of rows, and for more, which read the tiles again.
    constexpr int64_t kDepth = 2, kDeepDepth = 8;
    const Kernel kernel = kernel_of(product.instructions);
    const int64_t depth = inner_tiles(product.inner),
                  step = rows <= kTilePair ? kDepth : kDeepDepth;
    const int64_t distance = step * kTileBytes;
    int8_t* tiles = memory.at_least(2 * distance);
    for (int64_t column = begin; column < end; column += kTilePair, sums += kTilePair) {
        const Block* from = blocks + column / kTilePair * depth;
        for (int64_t k = 0; k < depth; k += step) {
            const int64_t deep = std::min(step, depth - k);
            for (int64_t i = 0; i < deep; ++i)
                unpack(from[k + i], tiles + i * kTileBytes, distance);
            const PairOfColumns pair{tiles, distance, deep, k ? nullptr : columns + column, 0};
            for (int64_t row = 0; row < rows; row += kTilePair) {
                const TileRows part{a.data + k * a.step + row / kTileSide * a.block, a.stride,
                                    a.step, a.block};
                kernel(part, pair, sums + row * stride, stride, std::min(kTilePair, rows - row));
            }
        }
    }
}

}  // namespace lsq
