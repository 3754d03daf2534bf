// A tile of logits of codes in the registers of a block: what both passes of the vocabulary's loss
// do with it, and the search for the next words.
//
// product.cuh makes the sums of a tile, product_rows.cuh hands them on by rows; logits never go to
// memory.
#pragma once

#include "product_rows.cuh"
#include "vocabulary_loss.cuh"

namespace lsq {

// The sums of this block's tile: M rows of x, P words, `inner` values to multiply.
__device__ __forceinline__ void accumulate_logits(
    const Prediction& given, int64_t inner, unsigned char* stages, Sums& sums) {
    accumulate({given.x.coded.codes, block_row(), given.rows, inner},
               {given.weight.codes, block_column(), given.columns, inner}, stages, sums);
}

// The eight columns of a thread: what turns sums into logits, and the scales of the weight; zeros
// beyond the vocabulary.
struct LogitColumns {
    int64_t first;
    int words;  // of the vocabulary, among them
    float alpha[kVector] = {}, scale[kVector] = {};

    __device__ __forceinline__ LogitColumns(const Coded& x, const Weight& weight,
                                            int64_t vocabulary)
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
__device__ __forceinline__ short place_in_tile(int64_t word) {
    const int64_t place = word - block_column();
    return place >= 0 && place < TILE_N ? static_cast<short>(place) : -1;
}

// Where for_sums leaves the stages alone.
__device__ __forceinline__ unsigned char* beside_rows(unsigned char* stages) {
    return stages + kRowsBytes;
}

}  // namespace lsq
