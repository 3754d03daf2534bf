// What follows the backward products of an integer product: scales, straight-through masks and the gradients of the
// clips.
//
// The products are -DPRODUCT 0 int32 sums, 1 float32, 2 Float, which may be where the result goes. Every block or row
// leaves its part of a clip's gradient; lsq_finish_sums (sums.cu) adds them in order. lsq/ops/linear_gradient.py has
// the formulas.
#include "patch.cuh"
#include "rounding.cuh"
#include "rows.cuh"

#ifndef PRODUCT
#define PRODUCT 0
#endif

namespace {

#if PRODUCT == 0
using Value = int32_t;
using Loaded = int32_t;
#elif PRODUCT == 1
using Value = float;
using Loaded = float;
#else
using Value = Float;
using Loaded = float;
#endif

}  // namespace

// product [M, N], row_scale [M] for int32 sums; codes, clipped bits and error of x [M, N] -> dx Float [M, N], partial
// [blocks].
LSQ_KERNEL __launch_bounds__(kPatchThreads) lsq_input_gradient(
    In<Value> product, In<float> row_scale, In<int8_t> codes, In<uint8_t> clipped, In<float> error, Out<Float> dx,
    Out<float> partial, int64_t rows, int64_t columns) {
    const int64_t row = patch_row(), column = patch_column();
    const StraightThrough straight{codes, clipped, error};
    const Value* from = product;
    const float* scales = row_scale;
    Float* to = dx;
    float clip_sum = 0.0f;
    if (column < columns) {
        Loaded value[kPatchRows][kVector] = {};
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r < rows) load8(from + ((row + r) * columns + column), value[r]);
        }
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r >= rows) continue;
            float gradient[kVector];
#if PRODUCT == 0
            const float scale = scales[row + r];
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[i] = static_cast<float>(value[r][i]) * scale;
#else
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[i] = value[r][i];
#endif
            const int64_t element = (row + r) * columns + column;
            clip_sum += straight.apply8(element, gradient);
            store8(to + element, gradient);
        }
    }
    write_block_sum<kPatchThreads>(clip_sum, partial + (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x));
}
LSQ_EXPORT(lsq_input_gradient)

// product [N, K = COLUMNS] or null for zeros; column_scale [K], x_scale [1] and weight_scale [N] for int32 sums; weight
// [N, K], clip [N] or [1] -> dweight [N, K], clip_sums [N]: what each row adds to the gradient of its clip, times
// `factor`.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_weight_gradient(
    In<Value> product, In<float> column_scale, In<float> x_scale, In<float> weight_scale, In<float> weight,
    In<float> clip, Out<float> dweight, Out<float> clip_sums, int64_t clips, int64_t in_range, int64_t rows,
    float largest, float factor) {
    const Value* sums = product;
    const float *weights = weight, *limits = clip, *column_scales = column_scale, *row_scales = weight_scale;
    float* to = dweight;
    // All threads of the block go on together, because rows may be shared by several warps.
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < rows; first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < rows;
        float sum = 0.0f;
        if (inside) {
            const float limit = limits[clips > 1 ? row : 0], step = limit / largest;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
                const int64_t element = row * COLUMNS + column_of(v);
                Loaded value[kVector] = {};
                float w[kVector], gradient[kVector];
                if (sums) load8(sums + element, value);
                load8(weights + element, w);
#if PRODUCT == 0
                float scale[kVector];
                load8(column_scales + column_of(v), scale);
                const float input = x_scale[0], divisor = row_scales[row];
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    gradient[i] = static_cast<float>(value[i]) * (scale[i] * input) / divisor;
                }
#else
#pragma unroll
                for (int i = 0; i < kVector; ++i) gradient[i] = value[i];
#endif
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    const float magnitude = fabsf(w[i]);
                    if (in_range) {
                        const float rounded = rintf(w[i] / step) * step;
                        sum += magnitude <= limit ? gradient[i] * (rounded - w[i]) / limit : 0.0f;
                    }
                    const bool outside = magnitude > limit;
                    sum += outside ? (w[i] > 0.0f ? gradient[i] : -gradient[i]) : 0.0f;
                    gradient[i] = outside ? 0.0f : gradient[i];
                }
                store8(to + element, gradient);
            }
        }
        sum = row_sum(sum);
        if (inside && threadIdx.x % LANES == 0) clip_sums[row] = sum * factor;
    }
}
LSQ_EXPORT(lsq_weight_gradient)
