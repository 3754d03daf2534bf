// The end of a product with a weight: scale, bias, activation, dropout, rounding. M rows, P columns, a multiple of 8;
// lsq/ops/project.py is the reference.
//
// -DSUMS=1: the product is int32 sums; 0: floats, which stand where their result goes. -DACTIVATION=0 none, 1 ReLU, 2 GELU.
#include "patch.cuh"
#include "rounding.cuh"

#ifndef SUMS
#define SUMS 1
#endif
#ifndef ACTIVATION
#define ACTIVATION 0
#endif

namespace {

#if SUMS
using Given = int32_t;
#else
using Given = Float;
#endif
constexpr Activation kActivation = static_cast<Activation>(ACTIVATION);

// y -> activation(y), in place, and what the backward pass wants to know of elements [element, element + 8).
__device__ __forceinline__ void activate8(const Nonlinearity& end, int64_t element, float (&y)[kVector]) {
    if (end.before) store8(static_cast<Float*>(end.before) + element, y);
    if (kActivation == Activation::relu && end.positive) {
        uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < kVector; ++i) bits |= static_cast<uint32_t>(y[i] > 0.0f) << i;
        static_cast<uint8_t*>(end.positive)[element / kVector] = static_cast<uint8_t>(bits);
    }
    if (kActivation == Activation::gelu && end.slope) {
        int8_t slope[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) slope[i] = slope_code(gelu_slope(y[i]));
        store8(static_cast<int8_t*>(end.slope) + element, slope);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (kActivation == Activation::relu) y[i] = relu(y[i]);
        if (kActivation == Activation::gelu) y[i] = gelu(y[i]);
    }
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kPatchThreads) lsq_end(const Project op, In<int32_t> sums, Out<uint32_t> ticket) {
    const int64_t row = patch_row(), column = patch_column(), columns = op.columns;
    const CodeSink codes{op.rounded};
    const DropoutMask dropout{op.nonlinearity.dropout};
    const float* bias = op.bias;
    Float* out = op.out;
#if SUMS
    const Given* product = sums;
#else
    const Given* product = out;
#endif
    bool missing = false;
    if (column < columns) {
        Packed<Given> loaded[kPatchRows] = {};
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r < op.rows) loaded[r] = load_packed(product + ((row + r) * columns + column));
        }
        float added[kVector] = {};
        if (bias) load8(bias + column, added);
#if SUMS
        float factor[kVector];
        load8(op.weight.scale + column, factor);
        const float scale = op.x.coded.scale[0];
#pragma unroll
        for (int i = 0; i < kVector; ++i) factor[i] *= scale;
#endif
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r >= op.rows) continue;
            const int64_t element = (row + r) * columns + column;
            float y[kVector];
#if SUMS
            int32_t sum[kVector];
            unpack8(loaded[r], sum);
#pragma unroll
            for (int i = 0; i < kVector; ++i) y[i] = static_cast<float>(sum[i]) * factor[i];
#else
            unpack8(loaded[r], y);
#endif
#pragma unroll
            for (int i = 0; i < kVector; ++i) y[i] += added[i];
            activate8(op.nonlinearity, element, y);
            dropout.apply8(element, y);
            if (out) store8(out + element, y);
            missing |= codes.write8(element, y);
        }
    }
    codes.finish<kPatchThreads>(ticket, missing);
}
LSQ_EXPORT(lsq_end)
