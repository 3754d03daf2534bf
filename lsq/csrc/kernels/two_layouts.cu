// Rounding of float rows at random, with a scale for each row, and the largest magnitudes of the columns, in one read.
//
// M rows, N = COLUMNS columns. The columns' codes follow in transpose.cu, which reads x again, or these codes where
// both layouts share the rows' scales. lsq/quant/arithmetic.py (round_rows, round_columns) is the reference.
#include "gradient.cuh"

// codes: op.codes or memory between two kernels. partial float32 [blocks, N] or null: the largest magnitude of each
// column in the block's rows; NaN is the largest.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_round_rows(const RoundTwoLayouts op, Out<int8_t> codes, Out<float> partial) {
    const GradientSink sink{
        nullptr, {codes.address, op.row_scale, op.weight_scale, op.key, op.subsequence, op.largest}};
    const Float* x = op.x;
    ColumnReduction<Largest> columns;
    const int64_t stride = kRows * static_cast<int64_t>(gridDim.x);
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.rows; first += stride) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.rows;
        Values values = {};
        if (inside) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (has(v)) load8(x + row * COLUMNS + column_of(v), values[v]);
            }
        }
        sink.write(row, inside, values);
        if (!partial || !inside) continue;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) columns.add(v, values[v]);
        }
    }
    if (partial) columns.write(partial + static_cast<int64_t>(blockIdx.x) * COLUMNS);
}
LSQ_EXPORT(lsq_round_rows)
