// Building blocks of the fused loops: everything is done a row at a time, on buffers that stay in
// the L1 cache.
//
// M rows, N columns. Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8, all
// floats are float32. The arithmetic (order of operations, division, rounding half to even) is that
// of lsq/quant/arithmetic.py, so codes agree. Compiled without floating-point contraction. Loops
// are written for the auto-vectoriser.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "bits.h"
#include "philox.h"
#include "random_rounding.h"
#include "structs.h"
#include "wide.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace lsq {

// Calls use(i, y) for each i < n, y being what dropout makes of x[i]: elements [first, first + n)
// of the tensor stand in x. Masks are drawn again wherever they are needed; `words` is scratch for
// n + 4 numbers.
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

// The same in place.
inline void apply(const Dropout& dropout, int64_t first, int64_t n, float* x, uint32_t* words) {
    if (dropout.threshold)
        dropped(dropout, first, n, x, words, [x](int64_t i, float y) { x[i] = y; });
}

// Rounds x [n] to the nearest codes; `largest`, its largest magnitude, becomes code q. Returns the
// scale.
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

// Rounds x [n], elements [first, first + n) of the tensor, under the clip, or as one row under its
// own largest magnitude; scratch: n bytes. Rows must start at a byte of `clipped`: N is a multiple
// of 8, or there is one row. Returns the largest magnitude; the code of NaN is 0.
inline Magnitude round_row(const Coded& coded, int64_t first, int64_t n, const float* x,
                           uint8_t* outside) {
    const float clip = coded.clip[0], q = coded.largest, scale = clip / q;
    int8_t* out = coded.codes + first;
    if (coded.by_row) {
        Magnitude most = 0;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < n; ++i) {
            const Magnitude found = magnitude_of(x[i]);
            most = found > most ? found : most;
        }
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
        const Magnitude found = ratio == ratio ? magnitude_of(x[i]) : kMissing;
        largest = found > largest ? found : largest;
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

// Writes the scale once all rows are rounded, and the largest magnitude; of no rows, too, whose
// codes have no address.
inline void finish(const Coded& coded, Magnitude largest) {
    if (coded.scale && !coded.by_row)
        coded.scale[0] = poisoned(coded.clip[0] / coded.largest, is_missing(largest));
    if (coded.seen) coded.seen[0] = float_of(std::max(magnitude_of(coded.seen[0]), largest));
}

// Straight-through: zeroes the gradients of clipped values and returns what they add to the clip's
// gradient.
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

// Rounds row `row` of the gradient of a product at random, scaled [n]: the gradient times the
// scales of its weight, of which the largest magnitude is given, NaN if one is NaN.
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

// Rounds row `row` of the gradient of a product at random, after multiplying by the scales of its
// weight: to `scaled`, which may be `gradient`.
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
