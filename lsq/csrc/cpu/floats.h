// The dtypes that gradients and activations have, one value at a time, in forms that the auto-vectoriser takes.
//
// Half-precision floats widen exactly and round to nearest even, NaN to NaN. The numbers of the dtypes are those of
// lsq/csrc/launch.py.
#pragma once

#include "../arithmetic.h"

namespace lsq {

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float widen(float16 x) {
    const uint32_t magnitude = (x.bits & 0x7FFFu) << 13, sign = (x.bits & 0x8000u) << 16;
    const uint32_t normal = magnitude + (magnitude < 0x0F800000u ? 0x38000000u : 0x70000000u);  // else infinity or NaN
    const float small = float_of(magnitude + 0x38800000u) - 6.103515625e-5f;                    // below 2^-14
    return float_of((magnitude < 0x00800000u ? bits_of(small) : normal) | sign);
}

// The largest magnitude of x [n], where NaN counts as larger than infinity: magnitudes order like their bits.
template <class Half>
float largest_magnitude(const Half* x, int64_t n) {
    uint16_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const uint16_t bits = x[i].bits & 0x7FFFu;
        largest = bits > largest ? bits : largest;
    }
    return widen(Half{largest});
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
template <>
inline float16 narrow<float16>(float x) {
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = (magnitude + 0xFFFu + (magnitude >> 13 & 1) - 0x38000000u) >> 13;
    const uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;  // below 2^-14: a multiple of 2^-24
    uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude < 0x477FF000u ? half : 0x7C00u;  // 65520 and more become infinity
    half = magnitude > 0x7F800000u ? 0x7E00u : half;
    return {static_cast<uint16_t>(half | sign)};
}

// Calls body with a null pointer of the dtype with that number.
template <class Body>
void for_dtype(int64_t number, const Body& body) {
    if (number == 0) {
        body(static_cast<float*>(nullptr));
    } else if (number == 1) {
        body(static_cast<bfloat16*>(nullptr));
    } else {
        body(static_cast<float16*>(nullptr));
    }
}

}  // namespace lsq
