// What rounds to codes under a clip and undoes it, 16 values at a time, with masks of AVX-512 as they are.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LSQ_WIDE

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace lsq {

// Calls use(i, mask of the lanes that are there) for each 16 of n values.
template <class Use>
void each_sixteen(int64_t n, const Use& use) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) use(i, static_cast<__mmask16>(0xFFFF));
    if (i < n) use(i, static_cast<__mmask16>((1u << (n - i)) - 1));
}

// Codes of x [n] and, if wanted, bits of those outside, for a clip above 0 of which `scale` is the q-th part -> whether a
// value was NaN, whose code is 0. Instead of x / scale, which takes ten times as long, x times the reciprocal is set right
// by what it leaves (Markstein 1990): the same number, unless it is so small that its code is 0 in any case.
inline bool round_under_clip(const float* x, int64_t n, float clip, float scale, int8_t* codes, uint8_t* clipped) {
    const __m512 limit = _mm512_set1_ps(clip), least = _mm512_set1_ps(-clip), divisor = _mm512_set1_ps(scale);
    const __m512 reciprocal = _mm512_set1_ps(1.0f / scale);
    __mmask16 missing = 0;
    uint64_t bits = 0;
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        const __m512 value = _mm512_maskz_loadu_ps(there, x + i);
        const __m512 bounded = _mm512_min_ps(limit, _mm512_max_ps(least, value));  // NaN stays NaN
        const __m512 near = _mm512_mul_ps(bounded, reciprocal);
        const __m512 ratio = _mm512_fmadd_ps(_mm512_fnmadd_ps(near, divisor, bounded), reciprocal, near);
        _mm512_mask_cvtepi32_storeu_epi8(codes + i, there, _mm512_cvtps_epi32(ratio));  // NaN: -2^31, whose last byte is 0
        missing |= _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        bits |= static_cast<uint64_t>(_mm512_cmp_ps_mask(value, bounded, _CMP_NEQ_OQ)) << i % 64;
        if (i % 64 < 48 && i + 16 < n) return;
        // One store: what lies around is often written by other threads just then.
        if (clipped) std::memcpy(clipped + i / 64 * 8, &bits, (std::min<int64_t>(64, n - i / 64 * 64) + 7) / 8);
        bits = 0;
    });
    return missing != 0;
}

// Zeroes those of gradient [n] whose bits are set -> the sum of these, negative where the code is.
inline float cut_clipped(const uint8_t* clipped, const int8_t* codes, int64_t n, float* gradient) {
    const __m512 sign = _mm512_set1_ps(-0.0f);
    __m512 sum = _mm512_setzero_ps();
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        uint16_t bits = 0;
        std::memcpy(&bits, clipped + i / 8, there >> 8 ? 2 : 1);
        const __mmask16 outside = there & bits;
        const __m512 value = _mm512_maskz_loadu_ps(there, gradient + i);
        const __mmask16 above = _mm_cmpgt_epi8_mask(_mm_maskz_loadu_epi8(there, codes + i), _mm_setzero_si128());
        const __m512 given = _mm512_mask_xor_ps(value, static_cast<__mmask16>(~above), value, sign);
        sum = _mm512_mask_add_ps(sum, outside, sum, given);
        _mm512_mask_storeu_ps(gradient + i, outside, _mm512_setzero_ps());
    });
    return _mm512_reduce_add_ps(sum);
}

}  // namespace lsq

#endif
