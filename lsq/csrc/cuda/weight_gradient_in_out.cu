// Gradient of a weight parameter [inputs, outputs] from another kernel's product: scales,
// straight-through mask, and clips, of which each column has one.
//
// The product is int32 sums (-DSUMS=1), such sums as floats (2), or float32 (0). K rows, N =
// COLUMNS columns; lsq/ops/weight_gradient.py is the reference.
#include "rows.cuh"

#ifndef SUMS
#define SUMS 1
#endif

namespace {

using Value = Select<SUMS == 1, int32_t, float>;

// Codes of outputs [column, column + 8) for one input; neighbours if transposed codes exist.
LSQ_INLINE void load_codes(const ProjectWeightGradient& op, int64_t row, int64_t column,
                           int32_t (&code)[kVector]) {
    const int8_t *codes = op.weight.codes, *transposed = op.weight.transposed;
    if (transposed) {
        load8(transposed + (row * COLUMNS + column), code);
        return;
    }
    uint64_t packed = 0;  // a loop that is unrolled would cost registers
#pragma unroll 1
    for (int i = 0; i < kVector; ++i) {
        const uint64_t byte = static_cast<uint8_t>(codes[(column + i) * op.columns + row]);
        packed = packed >> 8 | byte << 56;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) code[i] = static_cast<int8_t>(packed >> 8 * i);
}

}  // namespace

// product [K, N] or null for zeros; input_scale [K] of int32 sums -> dweight [K, N], parts of the
// clips' gradients: [blocks, N] of clips for columns, [blocks] of one clip.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_weight_gradient_in_out(const ProjectWeightGradient op, In<Value> product,
                               In<float> input_scale, Out<float> parts) {
    wait_for_launches();
    const Value* values = product;
    const float *weights = op.weight.values, *limits = op.weight.clip, *scales = op.weight.scale;
    const float factor = op.clip_factor;
    float *dweight = op.dweight, *part = parts;
#if SUMS
    const float *of_inputs = input_scale, shared = shared_scale(op.x.coded);
#endif
    ColumnSums sums;
    float sum = 0.0f;
    const int64_t step_of_rows = static_cast<int64_t>(kRows) * gridDim.x;
    for (int64_t row = static_cast<int64_t>(kRows) * blockIdx.x + row_in_block(); row < op.columns;
         row += step_of_rows) {
#if SUMS
        const float input = values ? of_inputs[row] * shared : 0.0f;
#endif
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            Value value[kVector] = {};
            float w[kVector] = {}, scale[kVector] = {};
            float limit[kVector], gradient[kVector], clip[kVector];
            if (values) load8(values + element, value);
            if (!op.weight.absmax) load8(weights + element, w);
            if (scales) load8(scales + column_of(v), scale);  // decoded values have none
            if (op.clips > 1) load8(limits + column_of(v), limit);
            int32_t code[kVector] = {};
            if (op.learned_step) load_codes(op, row, column_of(v), code);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
#if SUMS
                gradient[i] = static_cast<float>(value[i]) * input * (1.0f / scale[i]);
#else
                gradient[i] = value[i];
#endif
                const float largest = op.weight.absmax ? infinity()
                                      : op.clips > 1   ? limit[i]
                                                       : limits[0];
                const bool outside = fabsf(w[i]) > largest;
                clip[i] = outside ? (w[i] > 0.0f ? gradient[i] : -gradient[i]) : 0.0f;
                if (op.learned_step && !outside) {
                    const float decoded = static_cast<float>(code[i]) * scale[i];
                    clip[i] = gradient[i] * (decoded - w[i]) / largest;
                }
                clip[i] *= factor;
                gradient[i] = outside ? 0.0f : gradient[i];
            }
            if (op.clips > 1) {
                sums.add(v, clip);
            } else {
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum += clip[i];
            }
            store8(dweight + element, gradient);
        }
    }
    if (op.clips > 1) {
        sums.write(part + static_cast<int64_t>(blockIdx.x) * COLUMNS);
    } else {
        write_block_sum(sum, part + blockIdx.x);
    }
}
LSQ_EXPORT(lsq_weight_gradient_in_out)
