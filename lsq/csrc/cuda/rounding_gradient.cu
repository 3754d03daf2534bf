// Gradient of a product at the end of a program: rounded per row if -DROUNDED, and summed over rows
// for its bias if -DSUMMED. M rows, N = COLUMNS columns; lsq/ops/rounding.py is the reference.
#include "gradient.cuh"

#ifndef SUMMED
#define SUMMED 1
#endif

// partial: the block's sums; null if there are none.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_round_gradient(const RoundGradient op, Out<float> partial) {
    wait_for_launches();
    const Float* gradient = op.gradient;
    GradientSink sink{nullptr, op.rounded};
    for_rows(op.rows, row_loader(gradient),
             [&](int64_t row, bool inside, const PackedRow<Float>& loaded) {
                 Values g = {};
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!inside || !has(v)) continue;
                     unpack8(loaded.part[v], g[v]);
#if SUMMED
                     sink.bias_sums.add(v, g[v]);
#endif
                 }
#if ROUNDED
                 sink.write(row, inside, g);
#endif
             });
#if SUMMED
    sink.bias_sums.write(partial + blockIdx.x * (COLUMNS + kPadding));
#endif
}
LSQ_EXPORT(lsq_round_gradient)
