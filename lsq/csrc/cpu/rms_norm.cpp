// Dropout, residual, RMSNorm and rounding between two blocks, forward and backward.
#include "residual_sum.h"

using namespace lsq;

LSQ_OPERATION(RMSNorm, op) {
    const int64_t n = op.columns;
    const int missing = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float* x = scratch.a.data();
        add_residual(op.sum, row, n, x, scratch);
        const float rstd = 1.0f / std::sqrt(sum_of_products(x, x, n) / static_cast<float>(n) + op.epsilon);
        const float* weight = op.weight;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i];
        op.rstd[row] = rstd;
        return store_row(op.out, op.rounded, row, n, x, scratch);
    });
    finish(op.rounded, missing);
}

LSQ_OPERATION(RMSNormGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    ColumnSums weight_sums(blocks.count, n, true);
    ResidualSink sink(blocks, n, op.sum);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float *g = scratch.a.data(), *normalised = scratch.b.data();
        const float *upstream = op.dout + row * n, *line = op.z + row * n, *weight = op.weight;
        const float rstd = op.rstd[row];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            normalised[i] = line[i] * rstd;
            g[i] = upstream[i] * weight[i];
        }
        weight_sums.add_product(block, upstream, normalised);
        const float projection = sum_of_products(g, normalised, n) / static_cast<float>(n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) g[i] = rstd * (g[i] - normalised[i] * projection);
        sink.add(block, row, g, scratch);
    });
    weight_sums.write(op.dweight);
    sink.finish();
}
