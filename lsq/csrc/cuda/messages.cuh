// How gradients lie in messages: int8 codes, a bfloat16 scale for each block of BLOCK values, zeros
// up to a multiple of 16 bytes; lsq/ops/gradient_layout.py says more.
#pragma once

#include "vectors.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif

namespace lsq {

static_assert(BLOCK % kVector == 0 && (BLOCK & (BLOCK - 1)) == 0,
              "blocks are whole vectors, a power of two of them");

// A shard of `length` values, a multiple of 32.
struct Shard {
    int64_t length;

    __device__ __forceinline__ int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }
    __device__ __forceinline__ int64_t scale_offset(int64_t number) const {
        return length + static_cast<int64_t>(sizeof(bfloat16)) * number;
    }
    __device__ __forceinline__ int64_t scales_end() const { return scale_offset(blocks()); }
    __device__ __forceinline__ int64_t bytes() const { return (scales_end() + 15) / 16 * 16; }
};

// Eight codes as they lie in memory.
struct Codes {
    uint32_t word[2];

    __device__ __forceinline__ void load(const uint8_t* from) {
        const uint2 words = load_words<uint2>(from);
        word[0] = words.x, word[1] = words.y;
    }
    __device__ __forceinline__ void store(uint8_t* to) const {
        store_words(to, make_uint2(word[0], word[1]));
    }
    __device__ __forceinline__ float value(int i) const {
        return static_cast<float>(static_cast<int8_t>(word[i / 4] >> (8 * (i % 4))));
    }
    __device__ __forceinline__ void add(int i, int8_t code) {
        word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(code)) << (8 * (i % 4));
    }
};

}  // namespace lsq
