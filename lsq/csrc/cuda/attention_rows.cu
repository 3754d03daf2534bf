// The end of attention's backward pass: whole rows of the gradient of queries, or of keys and
// values with -DKEYS=1.
//
// Straight through the rounding of what they are the gradient of, then sums over rows, then as it
// is or rounded.
#include "gradient.cuh"

// gradient: float32 [rows, COLUMNS]. partial: the block's sums of columns and, after them, what
// clips get.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_attention_gradient_rows(const AttentionGradient op, In<float> gradient,
                                Out<float> partial) {
#if KEYS
    const int64_t rows = op.heads.key_rows;
    const StraightThrough mask{op.heads.k.rows.coded};
    GradientSink sink{op.dkv.floats, op.dkv.rounded};
#else
    const int64_t rows = op.heads.rows;
    const StraightThrough mask{op.heads.q.rows.coded};
    GradientSink sink{op.dq.floats, op.dq.rounded};
#endif
    const float* from = gradient;
    float clip = 0.0f;
    const auto load = [&](int64_t row) {
        PackedRow<float> packed;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) packed.part[v] = load_packed(from + row * COLUMNS + column_of(v));
        }
        return packed;
    };
    for_rows(rows, load, [&](int64_t row, bool inside, const PackedRow<float>& packed) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            unpack8(packed.part[v], g[v]);
            clip += mask.apply8(row * COLUMNS + column_of(v), g[v]);
        }
        sink.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    sink.bias_sums.write(sums);
    write_block_sum(clip, sums + COLUMNS);
}
LSQ_EXPORT(lsq_attention_gradient_rows)
