// The end of every backward kernel that has read a product: sums for bias and clip, then the product's gradient.
//
// -DROUNDED=1: rounded per row at random after multiplying by the weight's scale (backward="int8"); 0: as it is, Float.
#pragma once

#include "rounding.cuh"
#include "rows.cuh"

#ifndef ROUNDED
#define ROUNDED 0
#endif

namespace lsq {

#if ROUNDED
using GradientValue = int8_t;
#else
using GradientValue = Float;
#endif

// Where the gradient of a product [M, COLUMNS] goes.
struct GradientSink {
    GradientValue* out;
    float* row_scale;           // [M]
    const float* weight_scale;  // [COLUMNS], or null for 1
    const int64_t* key;
    int64_t stream;

    // `inside`: the row exists. Changes `gradient`. All threads of the block must call this.
    __device__ __forceinline__ void write(int64_t row, bool inside, Values& gradient) const {
#if ROUNDED
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v) || !weight_scale) continue;
            float scale[kVector];
            load8(weight_scale + column_of(v), scale);
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[v][i] *= scale[i];
        }
        const GradientScale s = gradient_scale(row_largest(gradient));
        if (!inside) return;
        if (threadIdx.x % LANES == 0) row_scale[row] = s.scale;
        const int64_t drawn_from = key[0];
#endif
        if (!inside) return;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
#if ROUNDED
            uint32_t words[kVector];
            random8(drawn_from, stream, element, words);
            int8_t codes[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) codes[i] = round_at_random(gradient[v][i] * s.reciprocal, words[i]);
            store8(out + element, codes);
#else
            store8(out + element, gradient[v]);
#endif
        }
    }
};

// Gradient of the values read from a product; `partial` gets the block's sums for the bias and for the clip.
struct ProductGradient {
    StraightThrough straight;
    GradientSink sink;
    ColumnSums bias_sums = {};
    float clip_sum = 0.0f;

    // Changes g. All threads of the block must call this.
    __device__ __forceinline__ void add(int64_t row, bool inside, Values& g) {
        if (inside) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
                bias_sums.add(v, g[v]);
                clip_sum += straight.apply8(row * COLUMNS + column_of(v), g[v]);
            }
        }
        sink.write(row, inside, g);
    }

    // Writes the block's sums: for the bias [COLUMNS], for the clip [1]. All threads of the block must call this.
    __device__ __forceinline__ void write_sums(float* bias, float* clip) const {
        bias_sums.write(bias);
        write_block_sum(clip_sum, clip);
    }
};

}  // namespace lsq
