// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
#include "residual_sum.h"

using namespace lsq;

LSQ_OPERATION(ResidualNorm, op) {
    const int64_t n = op.columns;
    const int missing = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        const float* z = add_residual(op.sum, row, n, scratch);
        if (!op.weight) return 0;
        const float mean = op.mean ? sum_of(z, n) / static_cast<float>(n) : 0.0f;
        float *x = scratch.b.data(), squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n; ++i) {
            x[i] = z[i] - mean;
            squares += x[i] * x[i];
        }
        const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(n) + op.epsilon);
        const float *weight = op.weight, *bias = op.bias;
        float* out = op.out ? op.out + row * n : x;
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd * weight[i] + bias[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = x[i] * rstd * weight[i];
        }
        if (op.mean) op.mean[row] = mean;
        op.rstd[row] = rstd;
        return op.rounded.codes ? round_row(op.rounded, row * n, n, out, scratch.flags.data()) : 0;
    });
    finish(op.rounded, missing);
}

LSQ_OPERATION(ResidualNormGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    ColumnSums weight_sums(blocks.count, n, op.dout), norm_bias_sums(blocks.count, n, op.dbias);
    ResidualSink sink(blocks, n, op.sum);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        if (!op.dout) {
            sink.add(block, row, scratch, [](int64_t) { return 0.0f; });
            return;
        }
        const float *upstream = op.dout + row * n, *line = op.z + row * n, *weight = op.weight;
        const float mean = op.mean ? op.mean[row] : 0.0f, rstd = op.rstd[row];
        float *g = scratch.a.data(), *normalised = scratch.b.data(), total = 0.0f, along = 0.0f;
#pragma omp simd reduction(+ : total, along)
        for (int64_t i = 0; i < n; ++i) {
            normalised[i] = (line[i] - mean) * rstd;
            g[i] = upstream[i] * weight[i];
            total += g[i];
            along += g[i] * normalised[i];
        }
        weight_sums.add_product(block, upstream, normalised);
        norm_bias_sums.add(block, upstream);
        const float average = op.mean ? total / static_cast<float>(n) : 0.0f;
        const float projection = along / static_cast<float>(n);
        sink.add(block, row, scratch, [=](int64_t i) { return rstd * (g[i] - average - normalised[i] * projection); });
    });
    weight_sums.write(op.dweight);
    norm_bias_sums.write(op.dbias);
    sink.finish();
}
