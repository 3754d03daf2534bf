// Float operands of products, and sums of the parts of long ones.
//
// M rows, N columns, a multiple of 8.
#include "patch.cuh"

// A float operand of a product. -DFROM: 0 float32, 1 bfloat16, 2 codes.
#ifndef FROM
#define FROM 0
#endif

using Given = Select<FROM == 0, float, Select<FROM == 1, bfloat16, int8_t>>;
using Loaded = Select<FROM == 2, int32_t, float>;

// values [M, N] times scale [M], [1] or null -> out Float [M, N].
LSQ_KERNEL __launch_bounds__(kPatchThreads)
    lsq_float_operand(In<Given> values, In<float> scale, Out<Float> out, int64_t scales,
                      int64_t rows, int64_t columns) {
    wait_for_launches();
    const int64_t row = patch_row(), column = patch_column();
    if (column >= columns) return;
    const Given* from = values;
    const float* factors = scale;
    Float* to = out;
    Loaded x[kPatchRows][kVector];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r < rows) load8(from + ((row + r) * columns + column), x[r]);
    }
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r >= rows) continue;
        const float factor = factors ? factors[scales > 1 ? row + r : 0] : 1.0f;
        float y[kVector];
        scale8(x[r], factor, y);
        store8(to + ((row + r) * columns + column), y);
    }
}
LSQ_EXPORT(lsq_float_operand)

// out Float [numel] = 0: the product of nothing, or what a scatter begins with.
LSQ_KERNEL __launch_bounds__(256) lsq_zero(Out<Float> out, int64_t numel) {
    wait_for_launches();
    const float zeros[kVector] = {};
    const int64_t element = kVector * thread_of_grid<256>();
    if (element + kVector <= numel) {
        store8(out + element, zeros);
    } else {
        for (int64_t i = element; i < numel; ++i) out[i] = narrow<Float>(0.0f);
    }
}
LSQ_EXPORT(lsq_zero)

// total [numel] = sums, or with -DADDS=1 total + sums, for inner dimensions that overflow int32.
LSQ_KERNEL __launch_bounds__(256) lsq_add_sums(In<int32_t> sums, Out<float> total, int64_t numel) {
    wait_for_launches();
    const int32_t* from = sums;
    float* to = total;
    const int64_t element = kVector * thread_of_grid<256>();
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
