// Random numbers that depend on key, subsequence and element alone; see lsq/quant/random.py.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Words of elements [element, element + 8); `element` is a multiple of 4.
__device__ __forceinline__ void random8(int64_t key, int64_t subsequence, int64_t element,
                                        uint32_t (&words)[kVector]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const PhiloxWords group = philox_group(key, subsequence, element / 4 + half);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * half + i] = group.word[i];
    }
}

// What round_finite_at_random (arithmetic.h) makes of a number, in the lowest byte; any code for
// NaN.
__device__ __forceinline__ uint32_t code_at_random(float scaled, uint32_t word, float q) {
    // A fused multiply-add rounds as an addition does: the product with 2^-24 is exact. Bounds are
    // whole: before rounding they are as good as after it.
    const float sum =
        fmaf(static_cast<float>(static_cast<int32_t>(word >> 8)), 5.9604644775390625e-8f, scaled);
    return bits_of(__fadd_rd(fminf(fmaxf(sum, -q), q), kWhole));
}

// The codes of x times a factor, rounded at random: eight columns of a row, the first of which has
// this word. Zeros under a factor of 0, as it is where something is not finite.
__device__ __forceinline__ uint2 round8_at_random(const float (&x)[kVector], float factor,
                                                  uint32_t word, float q) {
    uint32_t code[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        code[i] = code_at_random(x[i] * factor, word + i * kWordStep, q);
    const uint32_t mask = factor == 0.0f ? 0 : ~0u,
                   low = low_bytes(code[0], code[1], code[2], code[3]);
    return make_uint2(low & mask, low_bytes(code[4], code[5], code[6], code[7]) & mask);
}

// A Dropout with its key at hand.
struct DropoutMask {
    const int64_t* key;
    int64_t subsequence, threshold;
    float keep;

    __device__ __forceinline__ explicit DropoutMask(const Dropout& dropout)
        : key(dropout.key), subsequence(dropout.subsequence), threshold(dropout.threshold),
          keep(dropout.keep) {}

    __device__ __forceinline__ float apply(float x, uint32_t word) const {
        return word >= static_cast<uint32_t>(threshold) ? x * keep : 0.0f;
    }

    // Elements [element, element + 8) of the tensor stand in x; `element` is a multiple of 4.
    __device__ __forceinline__ void apply8(int64_t element, float (&x)[kVector]) const {
        if (threshold == 0) return;
        uint32_t words[kVector];
        random8(key[0], subsequence, element, words);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = apply(x[i], words[i]);
    }
};

}  // namespace lsq
