// float32 and bfloat16, in forms that the auto-vectoriser takes, and stores past the caches.
//
// bfloat16 widens exactly and is rounded to nearest even, NaN to NaN. Numbers of dtypes are those
// of lsq/native/launch.py.
#pragma once

#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../include/arithmetic.h"
#include "wide.h"

namespace lsq {

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// Largest magnitude of x [n]; NaN counts as larger than infinity: magnitudes order like their bits.
inline float largest_magnitude(const float* x, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return float_of(largest);
}

inline float largest_magnitude(const bfloat16* x, int64_t n) {
    uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = x[i].bits & 0x7FFFu;
        largest = bits > largest ? bits : largest;
    }
    return widen(bfloat16{largest});
}

template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    const uint32_t bits = bits_of(x), rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    return {static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

inline void narrow_row(const float* x, int64_t n, bfloat16* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = narrow<bfloat16>(x[i]);
}

inline void widen_row(const bfloat16* x, int64_t n, float* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]);
}

// A tensor at the border of a program, float32 or bfloat16.
template <class T>
class Border {
public:
    Border(T* data, int64_t dtype) : data_(data), is_narrow_(dtype != 0) {}

    bool is_narrow() const { return data_ && is_narrow_; }
    bool is_wide() const { return data_ && !is_narrow_; }
    T* wide(int64_t first) const { return data_ + first; }
    auto* narrow(int64_t first) const {
        using Bits = std::conditional_t<std::is_const_v<T>, const bfloat16, bfloat16>;
        return reinterpret_cast<Bits*>(data_) + first;
    }

private:
    T* data_;
    bool is_narrow_;
};

// Elements [first, first + n) as float32, perhaps in `scratch`.
inline const float* read(const Border<const float>& from, int64_t first, int64_t n,
                         float* scratch) {
    if (!from.is_narrow()) return from.wide(first);
    widen_row(from.narrow(first), n, scratch);
    return scratch;
}

// Calls body with a null pointer of the dtype with that number.
template <class Body>
void for_dtype(int64_t number, const Body& body) {
    if (number == 0) {
        body(static_cast<float*>(nullptr));
    } else {
        body(static_cast<bfloat16*>(nullptr));
    }
}

// Stores of x [n] past the caches, for what is not read again soon: a store into a cache reads the
// line first. Other threads see it after finish_stream().
inline void stream(const float* x, int64_t n, float* out) {
#if defined(__AVX512F__)
    if (n % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
        for (int64_t i = 0; i < n; i += 16) _mm512_stream_ps(out + i, _mm512_loadu_ps(x + i));
        return;
    }
#elif defined(__AVX2__)
    if (n % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0) {
        for (int64_t i = 0; i < n; i += 8) _mm256_stream_ps(out + i, _mm256_loadu_ps(x + i));
        return;
    }
#endif
    std::memcpy(out, x, n * sizeof(float));
}

inline void finish_stream() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

#if defined(LSQ_WIDE)
// 16 values from element i on as float32; 0 outside the mask.
template <class T>
__m512 load_sixteen(const Border<T>& from, int64_t i, __mmask16 there) {
    if (!from.is_narrow()) return _mm512_maskz_loadu_ps(there, from.wide(i));
    const __m256i bits = _mm256_maskz_loadu_epi16(there, from.narrow(i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// narrow<bfloat16> of 16 values.
inline __m256i narrow_sixteen(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 missing = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(rounded, missing, _mm512_set1_epi32(0x7FC0)));
}

inline void store_sixteen(const Border<float>& to, int64_t i, __mmask16 there, __m512 x) {
    if (to.is_narrow()) {
        _mm256_mask_storeu_epi16(to.narrow(i), there, narrow_sixteen(x));
    } else {
        _mm512_mask_storeu_ps(to.wide(i), there, x);
    }
}

// store_sixteen past the caches if the address allows it.
inline void store_past(const Border<float>& to, int64_t i, __mmask16 there, __m512 x) {
    float* address = to.is_narrow() ? nullptr : to.wide(i);
    if (address && there == kAllLanes && reinterpret_cast<uintptr_t>(address) % 64 == 0) {
        _mm512_stream_ps(address, x);
    } else {
        store_sixteen(to, i, there, x);
    }
}

#endif

}  // namespace lsq
