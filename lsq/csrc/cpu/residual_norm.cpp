// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
#include "residual_sum.h"

using namespace lsq;

LSQ_OPERATION(ResidualNorm, op) {
    const int64_t n = op.columns;
    const int missing = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float *z = scratch.a.data(), *x = scratch.b.data();
        add_residual(op.sum, row, n, z, scratch);
        if (!op.weight) return 0;
        const float mean = op.mean ? sum_of(z, n) / static_cast<float>(n) : 0.0f;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = z[i] - mean;
        const float variance = sum_of_products(x, x, n) / static_cast<float>(n);
        const float rstd = 1.0f / std::sqrt(variance + op.epsilon);
        const float *weight = op.weight, *bias = op.bias;
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i] + bias[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i];
        }
        if (op.mean) op.mean[row] = mean;
        op.rstd[row] = rstd;
        return store_row(op.out, op.rounded, row, n, x, scratch);
    });
    finish(op.rounded, missing);
}

LSQ_OPERATION(ResidualNormGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    ColumnSums weight_sums(blocks.count, n, op.dout), norm_bias_sums(blocks.count, n, op.dbias);
    ResidualSink sink(blocks, n, op.sum);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float *g = scratch.a.data(), *normalised = scratch.b.data();
        if (op.dout) {
            const float *upstream = op.dout + row * n, *line = op.z + row * n, *weight = op.weight;
            const float mean = op.mean ? op.mean[row] : 0.0f, rstd = op.rstd[row];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) normalised[i] = (line[i] - mean) * rstd;
            weight_sums.add_product(block, upstream, normalised);
            if (op.dbias) norm_bias_sums.add(block, upstream);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) g[i] = upstream[i] * weight[i];
            const float average = op.mean ? sum_of(g, n) / static_cast<float>(n) : 0.0f;
            const float projection = sum_of_products(g, normalised, n) / static_cast<float>(n);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) g[i] = rstd * (g[i] - average - normalised[i] * projection);
        } else {
            std::fill(g, g + n, 0.0f);
        }
        sink.add(block, row, g, scratch);
    });
    weight_sums.write(op.dweight);
    norm_bias_sums.write(op.dbias);
    sink.finish();
}
