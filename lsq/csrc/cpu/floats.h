// The dtypes that gradients and activations have, one value at a time, in forms that the
// auto-vectoriser takes.
//
// bfloat16 widens exactly and is rounded to nearest even, NaN to NaN. The numbers of the dtypes are
// those of lsq/native/launch.py.
#pragma once

#include <type_traits>

#include "../include/arithmetic.h"

namespace lsq {

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

// The largest magnitude of x [n], where NaN counts as larger than infinity: magnitudes order like
// their bits.
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

// x [n] as bfloat16, and back.
inline void narrow_row(const float* x, int64_t n, bfloat16* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = narrow<bfloat16>(x[i]);
}

inline void widen_row(const bfloat16* x, int64_t n, float* out) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = widen(x[i]);
}

// A tensor that crosses the border of a program as float32 or bfloat16, by the number of its dtype.
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

// Elements [first, first + n) as float32, which may stand in `scratch`.
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

}  // namespace lsq
