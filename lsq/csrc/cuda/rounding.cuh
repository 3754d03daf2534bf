// Rounding to codes and its straight-through gradient; lsq/quant/arithmetic.py is the reference.
//
// -DSTARTED=1: scales are written before, and only a NaN changes them; 0: the last block writes
// them. Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8.
#pragma once

#include "random.cuh"
#include "reduce.cuh"

namespace lsq {

// Sink of rounded values; nothing if it has no codes.
struct CodeSink {
    int8_t* codes;
    uint8_t* clipped;  // may be null
    float* error;      // may be null: (code - x / scale) / Q, 0 where clipped
    float* scale;
    uint32_t* seen;  // may be null: the bits of the largest magnitude
    float q, limit, step;
    float reciprocal;  // of the step; 0: values must be divided by the step

    LSQ_INLINE explicit CodeSink(const Coded& coded)
        : codes(coded.codes), clipped(coded.clipped), error(coded.error), scale(coded.scale),
          seen(reinterpret_cast<uint32_t*>(static_cast<float*>(coded.seen))), q(coded.largest),
          limit(coded.clip ? *coded.clip : 0.0f), step(limit / q),
          reciprocal(limit > kSmallestClip && limit < infinity() && !error ? 1.0f / step : 0.0f) {}

    // Rounds x, elements [element, element + 8). -> the largest magnitude
    LSQ_INLINE Magnitude write8(int64_t element, const float (&x)[kVector]) const {
        if (!codes) return 0;
        return reciprocal != 0.0f ? multiply8(element, x) : divide8(element, x);
    }

    // x times the reciprocal, corrected by its remainder (Markstein 1990), is the quotient, unless
    // its code is 0 in any case.
    LSQ_INLINE Magnitude multiply8(int64_t element, const float (&x)[kVector]) const {
        uint32_t code[kVector], outside = 0;
        Magnitude largest = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float bounded = fminf(fmaxf(x[i], -limit), limit), near = bounded * reciprocal;
            code[i] = bits_of(fmaf(fmaf(-near, step, bounded), reciprocal, near) + kWhole);
            outside |= static_cast<uint32_t>(fabsf(x[i]) > limit) << i;
            largest = Largest::join(largest, magnitude_of(x[i]));
        }
        if (is_missing(largest)) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) code[i] = x[i] == x[i] ? code[i] : 0;
        }
        store8(codes + element, code);
        if (clipped) clipped[element / kVector] = static_cast<uint8_t>(outside);
        return largest;
    }

    LSQ_INLINE Magnitude divide8(int64_t element, const float (&x)[kVector]) const {
        float scaled[kVector];
        int8_t rounded[kVector];
        uint32_t outside = 0;
        Magnitude largest = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            scaled[i] = x[i] / step;
            outside |= static_cast<uint32_t>(fabsf(x[i]) > limit) << i;
            largest =
                Largest::join(largest, scaled[i] == scaled[i] ? magnitude_of(x[i]) : kMissing);
            rounded[i] = code_of(scaled[i], q);
        }
        store8(codes + element, rounded);
        if (clipped) clipped[element / kVector] = static_cast<uint8_t>(outside);
        if (error) {
            float difference[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                difference[i] =
                    outside >> i & 1 ? 0.0f : (static_cast<float>(rounded[i]) - scaled[i]) / q;
            }
            store8(error + element, difference);
        }
        return largest;
    }

    // All threads of all blocks must call this; see finish_scale. No rows have no codes, but a
    // scale.
    template <int THREADS>
    LSQ_INLINE void finish(uint32_t* ticket, Magnitude largest) const {
#if STARTED
        if (is_missing(largest)) scale[0] = not_a_number();
#else
        if (scale) finish_scale<THREADS>(ticket, is_missing(largest), limit, q, scale);
#endif
        if (!seen) return;
        const Magnitude of_block = group_reduce<Largest, THREADS, THREADS>(largest);
        if (threadIdx.x == 0) atomicMax(seen, of_block);
    }
};

// Zeroes the gradients of clipped values (straight-through). -> their part of the clip's gradient
struct StraightThrough {
    const int8_t* codes;
    const uint8_t* clipped;  // null: nothing was rounded
    const float* error;      // null: PACT

    LSQ_INLINE explicit StraightThrough(const Coded& coded)
        : codes(coded.codes), clipped(coded.clipped), error(coded.error) {}

    LSQ_INLINE float apply8(int64_t element, float (&gradient)[kVector]) const {
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
            const Packed<int8_t> packed = load_packed(codes + element);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                // No clipped code is 0.
                const uint32_t sign = packed.word[i / 4] << (24 - 8 * (i % 4)) & 0x80000000u;
                const bool masked = outside >> i & 1;
                sum += masked ? float_of(bits_of(gradient[i]) ^ sign) : 0.0f;
                gradient[i] = masked ? 0.0f : gradient[i];
            }
        }
        return sum;
    }
};

}  // namespace lsq
