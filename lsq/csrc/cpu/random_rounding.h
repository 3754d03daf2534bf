// Rounding at random with one word for a row, to which each column adds kWordStep; see
// lsq/quant/random.py.
#pragma once

#include "../include/arithmetic.h"
#include "wide.h"

namespace lsq {

#if defined(LSQ_WIDE)

// Rounds a row 16 columns at a time to codes within q; `word` belongs to the first column.
class SixteenAtRandom {
public:
    SixteenAtRandom(uint32_t word, float q) : most_(_mm512_set1_ps(q)), least_(_mm512_set1_ps(-q)) {
        const __m512i lanes =
            _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i steps =
            _mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(kWordStep)));
        word_ = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int32_t>(word)), steps);
    }

    // The codes, int32, of the next 16 values in units of their scale. Not NaN.
    __m512i next(__m512 scaled) {
        const __m512 uniform = _mm512_cvtepi32_ps(_mm512_srli_epi32(word_, 8));
        word_ = _mm512_add_epi32(word_, _mm512_set1_epi32(static_cast<int32_t>(16 * kWordStep)));
        // The product is exact, so that a fused multiply-add rounds like an addition; 2^-24.
        const __m512 sum = _mm512_fmadd_ps(uniform, _mm512_set1_ps(5.9604644775390625e-8f), scaled);
        // q is whole: bounds may come before rounding.
        const __m512 bounded = _mm512_min_ps(most_, _mm512_max_ps(least_, sum));
        return _mm512_cvt_roundps_epi32(bounded, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    }

private:
    __m512 most_, least_;
    __m512i word_;
};

#endif

// x [n] * factor, finite -> codes within q; `word` belongs to the first.
inline void round_at_random(const float* x, int64_t n, float factor, uint32_t word, float q,
                            int8_t* codes) {
#if defined(LSQ_WIDE)
    SixteenAtRandom rounding(word, q);
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        const __m512 scaled =
            _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + i), _mm512_set1_ps(factor));
        _mm512_mask_cvtepi32_storeu_epi8(codes + i, there, rounding.next(scaled));
    });
#else
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        codes[i] = round_finite_at_random(x[i] * factor, word, q);
        word += kWordStep;
    }
#endif
}

}  // namespace lsq
