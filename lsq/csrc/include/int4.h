// Groups of weights of 4 bits, shared by CPU and GPU; lsq/quant/formats.py has the formulas.
#pragma once

#include "arithmetic.h"

namespace lsq {

constexpr int64_t kInt4Group = 32;  // inputs that share a multiplier
constexpr int kTried = 4;           // multipliers

// A group as the format stores it.
struct Int4Group {
    int8_t multiplier;
    // Codes i in the lower half and i + kInt4Group / 2 in the upper half.
    uint8_t pairs[kInt4Group / 2];
};

// The code of x, in steps of the scale, from -8 to 7.
LSQ_INLINE float code_of_four_bits(float x, float multiplier) {
    const float rounded = nearbyintf(x / multiplier);
    return rounded < -8.0f ? -8.0f : rounded > 7.0f ? 7.0f : rounded;
}

// Squared error of x under a multiplier, in whole parts of a step, whose sums are exact.
LSQ_INLINE int32_t squared_parts(float x, float multiplier) {
    const float rest = (x - code_of_four_bits(x, multiplier) * multiplier) * 64.0f;
    const int32_t parts = static_cast<int32_t>(nearbyintf(rest));
    return parts * parts;
}

// Multiplier `less` steps below the one that gives the largest value of a group code -8, whose sign
// it has; low, high: least and largest value.
LSQ_INLINE float tried_multiplier(float low, float high, int less) {
    const float largest = -low > high ? -low : high, first = ceilf(largest / 8.0f);
    const float tried = (first < 1.0f ? 1.0f : first) - static_cast<float>(less);
    return (tried < 1.0f ? 1.0f : tried) * (-low > high ? 1.0f : -1.0f);
}

}  // namespace lsq
