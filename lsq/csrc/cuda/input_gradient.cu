// Gradient of an input from a product of another kernel: scales, input_gradient_epilogue.cuh, sums
// over rows, rounding.
//
// -DPRODUCT: 0 int32 sums, 3 such sums as floats, 1 float32, 2 Float, perhaps in dx. M rows, K =
// COLUMNS columns. Rows and sums stay in registers; lsq/ops/input_gradient.py is the reference.
#include "gradient.cuh"
#include "input_gradient_epilogue.cuh"

#ifndef PRODUCT
#define PRODUCT 0
#endif

namespace {

using Loaded = Select<PRODUCT == 0, int32_t, float>;
using Value = Select<PRODUCT == 2, Float, Loaded>;

constexpr bool kScaled = PRODUCT == 0 || PRODUCT == 3;  // by the scales of rows

}  // namespace

// partial: the block's sums for the bias, and its part of the gradient of x's clip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_project_input_gradient(const ProjectInputGradient op, In<Value> product,
                               Out<float> partial) {
    wait_for_launches();
    const Value* values = product;
    const float* row_scale = op.gradient.scale;
    const InputGradientEnd end{op};
    GradientSink sink{op.dx, op.rounded};
    float clip_sum = 0.0f;
    for_rows(op.rows, row_loader(values),
             [&](int64_t row, bool inside, const PackedRow<Value>& packed) {
                 Values g = {};
                 const float scale = kScaled && inside ? row_scale[row] : 0.0f;
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!inside || !has(v)) continue;
                     const int64_t element = row * COLUMNS + column_of(v);
                     Loaded value[kVector];
                     unpack8(packed.part[v], value);
#pragma unroll
                     for (int i = 0; i < kVector; ++i) {
                         g[v][i] = kScaled ? static_cast<float>(value[i]) * scale
                                           : static_cast<float>(value[i]);
                     }
                     clip_sum += end.apply8(element, g[v]);
                 }
                 sink.add(row, inside, g);
             });
    write_partial(sink.bias_sums, clip_sum, partial);
}
LSQ_EXPORT(lsq_project_input_gradient)
