// Gradient of a weight from another kernel's product: scales, then weight_gradient_epilogue.cuh.
//
// The product is int32 sums (-DSUMS=1), such sums as floats (2), or float32 (0). N rows, K =
// COLUMNS columns; lsq/ops/weight_gradient.py is the reference.
#include "rows.cuh"
#include "weight_gradient_epilogue.cuh"

#ifndef SUMS
#define SUMS 1
#endif

using Value = Select<SUMS == 1, int32_t, float>;

// product [P, K] or null for zeros; column_scale [K] of int32 sums -> dweight [N, K], clip_sums
// [N]: each row's part of its clip's gradient.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_project_weight_gradient(const ProjectWeightGradient op, In<Value> product,
                                In<float> column_scale, Out<float> clip_sums) {
    wait_for_launches();
    const Value* values = product;
    const WeightGradientEnd end{op};
#if SUMS
    const float *column_scales = column_scale, input = shared_scale(op.x.coded);
#endif
    float* sums = clip_sums;
    // All threads of the block go on together, because rows may be shared by several warps.
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.weight_rows;
         first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.weight_rows;
        float sum = 0.0f;
        if (inside) {
            const WeightRow of_row = end.row(row);
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
                const int64_t element = row * COLUMNS + column_of(v);
                Value value[kVector] = {};
                float gradient[kVector];
                if (values) load8(values + element, value);
#if SUMS
                float scale[kVector] = {};
                if (values) load8(column_scales + column_of(v), scale);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    gradient[i] =
                        static_cast<float>(value[i]) * (scale[i] * input) * of_row.inverse;
                }
#else
#pragma unroll
                for (int i = 0; i < kVector; ++i) gradient[i] = value[i];
#endif
                sum += end.write8(of_row, element, gradient);
            }
        }
        sum = row_sum(sum);
        if (inside && threadIdx.x % LANES == 0) sums[row] = sum * op.clip_factor;
    }
}
LSQ_EXPORT(lsq_project_weight_gradient)
