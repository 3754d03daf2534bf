// Epilogue of a product, 8 neighbouring columns at a time: scale, bias, activation, dropout,
// rounding.
//
// -DACTIVATION is an Activation. P columns, a multiple of 8; lsq/ops/project.py is the reference.
#pragma once

#include "rounding.cuh"

#include "activations.h"

#ifndef ACTIVATION
#define ACTIVATION 0
#endif

namespace lsq {

constexpr Activation kActivation = static_cast<Activation>(ACTIVATION);

// What multiplies a row of a product of floats; of codes, besides their row_scale.
LSQ_INLINE float row_factor(const Project& op, int64_t row) {
    return op.row_factor ? op.row_factor[row] : 1.0f;
}

// Factors of sums of columns [column, column + 8), without row_scale; of a Project or a
// SparseProject.
template <class Operation>
LSQ_INLINE void factor8(const Operation& op, int64_t column, float (&factor)[kVector]) {
    load8(op.weight.scale + column, factor);
    const float scale = shared_scale(op.x.coded);
#pragma unroll
    for (int i = 0; i < kVector; ++i) factor[i] *= scale;
}

// Sums of a row as floats, by factor8 and the row's scale.
template <class Sum>
LSQ_INLINE void scale_sums8(const Sum (&sum)[kVector], const float (&factor)[kVector], float of_row,
                            float (&y)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = static_cast<float>(sum[i]) * (factor[i] * of_row);
}

struct ProjectEnd {
    const Nonlinearity& nonlinearity;
    const CodeSink codes;
    const DropoutMask dropout;
    const float* bias;
    Float* out;

    template <class Operation>
    LSQ_INLINE explicit ProjectEnd(const Operation& op) : ProjectEnd(op, op.bias) {}

    template <class Operation>
    LSQ_INLINE ProjectEnd(const Operation& op, const float* bias)
        : nonlinearity(op.nonlinearity), codes(op.rounded), dropout(op.nonlinearity.dropout),
          bias(bias), out(op.out) {}

    // The bias of columns [column, column + 8), zeros where there is none.
    LSQ_INLINE void bias8(int64_t column, float (&added)[kVector]) const {
#pragma unroll
        for (int i = 0; i < kVector; ++i) added[i] = 0.0f;
        if (bias) load8(bias + column, added);
    }

    // y -> activation(y), in place, with signs or slopes of elements [element, element + 8) for the
    // backward pass.
    LSQ_INLINE void activate8(int64_t element, float (&y)[kVector]) const {
        if (nonlinearity.before) store8(static_cast<Float*>(nonlinearity.before) + element, y);
        if (kActivation == Activation::relu && nonlinearity.positive) {
            uint32_t bits = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i) bits |= static_cast<uint32_t>(y[i] > 0.0f) << i;
            static_cast<uint8_t*>(nonlinearity.positive)[element / kVector] =
                static_cast<uint8_t>(bits);
        }
        if (kActivation != Activation::none && kActivation != Activation::relu &&
            nonlinearity.slope) {
            int8_t slope[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                slope[i] = slope_code(activation_slope<kActivation>(y[i]));
            store8(static_cast<int8_t*>(nonlinearity.slope) + element, slope);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = activated<kActivation>(y[i]);
    }

    // Applies the epilogue to elements [element, element + 8). -> the largest magnitude
    LSQ_INLINE Magnitude write8(int64_t element, const float (&added)[kVector],
                                float (&y)[kVector]) const {
        add8(added, y);
        activate8(element, y);
        dropout.apply8(element, y);
        if (out) store8(out + element, y);
        return codes.write8(element, y);
    }
};

}  // namespace lsq
