// How gradients lie in messages: codes of 8 or 4 bits, a bfloat16 scale for each block of BLOCK values, zeros up to a
// multiple of 16 bytes; lsq/ops/gradient_layout.py says more.
#pragma once

#include "vectors.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif

namespace lsq {

static_assert(BLOCK % kVector == 0 && (BLOCK & (BLOCK - 1)) == 0, "blocks are whole vectors, a power of two of them");

// A shard of `length` values, a multiple of 32, in codes of WIDTH bits.
template <int WIDTH>
struct Shard {
    int64_t length;

    __device__ __forceinline__ int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }
    __device__ __forceinline__ int64_t code_bytes() const { return length / 8 * WIDTH; }
    __device__ __forceinline__ int64_t scale_place(int64_t number) const {
        return code_bytes() + static_cast<int64_t>(sizeof(bfloat16)) * number;
    }
    __device__ __forceinline__ int64_t scales_end() const { return scale_place(blocks()); }
    __device__ __forceinline__ int64_t bytes() const { return (scales_end() + 15) / 16 * 16; }
};

// Eight codes as they lie in memory.
template <int WIDTH>
struct Codes {
    uint32_t word[WIDTH / 4];

    __device__ __forceinline__ void load(const uint8_t* from) {
        if constexpr (WIDTH == 8) {
            const uint2 words = load_words<uint2>(from);
            word[0] = words.x, word[1] = words.y;
        } else {
            word[0] = load_words<uint32_t>(from);
        }
    }

    __device__ __forceinline__ void store(uint8_t* to) const {
        if constexpr (WIDTH == 8) {
            store_words(to, make_uint2(word[0], word[1]));
        } else {
            store_words(to, word[0]);
        }
    }

    __device__ __forceinline__ float value(int i) const {
        const uint32_t to_the_top = word[i * WIDTH / 32] << (32 - WIDTH - i * WIDTH % 32);
        return static_cast<float>(static_cast<int32_t>(to_the_top) >> (32 - WIDTH));
    }

    __device__ __forceinline__ void add(int i, int8_t code) {
        const uint32_t bits = static_cast<uint32_t>(code) & ((1u << WIDTH) - 1);
        word[i * WIDTH / 32] |= bits << (i * WIDTH % 32);
    }
};

}  // namespace lsq
