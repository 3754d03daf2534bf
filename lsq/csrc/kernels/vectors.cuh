// Eight neighbouring values at a time: 16-byte accesses of two-byte floats, 8-byte accesses of codes.
//
// All pointers must be aligned to what is read at once, which holds for every row whose length is a multiple of 8.
// Half-precision floats widen exactly and round to nearest even, NaN to NaN.
#pragma once

#include "device.cuh"

namespace lsq {

constexpr int kVector = 8;  // values that a thread reads or writes at a time

template <class Word>
__device__ __forceinline__ Word load_words(const void* from) {
#ifdef LSQ_EMULATOR
    emulator_check_alignment(from, sizeof(Word));
#endif
    return *static_cast<const Word*>(from);
}

template <class Word>
__device__ __forceinline__ void store_words(void* to, const Word& words) {
#ifdef LSQ_EMULATOR
    emulator_check_alignment(to, sizeof(Word));
#endif
    *static_cast<Word*>(to) = words;
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float widen(float16 x) {
#ifdef LSQ_EMULATOR
    return emulator_half_to_float(x.bits);
#else
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
#endif
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
template <>
__device__ __forceinline__ float16 narrow<float16>(float x) {
#ifdef LSQ_EMULATOR
    return {emulator_float_to_half(x)};
#else
    float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
#endif
}

// What a later operation reads of x once it has been stored as Float.
template <class T>
__device__ __forceinline__ float as_stored(float x) {
    return widen(narrow<T>(x));
}

__device__ __forceinline__ void load8(const float* from, float (&x)[kVector]) {
    const float4 a = load_words<float4>(from), b = load_words<float4>(from + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

template <class Half>
__device__ __forceinline__ void load8_halves(const Half* from, float (&x)[kVector]) {
    const uint4 words = load_words<uint4>(from);
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = widen(Half{static_cast<uint16_t>(pairs[i])});
        x[2 * i + 1] = widen(Half{static_cast<uint16_t>(pairs[i] >> 16)});
    }
}
__device__ __forceinline__ void load8(const bfloat16* from, float (&x)[kVector]) { load8_halves(from, x); }
__device__ __forceinline__ void load8(const float16* from, float (&x)[kVector]) { load8_halves(from, x); }

__device__ __forceinline__ void load8(const int32_t* from, int32_t (&x)[kVector]) {
    const int4 a = load_words<int4>(from), b = load_words<int4>(from + 4);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ __forceinline__ void load8(const int8_t* from, int32_t (&x)[kVector]) {
    const uint2 words = load_words<uint2>(from);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<int8_t>((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
}

__device__ __forceinline__ void store8(float* to, const float (&x)[kVector]) {
    store_words(to, make_float4(x[0], x[1], x[2], x[3]));
    store_words(to + 4, make_float4(x[4], x[5], x[6], x[7]));
}

template <class Half>
__device__ __forceinline__ void store8_halves(Half* to, const float (&x)[kVector]) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = narrow<Half>(x[2 * i]).bits | static_cast<uint32_t>(narrow<Half>(x[2 * i + 1]).bits) << 16;
    }
    store_words(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
}
__device__ __forceinline__ void store8(bfloat16* to, const float (&x)[kVector]) { store8_halves(to, x); }
__device__ __forceinline__ void store8(float16* to, const float (&x)[kVector]) { store8_halves(to, x); }

__device__ __forceinline__ void store8(int8_t* to, const int8_t (&codes)[kVector]) {
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        words[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(codes[i])) << (8 * (i % 4));
    }
    store_words(to, make_uint2(words[0], words[1]));
}

}  // namespace lsq
