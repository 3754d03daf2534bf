// What follows the product for the gradient of an input: scales, the straight-through mask, dropout, the slope of the
// activation, another gradient, sums over rows, and rounding.
//
// The product is -DPRODUCT 0 int32 sums, 1 float32, 2 Float, which may lie where dx goes. M rows, K = COLUMNS columns.
// A row stays in registers, as do the sums; lsq/ops/input_gradient.py is the reference.
#include "gradient.cuh"

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

// The end of what made x, with its pointers at hand.
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
            for (int i = 0; i < kVector; ++i) gradient[i] *= gelu_slope(y[i]);
        }
    }
};

}  // namespace

// partial: the block's sums for the bias, and its part of the gradient of x's clip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_project_input_gradient(const ProjectInputGradient op, In<Value> product, Out<float> partial) {
    const Value* values = product;
    const float* row_scale = op.gradient.scale;
    const Float* added = op.added;
    const StraightThrough straight{op.x};
    const DropoutMask dropout{op.nonlinearity.dropout};
    const ActivationSlope slope{op.nonlinearity};
    GradientSink sink{op.dx, op.rounded};
    float clip_sum = 0.0f;
    const auto load = [&](int64_t row) {
        PackedRow<Value> packed;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) packed.part[v] = load_packed(values + row * COLUMNS + column_of(v));
        }
        return packed;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const PackedRow<Value>& packed) {
        Values g = {};
#if PRODUCT == 0
        const float scale = inside ? row_scale[row] : 0.0f;
#endif
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            Loaded value[kVector];
            unpack8(packed.part[v], value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
#if PRODUCT == 0
                g[v][i] = static_cast<float>(value[i]) * scale;
#else
                g[v][i] = value[i];
#endif
            }
            clip_sum += straight.apply8(element, g[v]);
            dropout.apply8(element, g[v]);
            slope.apply8(element, g[v]);
            if (added) {
                float other[kVector];
                load8(added + element, other);
#pragma unroll
                for (int i = 0; i < kVector; ++i) g[v][i] += other[i];
            }
        }
        sink.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    sink.bias_sums.write(sums);
    write_block_sum(clip_sum, sums + COLUMNS);
}
LSQ_EXPORT(lsq_project_input_gradient)
