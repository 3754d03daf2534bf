// Building blocks of the fused loops, a row at a time, on buffers in the L1 cache.
//
// M rows, N columns. Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8, floats
// are float32. The order of operations, division, and rounding half to even are those of
// lsq/quant/arithmetic.py, so that codes agree; compiled without floating-point contraction.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bits.h"
#include "floats.h"
#include "philox.h"
#include "random_rounding.h"
#include "structs.h"
#include "wide.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace lsq {

// Calls use(i, y) with y = dropout(x[i]) for each i < n; x has elements [first, first + n) of the
// tensor. Masks are drawn again where they are needed; `words`: scratch for n + 4 numbers.
template <class Use>
inline void dropped(const Dropout& dropout, int64_t first, int64_t n, const float* x,
                    uint32_t* words, const Use& use) {
    if (dropout.threshold == 0) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) use(i, x[i]);
        return;
    }
    const int64_t offset = first % 4;
    philox(dropout.key[0], dropout.subsequence, first - offset, n + offset, words);
    const uint32_t limit = static_cast<uint32_t>(dropout.threshold);
    const uint32_t* drawn = words + offset;
    const float keep = dropout.keep;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) use(i, drawn[i] >= limit ? x[i] * keep : 0.0f);
}

// Dropout of x [n] in place.
inline void apply(const Dropout& dropout, int64_t first, int64_t n, float* x, uint32_t* words) {
    if (dropout.threshold)
        dropped(dropout, first, n, x, words, [x](int64_t i, float y) { x[i] = y; });
}

// codes [n] * scale -> x.
inline void decode(const int8_t* codes, int64_t n, float scale, float* x) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(codes[i]) * scale;
}

// x [n] *= factor.
inline void multiply(float factor, int64_t n, float* x) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// to [n] += x.
inline void add_to(const float* x, int64_t n, float* to) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) to[i] += x[i];
}

// sums [n] * factor, plus bias unless that is null -> y.
template <class Sum>
void scale_sums(const Sum* sums, int64_t n, const float* factor, const float* bias, float* y) {
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(sums[i]) * factor[i] + bias[i];
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(sums[i]) * factor[i];
    }
}

// Rounds x [n] to the nearest codes; `largest`, its largest magnitude, becomes code q. -> the scale
inline float round_nearest(const float* x, int64_t n, Magnitude largest, float q, int8_t* codes) {
    const GradientScale s = gradient_scale(float_of(largest), q);
    if (s.reciprocal == 0.0f) {  // vanishing, or not finite
        std::memset(codes, 0, n);
        return s.scale;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) codes[i] = nearest_code(x[i] * s.reciprocal);
    return s.scale;
}

// Rounds x [n], elements [first, first + n), under the clip, or as one row under its largest
// magnitude; `outside`: scratch of n bytes. Rows must start at a byte of `clipped`: N is a multiple
// of 8, or there is one row. -> the largest magnitude; the code of NaN is 0
inline Magnitude round_row(const Coded& coded, int64_t first, int64_t n, const float* x,
                           uint8_t* outside) {
    const float clip = coded.clip[0], q = coded.largest, scale = clip / q;
    int8_t* out = coded.codes + first;
    if (coded.by_row) {
        const Magnitude most = bits_of(largest_magnitude(x, n));
        coded.scale[first / n] = round_nearest(x, n, most, q, out);
        return most;
    }
#if defined(LSQ_WIDE)
    if (WideClip::fits(clip) && !coded.error) {
        return round_under_clip(x, n, clip, scale, out,
                                coded.clipped ? coded.clipped + first / 8 : nullptr);
    }
#endif
    Magnitude largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const float ratio = x[i] / scale;
        outside[i] = std::fabs(x[i]) > clip;
        const Magnitude bits = ratio == ratio ? magnitude_of(x[i]) : kMissing;
        largest = bits > largest ? bits : largest;
        out[i] = code_of(ratio, q);
    }
    if (coded.clipped) pack_bits(outside, n, coded.clipped + first / 8);
    if (coded.error) {
        float* error = coded.error + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float off = (static_cast<float>(out[i]) - x[i] / scale) / q;
            error[i] = outside[i] ? 0.0f : off;
        }
    }
    return largest;
}

// Writes the scale and the largest magnitude once all rows are rounded; no rows have no codes.
inline void finish(const Coded& coded, Magnitude largest) {
    if (coded.scale && !coded.by_row)
        coded.scale[0] = poisoned(coded.clip[0] / coded.largest, is_missing(largest));
    if (coded.seen) coded.seen[0] = float_of(std::max(magnitude_of(coded.seen[0]), largest));
}

// Zeroes the gradients of clipped values (straight-through). -> their part of the clip's gradient
inline float straight_through(const Coded& coded, int64_t first, int64_t n, float* gradient) {
    if (!coded.clipped) return 0.0f;
    const int8_t* q = coded.codes + first;
    float sum = 0.0f;
    if (coded.error) {
        for (int64_t i = 0; i < n; ++i) sum += gradient[i] * coded.error[first + i];
    }
#if defined(LSQ_WIDE)
    if (first % 8 == 0) return sum + cut_clipped(coded.clipped + first / 8, q, n, gradient);
#endif
    each_bit(coded.clipped, first, n, [&](int64_t i) {
        sum += q[i] > 0 ? gradient[i] : -gradient[i];
        gradient[i] = 0.0f;
    });
    return sum;
}

// Rounds row `row` of the gradient of a product at random. scaled [n]: the gradient times the
// scales of its weight; largest: its largest magnitude, or NaN.
inline void round_scaled(const RoundedGradient& rounded, int64_t row, int64_t n,
                         const float* scaled, float largest) {
    const GradientScale s = gradient_scale(largest, rounded.largest);
    rounded.scale[row] = s.scale;
    int8_t* codes = rounded.codes + row * n;
    if (s.reciprocal == 0.0f) {  // vanishing, or not finite
        std::memset(codes, 0, n);
        return;
    }
    const uint32_t word = philox_word(rounded.key[0], rounded.subsequence, row);
    round_at_random(scaled, n, s.reciprocal, word, rounded.largest, codes);
}

// Multiplies row `row` by the scales of its weight, to `scaled` [n], perhaps `gradient`, and rounds
// it.
inline void round_row(const RoundedGradient& rounded, int64_t row, int64_t n, const float* gradient,
                      float* scaled) {
    const float* weight_scale = rounded.weight_scale;
    Magnitude largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const float x = gradient[i] * weight_scale[i];
        const Magnitude bits = magnitude_of(x);
        largest = bits > largest ? bits : largest;
        scaled[i] = x;
    }
    round_scaled(rounded, row, n, scaled, float_of(largest));
}

}  // namespace lsq
