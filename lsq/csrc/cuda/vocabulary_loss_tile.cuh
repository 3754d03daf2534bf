// Tiles of logits of codes in registers, for both passes of the vocabulary's loss and
// the search for the next words.
#pragma once

#include "product_rows.cuh"
#include "vocabulary_loss.cuh"

namespace lsq {

// for_tiles of sums [rows, columns] of codes: rows of x, words, `inner` values to multiply.
template <class Work>
LSQ_INLINE void for_logits(const int8_t* x, int64_t rows, const int8_t* weight, int64_t columns,
                           int64_t inner, unsigned char* stages, const Work& work) {
    const auto rows_of = [&](Tile tile) {
        return TileCopy<kCopyThreads, TILE_M>(x, tile.row(), rows, inner);
    };
    const auto columns_of = [&](Tile tile) {
        return TileCopy<kCopyThreads, TILE_N>(weight, tile.column(), columns, inner);
    };
    for_tiles(rows, columns, inner, stages, rows_of, columns_of, work);
}

// A thread's eight columns: factors from sums to logits, and the weight's scales; zeros beyond the
// vocabulary.
struct LogitColumns {
    int64_t first;
    int words;  // of the vocabulary, among them
    float alpha[kVector] = {}, scale[kVector] = {};

    LSQ_INLINE LogitColumns(Tile tile, const Coded& x, const Weight& weight, int64_t vocabulary)
        : first(sums_column(tile)) {
        words = static_cast<int>(min(max(vocabulary - first, int64_t{0}), int64_t{kVector}));
        if (!words) return;
        load8(weight.scale + first, scale);
        const float x_scale = x.scale[0];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            scale[i] = i < words ? scale[i] : 0.0f;
            alpha[i] = i < words ? x_scale * scale[i] : 0.0f;
        }
    }
};

// The index of a word in a tile; -1 if it lies elsewhere.
LSQ_INLINE short index_in_tile(Tile tile, int64_t word) {
    const int64_t index = word - tile.column();
    return index >= 0 && index < TILE_N ? static_cast<short>(index) : -1;
}

// Shared memory of a tile that for_sums does not use.
LSQ_INLINE unsigned char* beside_rows(unsigned char* shared) { return shared + kRowsBytes; }

}  // namespace lsq
