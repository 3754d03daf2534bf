// Epilogue of attention's backward pass: whole rows of the gradient of queries, or of keys and
// values with -DKEYS=1. Straight-through mask, sums over rows, then floats or codes.
#include "gradient.cuh"

// gradient: [rows, COLUMNS]. partial: the block's sums of columns, then its part of the
// clip's gradient.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_attention_gradient_rows(const AttentionGradient op, In<Float> gradient,
                                Out<float> partial) {
    wait_for_launches();
#if KEYS
    const int64_t rows = op.heads.key_rows;
    const StraightThrough mask{op.heads.k.rows.coded};
    GradientSink sink{op.dkv.floats, op.dkv.rounded};
#else
    const int64_t rows = op.heads.rows;
    const StraightThrough mask{op.heads.q.rows.coded};
    GradientSink sink{op.dq.floats, op.dq.rounded};
#endif
    const Float* from = gradient;
    float clip = 0.0f;
    for_rows(rows, row_loader(from), [&](int64_t row, bool inside, const PackedRow<Float>& packed) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            unpack8(packed.part[v], g[v]);
            clip += mask.apply8(row * COLUMNS + column_of(v), g[v]);
        }
        sink.add(row, inside, g);
    });
    write_partial(sink.bias_sums, clip, partial);
}
LSQ_EXPORT(lsq_attention_gradient_rows)
