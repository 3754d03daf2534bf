// Sixteen values at a time of a tensor that crosses the border of a program, in either dtype,
// beside what is done to them.
#pragma once

#include "floats.h"
#include "wide.h"

#if defined(LSQ_WIDE)

namespace lsq {

// Values from element i on, as float32; 0 where no lane is.
template <class T>
__m512 load_sixteen(const Border<T>& from, int64_t i, __mmask16 there) {
    if (!from.is_narrow()) return _mm512_maskz_loadu_ps(there, from.wide(i));
    const __m256i bits = _mm256_maskz_loadu_epi16(there, from.narrow(i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The bits of bfloat16 that narrow<bfloat16> has.
inline __m256i narrow_sixteen(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 missing = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(rounded, missing, _mm512_set1_epi32(0x7FC0)));
}

// x from element i on, where a lane is.
inline void store_sixteen(const Border<float>& to, int64_t i, __mmask16 there, __m512 x) {
    if (to.is_narrow()) {
        _mm256_mask_storeu_epi16(to.narrow(i), there, narrow_sixteen(x));
    } else {
        _mm512_mask_storeu_ps(to.wide(i), there, x);
    }
}

// The same past the caches where that can be, for what is not read again soon; other threads see it
// after finish_stream().
inline void store_past(const Border<float>& to, int64_t i, __mmask16 there, __m512 x) {
    float* place = to.is_narrow() ? nullptr : to.wide(i);
    if (place && there == kAllLanes && reinterpret_cast<uintptr_t>(place) % 64 == 0) {
        _mm512_stream_ps(place, x);
    } else {
        store_sixteen(to, i, there, x);
    }
}

}  // namespace lsq

#endif
