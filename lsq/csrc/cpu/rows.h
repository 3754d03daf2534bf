// Building blocks of the fused loops: everything is done a row at a time, on buffers that stay in the L1 cache.
//
// M rows, N columns. Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8, all floats are float32.
// The arithmetic (order of operations, division, rounding half to even) is that of lsq/ops/rounding.py, so codes agree.
// Compiled without floating-point contraction. Loops are written for the auto-vectoriser.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "philox.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace lsq {

enum Kind { kInt8 = 0, kInt32 = 1, kFloat = 2 };

// A product as the next operation reads it: int8 with scale [1], int32 with scale [N], or float32.
struct Product {
    const void* values;
    int64_t kind;
    const float* scale;

    void read(int64_t row, int64_t n, float* out) const {
        if (kind == kInt8) {
            const int8_t* codes = static_cast<const int8_t*>(values) + row * n;
            const float s = scale[0];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(codes[i]) * s;
        } else if (kind == kInt32) {
            const int32_t* sums = static_cast<const int32_t*>(values) + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(sums[i]) * scale[i];
        } else {
            std::memcpy(out, static_cast<const float*>(values) + row * n, n * sizeof(float));
        }
    }
};

// Dropout with masks that are drawn again wherever they are needed.
struct Dropout {
    const int64_t* key;
    int64_t stream;
    int64_t threshold;  // 0: no dropout
    float keep;         // 1 / (1 - probability)

    // Elements [first, first + n) of the tensor stand in x; `words` is scratch for n + 4 numbers.
    void apply(int64_t first, int64_t n, float* x, uint32_t* words) const {
        if (threshold == 0) return;
        const int64_t offset = first % 4;
        philox(key[0], stream, first - offset, n + offset, words);
        const uint32_t limit = static_cast<uint32_t>(threshold);
        const uint32_t* drawn = words + offset;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = drawn[i] >= limit ? x[i] * keep : 0.0f;
    }
};

inline void pack_bits(const uint8_t* flags, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + i, 8);
        out[i / 8] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
    }
    if (i < n) {
        uint8_t last = 0;
        for (int64_t j = i; j < n; ++j) last |= static_cast<uint8_t>(flags[j] << (j - i));
        out[i / 8] = last;
    }
}

// Where rounded values go. Rows must start at a byte of `clipped`: N is a multiple of 8, or there is one row.
struct Rounding {
    int8_t* codes;
    uint8_t* clipped;  // may be null
    float* error;      // may be null: (code - x / scale) / Q, 0 where clipped

    // `scaled` is x / scale, `outside` marks |x| > clip.
    // Returns whether a value was NaN; its code is 0.
    bool write(int64_t first, int64_t n, const float* scaled, const uint8_t* outside, float q) const {
        int8_t* out = codes + first;
        int missing = 0;
#pragma omp simd reduction(| : missing)
        for (int64_t i = 0; i < n; ++i) {
            const float x = scaled[i];
            missing |= x != x;
            out[i] = code_of(x, q);
        }
        if (clipped) pack_bits(outside, n, clipped + first / 8);
        if (error) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                error[first + i] = outside[i] ? 0.0f : (static_cast<float>(out[i]) - scaled[i]) / q;
            }
        }
        return missing != 0;
    }

    // Round float values under `clip`; scratch: n floats, n bytes.
    bool round(int64_t first, int64_t n, const float* x, float clip, float q, float* scaled, uint8_t* outside) const {
        const float scale = clip / q;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) scaled[i] = x[i] / scale;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) outside[i] = std::fabs(x[i]) > clip;
        return write(first, n, scaled, outside, q);
    }
};

// Straight-through: zero the gradients of clipped values and return their contribution to the clip's gradient.
struct StraightThrough {
    const int8_t* codes;
    const uint8_t* clipped;  // null: nothing was rounded
    const float* error;      // null: PACT

    float apply(int64_t first, int64_t n, float* gradient) const {
        if (!clipped) return 0.0f;
        const int8_t* q = codes + first;
        float sum = 0.0f;
        if (error) {
            for (int64_t i = 0; i < n; ++i) sum += gradient[i] * error[first + i];
        }
        for (int64_t i = 0; i < n; i += 8) {
            const uint8_t byte = clipped[(first + i) / 8];
            if (!byte) continue;
            for (int64_t j = i; j < std::min(i + 8, n); ++j) {
                if (byte >> (j - i) & 1) {
                    sum += q[j] > 0 ? gradient[j] : -gradient[j];
                    gradient[j] = 0.0f;
                }
            }
        }
        return sum;
    }
};

// Largest |x|, where NaN counts as larger than infinity: magnitudes order like their bits.
inline float largest_magnitude(const float* x, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return float_of(largest);
}

// Where the gradient of a product goes: as it is, or rounded per row at random after multiplying by the weight's scale.
struct GradientSink {
    void* out;                  // float [M, N], or int8 codes [M, N]
    float* row_scale;           // null: float
    const float* weight_scale;  // [N]
    const int64_t* key;
    int64_t stream;

    // Scratch: n + 4 words. Changes `gradient`.
    void write(int64_t row, int64_t n, float* gradient, uint32_t* words) const {
        if (!row_scale) {
            std::memcpy(static_cast<float*>(out) + row * n, gradient, n * sizeof(float));
            return;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= weight_scale[i];
        const GradientScale s = gradient_scale(largest_magnitude(gradient, n));
        row_scale[row] = s.scale;
        const int64_t offset = row * n % 4;
        philox(key[0], stream, row * n - offset, n + offset, words);
        int8_t* codes = static_cast<int8_t*>(out) + row * n;
        const uint32_t* drawn = words + offset;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) codes[i] = round_at_random(gradient[i] * s.reciprocal, drawn[i]);
    }
};

}  // namespace lsq
