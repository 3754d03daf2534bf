// Eight neighbouring values at a time: 16-byte accesses of two-byte floats, 8-byte accesses of
// codes.
//
// Pointers must be aligned to what is read at once, as in rows whose length is a multiple of 8.
// bfloat16 widens exactly and is rounded to nearest even, NaN to NaN.
#pragma once

#include "device.cuh"

namespace lsq {

constexpr int kVector = 8;  // values that a thread reads or writes at a time
// 1.5 * 2^23: the last bits of a number below 2^22 plus this are the rounded number.
constexpr float kWhole = 12582912.0f;

// The lowest bytes of four words, that of the first one lowest.
LSQ_INLINE uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <int THREADS>
LSQ_INLINE int64_t thread_of_grid() {
    return static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
}

template <class Word>
LSQ_INLINE Word load_words(const void* from) {
#ifdef LSQ_EMULATOR
    return emulator_load<Word>(from);
#else
    return *static_cast<const Word*>(from);
#endif
}

template <class Word>
LSQ_INLINE void store_words(void* to, const Word& words) {
#ifdef LSQ_EMULATOR
    emulator_store(to, words);
#else
    *static_cast<Word*>(to) = words;
#endif
}

LSQ_INLINE float widen(float x) { return x; }
LSQ_INLINE float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

template <class T>
LSQ_INLINE T narrow(float x);
template <>
LSQ_INLINE float narrow<float>(float x) {
    return x;
}
template <>
LSQ_INLINE bfloat16 narrow<bfloat16>(float x) {
#ifdef LSQ_EMULATOR
    return {emulator_float_to_bfloat16(x)};
#else
    bfloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
#endif
}

// x as later operations read it, stored as T.
template <class T>
LSQ_INLINE float as_stored(float x) {
    return widen(narrow<T>(x));
}

// Eight values as they lie in memory, while loads are under way.
template <class T>
struct Packed {
    uint32_t word[sizeof(T) * kVector / 4];
};

template <class T>
LSQ_INLINE Packed<T> load_packed(const T* from) {
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

LSQ_INLINE void unpack8(const Packed<float>& packed, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = float_of(packed.word[i]);
}

LSQ_INLINE void unpack8(const Packed<bfloat16>& packed, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        x[i] = widen(bfloat16{static_cast<uint16_t>(packed.word[i / 2] >> (16 * (i % 2)))});
    }
}

LSQ_INLINE void unpack8(const Packed<int32_t>& packed, int32_t (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<int32_t>(packed.word[i]);
}

LSQ_INLINE void unpack8(const Packed<int8_t>& packed, int32_t (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        x[i] = static_cast<int8_t>(packed.word[i / 4] >> (8 * (i % 4)));
}

template <class T, class Value>
LSQ_INLINE void load8(const T* from, Value (&x)[kVector]) {
    unpack8(load_packed(from), x);
}

LSQ_INLINE void add8(const float (&y)[kVector], float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += y[i];
}

template <class T>
LSQ_INLINE void add8(const T* from, float (&x)[kVector]) {
    float y[kVector];
    load8(from, y);
    add8(y, x);
}

// values * factor -> x.
template <class Value>
LSQ_INLINE void scale8(const Value (&values)[kVector], float factor, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(values[i]) * factor;
}

LSQ_INLINE void pack8(const float (&x)[kVector], Packed<float>& packed) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) packed.word[i] = bits_of(x[i]);
}

LSQ_INLINE void pack8(const float (&x)[kVector], Packed<bfloat16>& packed) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t high = narrow<bfloat16>(x[2 * i + 1]).bits;
        packed.word[i] = narrow<bfloat16>(x[2 * i]).bits | high << 16;
    }
}

template <class T>
LSQ_INLINE void store_packed(T* to, const Packed<T>& packed) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) {
        const uint32_t* word = packed.word + 4 * i;
        store_words(to + i * 16 / sizeof(T), make_uint4(word[0], word[1], word[2], word[3]));
    }
}

template <class T>
LSQ_INLINE void store8(T* to, const float (&x)[kVector]) {
    Packed<T> packed;
    pack8(x, packed);
    store_packed(to, packed);
}

// Eight codes, in the lowest bytes of words.
LSQ_INLINE void store8(int8_t* to, const uint32_t (&code)[kVector]) {
    const uint32_t low = low_bytes(code[0], code[1], code[2], code[3]);
    store_words(to, make_uint2(low, low_bytes(code[4], code[5], code[6], code[7])));
}

LSQ_INLINE void store8(int8_t* to, const int8_t (&code)[kVector]) {
    uint32_t words[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) words[i] = static_cast<uint32_t>(code[i]);
    store8(to, words);
}

// The nearest codes of x * reciprocal, zeros under a reciprocal of 0.
LSQ_INLINE void store_nearest8(int8_t* to, const float (&x)[kVector], float reciprocal) {
    int8_t code[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        code[i] = reciprocal == 0.0f ? static_cast<int8_t>(0) : nearest_code(x[i] * reciprocal);
    }
    store8(to, code);
}

}  // namespace lsq
