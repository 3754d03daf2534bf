// Rounding to codes and its straight-through gradient; lsq/ops/rounding.py is the reference.
//
// Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8. M rows, N columns.
#pragma once

#include "random.cuh"
#include "reduce.cuh"

namespace lsq {

// Where rounded values go.
struct Rounding {
    int8_t* codes;
    uint8_t* clipped;  // may be null
    float* error;      // may be null: (code - x / scale) / Q, 0 where clipped

    // Elements [element, element + 8): `scaled` is x / scale, bit i of `outside` says |x[i]| > clip. Returns whether a
    // value was NaN.
    __device__ __forceinline__ bool write8(
        int64_t element, const float (&scaled)[kVector], uint32_t outside, float q) const {
        int8_t rounded[kVector];
        bool missing = false;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            missing |= scaled[i] != scaled[i];
            rounded[i] = code_of(scaled[i], q);
        }
        store8(codes + element, rounded);
        if (clipped) clipped[element / kVector] = static_cast<uint8_t>(outside);
        if (error) {
            float difference[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                difference[i] = outside >> i & 1 ? 0.0f : (static_cast<float>(rounded[i]) - scaled[i]) / q;
            }
            store8(error + element, difference);
        }
        return missing;
    }

    // Rounds float values under `clip`.
    __device__ __forceinline__ bool round8(int64_t element, const float (&x)[kVector], float clip, float q) const {
        const float scale = clip / q;
        float scaled[kVector];
        uint32_t outside = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            scaled[i] = x[i] / scale;
            outside |= static_cast<uint32_t>(fabsf(x[i]) > clip) << i;
        }
        return write8(element, scaled, outside, q);
    }
};

// Where the values of a result go: as codes where there is a clip, as they are, or both.
struct ResultSink {
    Float* out;  // may be null
    Rounding rounding;
    const float* clip;  // null: no codes
    float largest;

    // Elements [element, element + 8). -> whether one that was to be rounded was NaN
    __device__ __forceinline__ bool write8(int64_t element, const float (&x)[kVector]) const {
        if (out) store8(out + element, x);
        return clip ? rounding.round8(element, x, clip[0], largest) : false;
    }

    // All threads of all blocks must call this; see finish_scale.
    template <int THREADS>
    __device__ __forceinline__ void finish(uint32_t* ticket, bool missing, float* scale) const {
        if (clip) finish_scale<THREADS>(ticket, missing, clip[0], largest, scale);
    }
};

// Straight-through: zeroes the gradients of clipped values; returns what they add to the gradient of the clip.
struct StraightThrough {
    const int8_t* codes;
    const uint8_t* clipped;  // null: nothing was rounded
    const float* error;      // null: PACT

    __device__ __forceinline__ float apply8(int64_t element, float (&gradient)[kVector]) const {
        if (!clipped) return 0.0f;
        float sum = 0.0f;
        if (error) {
            float difference[kVector];
            load8(error + element, difference);
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum += gradient[i] * difference[i];
        }
        const uint32_t outside = clipped[element / kVector];
        if (outside) {
            int32_t q[kVector];
            load8(codes + element, q);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                const bool masked = outside >> i & 1;
                sum += masked ? (q[i] > 0 ? gradient[i] : -gradient[i]) : 0.0f;
                gradient[i] = masked ? 0.0f : gradient[i];
            }
        }
        return sum;
    }
};

}  // namespace lsq
