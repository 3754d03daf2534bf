// Float operands of products, and sums of the parts of long ones.
//
// M rows, N columns, a multiple of 8.
#include "patch.cuh"

// A float operand of a product. -DFROM: 0 float32, 1 bfloat16, 2 codes.
#ifndef FROM
#define FROM 0
#endif
#ifndef ADDS
#define ADDS 0
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
    using type = int8_t;
};
using Given = Operand<FROM>::type;

}  // namespace

// values [M, N] times scale [M], [1] or null -> out Float [M, N].
LSQ_KERNEL __launch_bounds__(kPatchThreads)
    lsq_float_operand(In<Given> values, In<float> scale, Out<Float> out, int64_t scales,
                      int64_t rows, int64_t columns) {
    const int64_t row = patch_row(), column = patch_column();
    if (column >= columns) return;
    const Given* from = values;
    const float* factors = scale;
    Float* to = out;
#if FROM == 2
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

// total [numel] = sums, or with -DADDS=1 total + sums: what an inner dimension comes to that int32
// has no room for.
LSQ_KERNEL __launch_bounds__(256) lsq_add_sums(In<int32_t> sums, Out<float> total, int64_t numel) {
    const int32_t* from = sums;
    float* to = total;
    const int64_t element = kVector * (static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x);
    if (element >= numel) return;
    int32_t sum[kVector];
    float x[kVector] = {};
    load8(from + element, sum);
#if ADDS
    load8(to + element, x);
#endif
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += static_cast<float>(sum[i]);
    store8(to + element, x);
}
LSQ_EXPORT(lsq_add_sums)
