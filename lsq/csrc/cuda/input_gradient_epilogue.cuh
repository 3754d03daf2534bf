// Epilogue of the product for the gradient of an input: straight-through mask, dropout, activation
// slope, another gradient. lsq/ops/input_gradient.py is the reference.
//
// -DACTIVATION: the Activation, if its slope is computed from its input; -DACCUMULATED=1: another
// product has accumulated a gradient.
#pragma once

#include "rounding.cuh"

#include "activations.h"

#ifndef ACTIVATION
#define ACTIVATION 0
#endif

namespace lsq {

// Slope of the activation that made x.
struct ActivationSlope {
    Activation kind;
    const uint8_t* positive;
    const int8_t* slope;
    const Float* before;

    LSQ_INLINE explicit ActivationSlope(const Nonlinearity& end)
        : kind(end.activation), positive(end.positive), slope(end.slope), before(end.before) {}

    // Elements [element, element + 8) of the gradient.
    LSQ_INLINE void apply8(int64_t element, float (&gradient)[kVector]) const {
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

    LSQ_INLINE explicit InputGradientEnd(const ProjectInputGradient& op)
        : straight(op.x), dropout(op.nonlinearity.dropout), slope(op.nonlinearity), added(op.added)
#if ACCUMULATED
          ,
          accumulated(op.accumulated)
#endif
    {
    }

    // Elements [element, element + 8) of the scaled product -> gradient, in place. -> their part of
    // the clip's gradient
    LSQ_INLINE float apply8(int64_t element, float (&gradient)[kVector]) const {
#if ACCUMULATED
        add8(accumulated + element, gradient);
#endif
        const float clip = straight.apply8(element, gradient);
        dropout.apply8(element, gradient);
        slope.apply8(element, gradient);
        if (added) add8(added + element, gradient);
        return clip;
    }
};

}  // namespace lsq
