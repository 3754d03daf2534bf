// The epilogue of the product for the gradient of an input, 8 neighbouring columns of a row at a
// time: the straight-through mask, dropout, the slope of the activation, another gradient.
// lsq/ops/input_gradient.py is the reference.
//
// -DACTIVATION is an Activation where its slope is made of what stands before it; -DACCUMULATED=1:
// another product has accumulated a gradient.
#pragma once

#include "rounding.cuh"

#include "activations.h"

#ifndef ACTIVATION
#define ACTIVATION 0
#endif
#ifndef ACCUMULATED
#define ACCUMULATED 0
#endif

namespace lsq {

// The epilogue of what made x, with its pointers at hand.
struct ActivationSlope {
    Activation kind;
    const uint8_t* positive;
    const int8_t* slope;
    const Float* before;

    __device__ __forceinline__ explicit ActivationSlope(const Nonlinearity& end)
        : kind(end.activation), positive(end.positive), slope(end.slope), before(end.before) {}

    // Elements [element, element + 8) of the gradient.
    __device__ __forceinline__ void apply8(int64_t element, float (&gradient)[kVector]) const {
        if (kind == Activation::relu) {
            const uint32_t eight = positive[element / kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[i] = eight >> i & 1 ? gradient[i] : 0.0f;
        } else if (slope) {
            int32_t steps[kVector];
            load8(slope + element, steps);
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[i] *= slope_of(steps[i]);
        } else if (before) {
            float y[kVector];
            load8(before + element, y);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                gradient[i] *= activation_slope<static_cast<Activation>(ACTIVATION)>(y[i]);
        }
    }
};

struct InputGradientEnd {
    const StraightThrough straight;
    const DropoutMask dropout;
    const ActivationSlope slope;
    const Float* added;
#if ACCUMULATED
    const Float* accumulated;
#endif

    __device__ __forceinline__ explicit InputGradientEnd(const ProjectInputGradient& op)
        : straight(op.x), dropout(op.nonlinearity.dropout), slope(op.nonlinearity), added(op.added)
#if ACCUMULATED
          , accumulated(op.accumulated)
#endif
    {
    }

    // Elements [element, element + 8) of the product with its scales -> of the gradient, in place.
    // -> what they add to the gradient of x's clip
    __device__ __forceinline__ float apply8(int64_t element, float (&gradient)[kVector]) const {
#if ACCUMULATED
        float more[kVector];
        load8(accumulated + element, more);
#pragma unroll
        for (int i = 0; i < kVector; ++i) gradient[i] += more[i];
#endif
        const float clip = straight.apply8(element, gradient);
        dropout.apply8(element, gradient);
        slope.apply8(element, gradient);
        if (added) {
            float other[kVector];
            load8(added + element, other);
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[i] += other[i];
        }
        return clip;
    }
};

}  // namespace lsq
