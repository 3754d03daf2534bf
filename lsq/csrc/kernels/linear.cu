// What stands around the products of a linear layer: rounding of its sums, scales, and conversion of float operands.
//
// M rows, N columns, a multiple of 8. lsq/ops/linear.py holds the references.
#include "patch.cuh"
#include "rounding.cuh"
#include "reduce.cuh"

// sums int32 [M, N], x_scale [1], weight_scale [N], clip [1] -> codes [M, N], scale [1], clipped bits, error float32 or
// null.
LSQ_KERNEL __launch_bounds__(kPatchThreads) lsq_round_sums(
    In<int32_t> sums, In<float> x_scale, In<float> weight_scale, In<float> clip, Out<int8_t> codes, Out<float> scale,
    Out<uint8_t> clipped, Out<float> error, Out<uint32_t> ticket, int64_t rows, int64_t columns, float largest) {
    const int64_t row = patch_row(), column = patch_column();
    const Rounding rounding{codes, clipped, error};
    const int32_t* from = sums;
    const float limit = clip[0];
    bool missing = false;
    if (column < columns) {
        int32_t sum[kPatchRows][kVector] = {};
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r < rows) load8(from + ((row + r) * columns + column), sum[r]);
        }
        float alpha[kVector];
        load8(weight_scale + column, alpha);
        const float step = limit / largest, input = x_scale[0];
#pragma unroll
        for (int i = 0; i < kVector; ++i) alpha[i] = input * alpha[i] / step;
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r >= rows) continue;
            float scaled[kVector];
            uint32_t outside = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                scaled[i] = static_cast<float>(sum[r][i]) * alpha[i];
                outside |= static_cast<uint32_t>(fabsf(scaled[i]) > largest) << i;
            }
            missing |= rounding.write8((row + r) * columns + column, scaled, outside, largest);
        }
    }
    finish_scale<kPatchThreads>(ticket, missing, limit, largest, scale);
}
LSQ_EXPORT(lsq_round_sums)

// x_scale [1], weight_scale [N] -> scale [N] of the sums.
LSQ_KERNEL __launch_bounds__(256) lsq_sum_scale(
    In<float> x_scale, In<float> weight_scale, Out<float> scale, int64_t columns) {
    const int64_t column = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
    if (column < columns) scale[column] = x_scale[0] * weight_scale[column];
}
LSQ_EXPORT(lsq_sum_scale)

// A float operand of a product. -DFROM: 0 float32, 1 bfloat16, 2 float16, 3 codes.
#ifndef FROM
#define FROM 0
#endif

namespace {

template <int from>
struct Operand {
    using type = float;
};
template <>
struct Operand<1> {
    using type = bfloat16;
};
template <>
struct Operand<2> {
    using type = float16;
};
template <>
struct Operand<3> {
    using type = int8_t;
};
using Given = Operand<FROM>::type;

}  // namespace

// values [M, N] times scale [M], [1] or null -> out Float [M, N].
LSQ_KERNEL __launch_bounds__(kPatchThreads) lsq_float_operand(
    In<Given> values, In<float> scale, Out<Float> out, int64_t scales, int64_t rows, int64_t columns) {
    const int64_t row = patch_row(), column = patch_column();
    if (column >= columns) return;
    const Given* from = values;
    const float* factors = scale;
    Float* to = out;
#if FROM == 3
    int32_t x[kPatchRows][kVector];
#else
    float x[kPatchRows][kVector];
#endif
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r < rows) load8(from + ((row + r) * columns + column), x[r]);
    }
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r >= rows) continue;
        const float factor = factors ? factors[scales > 1 ? row + r : 0] : 1.0f;
        float y[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = static_cast<float>(x[r][i]) * factor;
        store8(to + ((row + r) * columns + column), y);
    }
}
LSQ_EXPORT(lsq_float_operand)

// out Float [numel] = 0: the product of nothing, or what a scatter begins with.
LSQ_KERNEL __launch_bounds__(256) lsq_zero(Out<Float> out, int64_t numel) {
    const float zeros[kVector] = {};
    const int64_t element = kVector * (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x);
    if (element + kVector <= numel) {
        store8(out + element, zeros);
    } else {
        for (int64_t i = element; i < numel; ++i) out[i] = narrow<Float>(0.0f);
    }
}
LSQ_EXPORT(lsq_zero)
