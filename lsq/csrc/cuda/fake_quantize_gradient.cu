// Gradient of x from that of its values in a number format, with the epilogue of x's product
// undone; lsq/ops/fake_quantize.py is the reference. M rows, N = COLUMNS columns.
#include "input_gradient_epilogue.cuh"
#include "rows.cuh"

// partial: the block's sums for the bias, and its part of the gradient of the clip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_fake_quantize_gradient(const FakeQuantizeGradient op, Out<float> partial) {
    wait_for_launches();
    const Float *gradient = op.gradient, *values = op.out, *added = op.added;
    const uint8_t* clipped = op.clipped;
    Float* dx = op.dx;
    const DropoutMask dropout{op.nonlinearity.dropout};
    const ActivationSlope slope{op.nonlinearity};
    ColumnSums bias_sums;
    float clip_sum = 0.0f;
    for_rows(op.rows, row_loader(gradient),
             [&](int64_t row, bool inside, const PackedRow<Float>& loaded) {
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!inside || !has(v)) continue;
                     const int64_t element = row * COLUMNS + column_of(v);
                     float g[kVector];
                     unpack8(loaded.part[v], g);
                     if (const uint32_t outside = clipped[element / kVector]) {
                         float value[kVector];
                         load8(values + element, value);
#pragma unroll
                         for (int i = 0; i < kVector; ++i) {
                             const bool masked = outside >> i & 1;
                             clip_sum += masked ? (value[i] > 0.0f ? g[i] : -g[i]) : 0.0f;
                             g[i] = masked ? 0.0f : g[i];
                         }
                     }
                     dropout.apply8(element, g);
                     slope.apply8(element, g);
                     if (added) add8(added + element, g);
                     bias_sums.add(v, g);
                     if (dx) store8(dx + element, g);
                 }
             });
    write_partial(bias_sums, clip_sum, partial);
}
LSQ_EXPORT(lsq_fake_quantize_gradient)
