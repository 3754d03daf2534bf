// What gated feed-forward blocks read, 8 neighbouring values at a time; lsq/ops/gated.py is the
// reference.
//
// -DACTIVATION is the gate's Activation; -DCODED=1: gate and up are codes, 0: Float.
#pragma once

#include "rounding.cuh"

#include "activations.h"

#ifndef ACTIVATION
#define ACTIVATION 4
#endif
#ifndef CODED
#define CODED 1
#endif

namespace lsq {

constexpr Activation kActivation = static_cast<Activation>(ACTIVATION);

#if CODED
using GateValue = int8_t;
#else
using GateValue = Float;
#endif

// An operand with its pointers at hand.
struct GateOperand {
    const GateValue* values;
    float scale;

    __device__ __forceinline__ explicit GateOperand(const Rows& rows)
#if CODED
        : values(rows.coded.codes), scale(rows.coded.scale[0]){}
#else
        : values(rows.floats), scale(1.0f) {}
#endif

          __device__ __forceinline__ Packed<GateValue> load(int64_t element) const {
        return load_packed(values + element);
    }

    __device__ __forceinline__ void unpack(const Packed<GateValue>& packed,
                                           float (&x)[kVector]) const {
#if CODED
        int32_t code[kVector];
        unpack8(packed, code);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(code[i]) * scale;
#else
        unpack8(packed, x);
#endif
    }
};

}  // namespace lsq
