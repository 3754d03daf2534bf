// Random numbers that depend on key, subsequence and element alone; see lsq/quant/random.py.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Words of elements [element, element + 8); `element` is a multiple of 4.
LSQ_INLINE void random8(int64_t key, int64_t subsequence, int64_t element,
                        uint32_t (&words)[kVector]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const PhiloxWords group = philox_group(key, subsequence, element / 4 + half);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * half + i] = group.word[i];
    }
}

// round_finite_at_random (arithmetic.h) in the lowest byte; any code for NaN.
LSQ_INLINE uint32_t code_at_random(float scaled, uint32_t word, float q) {
    // The product with 2^-24 is exact, so that a fused multiply-add rounds like an addition. Bounds
    // are whole, and may come before rounding.
    const float sum =
        fmaf(static_cast<float>(static_cast<int32_t>(word >> 8)), 5.9604644775390625e-8f, scaled);
    return bits_of(__fadd_rd(fminf(fmaxf(sum, -q), q), kWhole));
}

// Codes of x * factor, rounded at random: eight columns of a row, the first with this word. Zeros
// under a factor of 0.
LSQ_INLINE uint2 round8_at_random(const float (&x)[kVector], float factor, uint32_t word, float q) {
    uint32_t code[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        code[i] = code_at_random(x[i] * factor, word + i * kWordStep, q);
    const uint32_t mask = factor == 0.0f ? 0 : ~0u,
                   low = low_bytes(code[0], code[1], code[2], code[3]);
    return make_uint2(low & mask, low_bytes(code[4], code[5], code[6], code[7]) & mask);
}

struct DropoutMask {
    const int64_t* key;
    int64_t subsequence, threshold;
    float keep;

    LSQ_INLINE explicit DropoutMask(const Dropout& dropout)
        : key(dropout.key), subsequence(dropout.subsequence), threshold(dropout.threshold),
          keep(dropout.keep) {}

    LSQ_INLINE float apply(float x, uint32_t word) const {
        return word >= static_cast<uint32_t>(threshold) ? x * keep : 0.0f;
    }

    // Elements [element, element + 8) of the tensor stand in x; `element` is a multiple of 4.
    LSQ_INLINE void apply8(int64_t element, float (&x)[kVector]) const {
        if (threshold == 0) return;
        uint32_t words[kVector];
        random8(key[0], subsequence, element, words);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = apply(x[i], words[i]);
    }
};

}  // namespace lsq
