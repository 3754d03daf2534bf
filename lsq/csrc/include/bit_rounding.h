// Rounding to codes of 1 to 8 bits, shared by CPU and GPU; lsq/ops/bit_product.py has the formulas.
#pragma once

#include "arithmetic.h"

namespace lsq {

constexpr int64_t kBitWord = 32;                     // codes in a word
constexpr int64_t kBitLines = 8, kBitTileWords = 4;  // lines and words of a tile

class BitCoder {
public:
    // start: where code 0 of unsigned codes begins; null for signed ones.
    LSQ_INLINE BitCoder(float step, const float* start, int64_t bits)
        : step_(step), start_(start ? *start : 0.0f), floors_(start != nullptr),
          high_(static_cast<float>(start       ? (1 << bits) - 1
                                   : bits == 1 ? 1
                                               : (1 << (bits - 1)) - 1)),
          low_(start || bits == 1 ? 0.0f : -high_) {}

    LSQ_INLINE int8_t operator()(float x) const {
        const float scaled = floors_ ? floorf((x - start_) / step_) : nearbyintf(x / step_);
        const float above = scaled < low_ ? low_ : scaled, bounded = above > high_ ? high_ : above;
        return static_cast<int8_t>(static_cast<int32_t>(bounded == bounded ? bounded : 0.0f));
    }

private:
    float step_, start_;
    bool floors_;
    float high_, low_;
};

}  // namespace lsq
