// The end of every backward kernel that makes the gradient of a product: sums for its bias, then the gradient itself.
//
// -DROUNDED=1: rounded per row at random after multiplying by the weight's scales (backward="int8"); 0: as it is, Float.
#pragma once

#include "rounding.cuh"
#include "rows.cuh"

#ifndef ROUNDED
#define ROUNDED 0
#endif

namespace lsq {

// Where the gradient of a product [M, COLUMNS] goes: `floats`, or `rounded` if -DROUNDED.
struct GradientSink {
    Float* floats;
    int8_t* codes;
    float* row_scale;           // [M]
    const float* weight_scale;  // [COLUMNS]
    const int64_t* key;
    int64_t subsequence;
    float q;
    ColumnSums bias_sums = {};

    __device__ __forceinline__ GradientSink(Float* to, const RoundedGradient& rounded)
        : floats(to), codes(rounded.codes), row_scale(rounded.scale), weight_scale(rounded.weight_scale),
          key(rounded.key), subsequence(rounded.subsequence), q(rounded.largest) {}

    // `inside`: the row exists. Changes `gradient`. All threads of the block must call this.
    __device__ __forceinline__ void add(int64_t row, bool inside, Values& gradient) {
        if (inside) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (has(v)) bias_sums.add(v, gradient[v]);
            }
        }
        write(row, inside, gradient);
    }

    // The same without sums.
    __device__ __forceinline__ void write(int64_t row, bool inside, Values& gradient) const {
#if ROUNDED
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float scale[kVector];
            load8(weight_scale + column_of(v), scale);
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[v][i] *= scale[i];
        }
        const GradientScale s = gradient_scale(row_largest(gradient), q);
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
            random8(drawn_from, subsequence, element, words);
            int8_t rounded[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) rounded[i] = round_at_random(gradient[v][i] * s.reciprocal, words[i], q);
            store8(codes + element, rounded);
#else
            store8(floats + element, gradient[v]);
#endif
        }
    }
};

}  // namespace lsq
