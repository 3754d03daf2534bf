// Eight neighbouring values at a time: 16-byte accesses of two-byte floats, 8-byte accesses of
// codes.
//
// All pointers must be aligned to what is read at once, which holds for every row whose length is a
// multiple of 8. bfloat16 widens exactly and is rounded to nearest even, NaN to NaN.
#pragma once

#include "device.cuh"

namespace lsq {

constexpr int kVector = 8;  // values that a thread reads or writes at a time
// A number of less than 2^22 plus this, 1.5 * 2^23, stands in the last bits, whole as the sum was
// rounded.
constexpr float kWhole = 12582912.0f;

// The lowest bytes of four words, that of the first one lowest.
__device__ __forceinline__ uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <class Word>
__device__ __forceinline__ Word load_words(const void* from) {
#ifdef LSQ_EMULATOR
    return emulator_load<Word>(from);
#else
    return *static_cast<const Word*>(from);
#endif
}

template <class Word>
__device__ __forceinline__ void store_words(void* to, const Word& words) {
#ifdef LSQ_EMULATOR
    emulator_store(to, words);
#else
    *static_cast<Word*>(to) = words;
#endif
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bfloat16 x) {
    return float_of(static_cast<uint32_t>(x.bits) << 16);
}

template <class T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float x) {
#ifdef LSQ_EMULATOR
    return {emulator_float_to_bfloat16(x)};
#else
    bfloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
#endif
}

// What a later operation reads of x once it has been stored as Float.
template <class T>
__device__ __forceinline__ float as_stored(float x) {
    return widen(narrow<T>(x));
}

// Eight values as they lie in memory: what a thread holds of loads that are still under way.
template <class T>
struct Packed {
    uint32_t word[sizeof(T) * kVector / 4];
};

template <class T>
__device__ __forceinline__ Packed<T> load_packed(const T* from) {
    Packed<T> packed;
    if constexpr (sizeof(T) == 1) {
        const uint2 words = load_words<uint2>(from);
        packed.word[0] = words.x, packed.word[1] = words.y;
    } else {
#pragma unroll
        for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
            const uint4 words = load_words<uint4>(from + i * 16 / sizeof(T));
            packed.word[4 * i] = words.x, packed.word[4 * i + 1] = words.y;
            packed.word[4 * i + 2] = words.z, packed.word[4 * i + 3] = words.w;
        }
    }
    return packed;
}

__device__ __forceinline__ void unpack8(const Packed<float>& packed, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = float_of(packed.word[i]);
}

__device__ __forceinline__ void unpack8(const Packed<bfloat16>& packed, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        x[i] = widen(bfloat16{static_cast<uint16_t>(packed.word[i / 2] >> (16 * (i % 2)))});
    }
}

__device__ __forceinline__ void unpack8(const Packed<int32_t>& packed, int32_t (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<int32_t>(packed.word[i]);
}

__device__ __forceinline__ void unpack8(const Packed<int8_t>& packed, int32_t (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        x[i] = static_cast<int8_t>(packed.word[i / 4] >> (8 * (i % 4)));
}

template <class T, class Value>
__device__ __forceinline__ void load8(const T* from, Value (&x)[kVector]) {
    unpack8(load_packed(from), x);
}

__device__ __forceinline__ void pack8(const float (&x)[kVector], Packed<float>& packed) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) packed.word[i] = bits_of(x[i]);
}

__device__ __forceinline__ void pack8(const float (&x)[kVector], Packed<bfloat16>& packed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t high = narrow<bfloat16>(x[2 * i + 1]).bits;
        packed.word[i] = narrow<bfloat16>(x[2 * i]).bits | high << 16;
    }
}

// Eight floats of any size.
template <class T>
__device__ __forceinline__ void store_packed(T* to, const Packed<T>& packed) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
        const uint32_t* word = packed.word + 4 * i;
        store_words(to + i * 16 / sizeof(T), make_uint4(word[0], word[1], word[2], word[3]));
    }
}

template <class T>
__device__ __forceinline__ void store8(T* to, const float (&x)[kVector]) {
    Packed<T> packed;
    pack8(x, packed);
    store_packed(to, packed);
}

// Eight codes, in the lowest bytes of words.
__device__ __forceinline__ void store8(int8_t* to, const uint32_t (&code)[kVector]) {
    const uint32_t low = low_bytes(code[0], code[1], code[2], code[3]);
    store_words(to, make_uint2(low, low_bytes(code[4], code[5], code[6], code[7])));
}

__device__ __forceinline__ void store8(int8_t* to, const int8_t (&code)[kVector]) {
    uint32_t words[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) words[i] = static_cast<uint32_t>(code[i]);
    store8(to, words);
}

}  // namespace lsq
