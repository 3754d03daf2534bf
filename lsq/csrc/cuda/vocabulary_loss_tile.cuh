// A tile of logits of codes in a block's registers, for both passes of the vocabulary's loss and
// the search for the next words.
#pragma once

#include "product_rows.cuh"
#include "vocabulary_loss.cuh"

namespace lsq {

// The sums of this block's tile: M rows of x, P words, `inner` values to multiply.
LSQ_INLINE void accumulate_logits(const Prediction& given, int64_t inner, unsigned char* stages,
                                  Sums& sums) {
    accumulate({given.x.coded.codes, block_row(), given.rows, inner},
               {given.weight.codes, block_column(), given.columns, inner}, stages, sums);
}

// A thread's eight columns: factors from sums to logits, and the weight's scales; zeros beyond the
// vocabulary.
struct LogitColumns {
    int64_t first;
    int words;  // of the vocabulary, among them
    float alpha[kVector] = {}, scale[kVector] = {};

    LSQ_INLINE LogitColumns(const Coded& x, const Weight& weight, int64_t vocabulary)
        : first(sums_column()) {
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

// The index of a word in this block's tile; -1 if it lies elsewhere.
LSQ_INLINE short index_in_tile(int64_t word) {
    const int64_t index = word - block_column();
    return index >= 0 && index < TILE_N ? static_cast<short>(index) : -1;
}

// Part of the stages that for_sums does not use.
LSQ_INLINE unsigned char* beside_rows(unsigned char* stages) { return stages + kRowsBytes; }

}  // namespace lsq
