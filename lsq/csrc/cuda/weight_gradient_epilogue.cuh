// Epilogue of the product for the gradient of a weight, 8 neighbouring columns at a time:
// straight-through mask and clips. lsq/ops/weight_gradient.py is the reference.
#pragma once

#include "vectors.cuh"

namespace lsq {

struct WeightRow {
    float limit, step, inverse;  // its clip, its scale, and 1 / scale
};

struct WeightGradientEnd {
    const float *weights, *limits, *scales;
    const int8_t* codes;  // null: PACT
    float* dweight;
    bool limit_of_row, clips;

    LSQ_INLINE explicit WeightGradientEnd(const ProjectWeightGradient& op)
        : weights(op.weight.values), limits(op.weight.clip), scales(op.weight.scale),
          codes(op.learned_step ? static_cast<const int8_t*>(op.weight.codes) : nullptr),
          dweight(op.dweight), limit_of_row(op.clips > 1), clips(!op.weight.absmax) {}

    LSQ_INLINE WeightRow row(int64_t row) const {
        const float step = scales ? scales[row] : 1.0f;  // decoded values have none
        return {clips ? limits[limit_of_row ? row : 0] : infinity(), step, 1.0f / step};
    }

    // Writes the gradient of elements [element, element + 8) of one row. -> their part of the
    // clip's gradient
    LSQ_INLINE float write8(const WeightRow& row, int64_t element,
                            float (&gradient)[kVector]) const {
        float w[kVector] = {}, sum = 0.0f;
        int32_t code[kVector] = {};
        if (clips) load8(weights + element, w);
        if (codes) load8(codes + element, code);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const bool outside = fabsf(w[i]) > row.limit;
            if (codes) {
                const float decoded = static_cast<float>(code[i]) * row.step;
                sum += outside ? 0.0f : gradient[i] * (decoded - w[i]) / row.limit;
            }
            sum += outside ? (w[i] > 0.0f ? gradient[i] : -gradient[i]) : 0.0f;
            gradient[i] = outside ? 0.0f : gradient[i];
        }
        store8(dweight + element, gradient);
        return sum;
    }
};

}  // namespace lsq
