// Rounds to codes under a clip, and straight-through gradients, 16 values at a time by AVX-512.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LSQ_WIDE

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "../include/arithmetic.h"

// Of functions whose vectors must stay in registers.
#define LSQ_FORCED __attribute__((always_inline))

namespace lsq {

constexpr __mmask16 kAllLanes = 0xFFFF;

// Calls use(i, mask) for each 16 of n values.
template <class Use>
LSQ_FORCED inline void each_sixteen(int64_t n, const Use& use) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) use(i, kAllLanes);
    if (i < n) use(i, static_cast<__mmask16>((1u << (n - i)) - 1));
}

// Packed bits of up to 64 values, 16 at a time.
class WideBits {
public:
    void add(int64_t at, __mmask16 mask) { bits_ |= static_cast<uint64_t>(mask) << at; }

    // Makes one store, because other threads write nearby; none if `out` is null.
    LSQ_FORCED void store(uint8_t* out, int64_t first, int64_t count) {
        if (out && count == 64) std::memcpy(out + first / 8, &bits_, 8);
        if (out && count < 64) std::memcpy(out + first / 8, &bits_, (count + 7) / 8);
        bits_ = 0;
    }

private:
    uint64_t bits_ = 0;
};

// Calls use(i, i % 64, mask) for each 16 of n values, store(first, count) after each 64.
template <class Use, class Store>
LSQ_FORCED inline void each_sixty_four(int64_t n, const Use& use, const Store& store) {
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
        for (int64_t j = 0; j < 64; j += 16) use(i + j, j, kAllLanes);
        store(i, 64);
    }
    if (i == n) return;
    each_sixteen(n - i, [&](int64_t j, __mmask16 there) LSQ_FORCED { use(i + j, j, there); });
    store(i, n - i);
}

// A clip and its q-th part `scale`. x times the reciprocal, corrected by its remainder (Markstein
// 1990), is x / scale, unless its code is 0 in any case; division takes ten times as long.
struct WideClip {
    __m512 limit, least, divisor, reciprocal;

    static bool fits(float clip) { return clip > kSmallestClip && clip < infinity(); }

    WideClip(float clip, float scale)
        : limit(_mm512_set1_ps(clip)), least(_mm512_set1_ps(-clip)), divisor(_mm512_set1_ps(scale)),
          reciprocal(_mm512_set1_ps(1.0f / scale)) {}

    // Rounds x where `there` -> mask of clipped lanes. The code of NaN is 0; `largest` collects
    // magnitudes.
    __mmask16 round(__m512 x, __mmask16 there, int8_t* codes, __m512i& largest) const {
        const __m512 bounded = _mm512_min_ps(limit, _mm512_max_ps(least, x));  // NaN stays NaN
        const __m512 near = _mm512_mul_ps(bounded, reciprocal);
        const __m512 ratio =
            _mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor, bounded), reciprocal, near);
        // NaN: -2^31, whose last byte is 0.
        _mm512_mask_cvtepi32_storeu_epi8(codes, there, _mm512_cvtps_epi32(ratio));
        const __m512i magnitude =
            _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
        largest = _mm512_max_epu32(largest, magnitude);
        return _mm512_cmp_ps_mask(x, bounded, _CMP_NEQ_OQ);
    }
};

// Codes of n values and, unless null, bits of clipped ones -> the largest magnitude. read(i, mask)
// makes sixteen.
template <class Read>
Magnitude round_read(const Read& read, int64_t n, float clip, float scale, int8_t* codes,
                     uint8_t* clipped) {
    const WideClip wide(clip, scale);
    __m512i largest = _mm512_setzero_si512();
    WideBits outside;
    each_sixty_four(
        n,
        [&](int64_t i, int64_t at, __mmask16 there) {
            outside.add(at, wide.round(read(i, there), there, codes + i, largest));
        },
        [&](int64_t first, int64_t count) { outside.store(clipped, first, count); });
    return _mm512_reduce_max_epu32(largest);
}

inline Magnitude round_under_clip(const float* x, int64_t n, float clip, float scale, int8_t* codes,
                                  uint8_t* clipped) {
    return round_read(
        [=](int64_t i, __mmask16 there) { return _mm512_maskz_loadu_ps(there, x + i); }, n, clip,
        scale, codes, clipped);
}

// Bits [i, i + 16), i a multiple of 8, where `there`.
inline __mmask16 bits_at(const uint8_t* bits, int64_t i, __mmask16 there) {
    uint16_t sixteen = 0;
    std::memcpy(&sixteen, bits + i / 8, there >> 8 ? 2 : 1);
    return there & sixteen;
}

// Zeroes clipped gradients and adds them to `sum`, negative under negative codes.
inline __m512 cut_clipped(__m512 gradient, __mmask16 outside, __m128i codes, __m512& sum) {
    const __mmask16 above = _mm_cmpgt_epi8_mask(codes, _mm_setzero_si128());
    const __m512 given = _mm512_mask_xor_ps(gradient, static_cast<__mmask16>(~above), gradient,
                                            _mm512_set1_ps(-0.0f));
    sum = _mm512_mask_add_ps(sum, outside, sum, given);
    return _mm512_mask_mov_ps(gradient, outside, _mm512_setzero_ps());
}

// cut_clipped of gradient [n] in place, with packed bits -> the sum.
inline float cut_clipped(const uint8_t* clipped, const int8_t* codes, int64_t n, float* gradient) {
    __m512 sum = _mm512_setzero_ps();
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        const __m512 value = _mm512_maskz_loadu_ps(there, gradient + i);
        const __m128i sixteen = _mm_maskz_loadu_epi8(there, codes + i);
        _mm512_mask_storeu_ps(gradient + i, there,
                              cut_clipped(value, bits_at(clipped, i, there), sixteen, sum));
    });
    return _mm512_reduce_add_ps(sum);
}

}  // namespace lsq

#endif
