// What follows the product for the gradient of a weight: scales, the straight-through mask, the gradient of the clip.
//
// The product is int32 sums (-DSUMS=1) or float32. N rows, K = COLUMNS columns; lsq/ops/weight_gradient.py is the
// reference.
#include "rows.cuh"

#ifndef SUMS
#define SUMS 1
#endif

namespace {

#if SUMS
using Value = int32_t;
#else
using Value = float;
#endif

}  // namespace

// product [P, K] or null for zeros; column_scale [K] for int32 sums -> dweight [N, K], clip_sums [N]: what each row
// adds to the gradient of its clip.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_project_weight_gradient(
    const ProjectWeightGradient op, In<Value> product, In<float> column_scale, Out<float> clip_sums) {
    const Value* values = product;
    const float *weights = op.weight.values, *limits = op.weight.clip;
#if SUMS
    const float *column_scales = column_scale, *input_scale = op.x.coded.scale;
#endif
    const int8_t* codes = op.weight.codes;
    const float* row_scales = op.weight.scale;
    float *to = op.dweight, *sums = clip_sums;
    // All threads of the block go on together, because rows may be shared by several warps.
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.weight_rows; first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.weight_rows;
        float sum = 0.0f;
        if (inside) {
            const float limit = limits[op.clips > 1 ? row : 0], step = row_scales[row];
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
                const int64_t element = row * COLUMNS + column_of(v);
                Value value[kVector] = {};
                float w[kVector], gradient[kVector];
                if (values) load8(values + element, value);
                int32_t code[kVector] = {};
                load8(weights + element, w);
                if (op.lsq) load8(codes + element, code);
#if SUMS
                float scale[kVector] = {};
                if (values) load8(column_scales + column_of(v), scale);
                const float input = input_scale[0], inverse = 1.0f / step;
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    gradient[i] = static_cast<float>(value[i]) * (scale[i] * input) * inverse;
                }
#else
#pragma unroll
                for (int i = 0; i < kVector; ++i) gradient[i] = value[i];
#endif
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    const bool outside = fabsf(w[i]) > limit;
                    if (op.lsq) {
                        const float decoded = static_cast<float>(code[i]) * step;
                        sum += outside ? 0.0f : gradient[i] * (decoded - w[i]) / limit;
                    }
                    sum += outside ? (w[i] > 0.0f ? gradient[i] : -gradient[i]) : 0.0f;
                    gradient[i] = outside ? 0.0f : gradient[i];
                }
                store8(to + element, gradient);
            }
        }
        sum = row_sum(sum);
        if (inside && threadIdx.x % LANES == 0) sums[row] = sum * op.clip_factor;
    }
}
LSQ_EXPORT(lsq_project_weight_gradient)
