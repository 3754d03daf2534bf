// Random numbers that depend on key, subsequence and element alone; see lsq/quant/random.py.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Words of elements [element, element + 8); `element` is a multiple of 4.
__device__ __forceinline__ void random8(int64_t key, int64_t subsequence, int64_t element, uint32_t (&words)[kVector]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const PhiloxWords group = philox_group(key, subsequence, element / 4 + half);
#pragma unroll
        for (int i = 0; i < 4; ++i) words[4 * half + i] = group.word[i];
    }
}

// The same for any element.
__device__ __forceinline__ void random8_unaligned(
    int64_t key, int64_t subsequence, int64_t element, uint32_t (&words)[kVector]) {
    const int offset = element % 4;
    uint32_t drawn[12];
#pragma unroll
    for (int part = 0; part < 3; ++part) {
        const PhiloxWords group = philox_group(key, subsequence, element / 4 + part);
#pragma unroll
        for (int i = 0; i < 4; ++i) drawn[4 * part + i] = group.word[i];
    }
    // An index that is known only at run time would send `drawn` to local memory.
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        words[i] = offset == 0 ? drawn[i] : offset == 1 ? drawn[i + 1] : offset == 2 ? drawn[i + 2] : drawn[i + 3];
    }
}

// A Dropout with its key at hand.
struct DropoutMask {
    const int64_t* key;
    int64_t subsequence, threshold;
    float keep;

    __device__ __forceinline__ explicit DropoutMask(const Dropout& dropout)
        : key(dropout.key), subsequence(dropout.subsequence), threshold(dropout.threshold), keep(dropout.keep) {}

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
