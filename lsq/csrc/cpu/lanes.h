// Vectors of floats, as wide as the processor's registers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "../include/arithmetic.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace lsq {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t LaneWords __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint32_t LaneBits __attribute__((vector_size(4 * kLanes), may_alias));
typedef int16_t LaneShorts __attribute__((vector_size(4 * kLanes), may_alias));

inline Lanes all_lanes(float x) { return x - Lanes{}; }

// a * b + c, fused where the processor can: for sums in no prescribed order.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Sums of products of two neighbouring half-words.
inline LaneWords multiply_halves(LaneShorts a, LaneShorts b) {
#if defined(__AVX512F__)
    return (LaneWords)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (LaneWords)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (LaneWords)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const LaneWords first = (LaneWords)a << 16 >> 16, second = (LaneWords)b << 16 >> 16;
    return first * second + ((LaneWords)a >> 16) * ((LaneWords)b >> 16);
#endif
}

#if defined(__AVX2__)
// sum += the products of four unsigned bytes with four codes, in each lane (VNNI). By hand: with
// the intrinsic the compiler (GCC 12) copies every sum before and after it.
template <class Words, class Bytes, class Codes>
inline void add_products(Words& sum, Bytes bytes, Codes codes) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(bytes), "x"(codes));
#endif
}
#endif

inline Lanes& lanes_at(float* x) { return *reinterpret_cast<Lanes*>(x); }
inline const Lanes& lanes_at(const float* x) { return *reinterpret_cast<const Lanes*>(x); }

inline Lanes larger_lanes(Lanes a, Lanes b) { return a > b ? a : b; }  // b where one is NaN

// Largest lane of x; no NaN.
inline float largest_lane(Lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#else
    float largest = x[0];
    for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// Index of the first of n numbers that equals `value`, else n. Reads the last vector whole.
inline int64_t first_equal(const float* x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += kLanes) {
#if defined(__AVX512F__)
        const uint32_t equal = _mm512_cmp_ps_mask(lanes_at(x + i), all_lanes(value), _CMP_EQ_OQ);
#elif defined(__AVX2__)
        const uint32_t equal =
            _mm256_movemask_ps(_mm256_cmp_ps(lanes_at(x + i), all_lanes(value), _CMP_EQ_OQ));
#else
        uint32_t equal = 0;
        for (int j = 0; j < kLanes; ++j) equal |= static_cast<uint32_t>(x[i + j] == value) << j;
#endif
        if (equal) return std::min(i + __builtin_ctz(equal), n);
    }
    return n;
}

inline float sum_of_lanes(Lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps(x);
#else
    float sum = 0.0f;
    for (int i = 0; i < kLanes; ++i) sum += x[i];
    return sum;
#endif
}

#if defined(__AVX512F__)
inline __mmask16 first_bits(int64_t n) {
    return static_cast<__mmask16>((1u << (n < 0 ? 0 : n > 16 ? 16 : n)) - 1);
}
#endif

// The first n numbers of x, 0 in the rest; any n.
inline Lanes load_lanes(const float* x, int64_t n) {
#if defined(__AVX512F__)
    return _mm512_maskz_loadu_ps(first_bits(n), x);
#else
    Lanes lanes = {};
    if (n >= kLanes) {
        std::memcpy(&lanes, x, sizeof lanes);
    } else {
        for (int64_t i = 0; i < n; ++i) lanes[i] = x[i];
    }
    return lanes;
#endif
}

inline Lanes load_lanes(const int8_t* x, int64_t n) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first_bits(n), x)));
#else
    int32_t wide[kLanes] = {};
    for (int64_t i = 0; i < (n < kLanes ? n : kLanes); ++i) wide[i] = x[i];
    LaneWords words;
    std::memcpy(&words, wide, sizeof words);
    return __builtin_convertvector(words, Lanes);
#endif
}

// Stores the first n lanes; any n.
inline void store_lanes(float* x, Lanes lanes, int64_t n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(x, first_bits(n), lanes);
#else
    for (int64_t i = 0; i < (n < kLanes ? n : kLanes); ++i) x[i] = lanes[i];
#endif
}

// Interleaves the lower, or upper, halves of a and b.
inline Lanes lower_halves(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

inline Lanes upper_halves(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                   31);
#elif defined(__AVX2__)
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

// Transposes kLanes vectors: each pass rotates the bits of an element's index.
inline void transpose(Lanes* rows) {
    for (int64_t left = kLanes; left > 1; left /= 2) {
        Lanes next[kLanes];
        for (int i = 0; i < kLanes / 2; ++i) {
            next[2 * i] = lower_halves(rows[i], rows[i + kLanes / 2]);
            next[2 * i + 1] = upper_halves(rows[i], rows[i + kLanes / 2]);
        }
        for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
    }
}

// The first n lanes of x, `other` in the rest.
inline Lanes first_lanes(Lanes x, int64_t n, float other) {
    LaneWords lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane < static_cast<int32_t>(n) ? x : all_lanes(other);
}

// Calls body(i, seen) for each vector i .. i + kLanes - 1 of n numbers: seen(lanes, other) keeps
// the lanes below n and replaces the rest by `other`.
template <class Body>
inline void for_lanes(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, [](Lanes x, float) { return x; });
    if (i < n) body(i, [=](Lanes x, float other) { return first_lanes(x, n - i, other); });
}

// exp(x) for x <= 88, with a relative error up to 2e-7 + 2e-8 |x| (6e-8 |x| without FMA); 0 below
// -87, NaN for NaN. 2^k * 2^r with |r| <= 1/2.
inline Lanes bounded_exponential(Lanes x) {
    constexpr float kOctaves = 1.4426950408889634f;
    const Lanes bounded = larger_lanes(all_lanes(-87.0f), x);
    // 1.5 * 2^23: rounds half to even; then the exponent's bias.
    const Lanes magic = all_lanes(12582912.0f + 127.0f);
    const Lanes shifted = multiply_add(bounded, all_lanes(kOctaves), magic), k = shifted - magic;
    const Lanes r = multiply_add(bounded, all_lanes(kOctaves), -k);
    Lanes p = all_lanes(1.535336196e-4f);
    for (float next : {1.339887502e-3f, 9.618436918e-3f, 5.550332367e-2f, 2.402264774e-1f,
                       6.931471825e-1f, 1.0f}) {
        p = multiply_add(p, r, all_lanes(next));
    }
    const Lanes result = p * (Lanes)((LaneWords)shifted << 23);
    return x < -87.0f ? Lanes{} : result;
}

}  // namespace lsq
