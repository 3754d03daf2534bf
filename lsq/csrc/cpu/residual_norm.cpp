// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
#include "residual_sum.h"

using namespace lsq;

namespace {

// Row `row` as codes for the backward pass: centred [n], of which the largest magnitude has these
// bits, times rstd.
void keep(const NormalisedRows& to, int64_t row, int64_t n, const float* centred, uint32_t largest,
          float rstd) {
    to.scale[row] = round_nearest(centred, n, largest, to.largest, to.codes + row * n) * rstd;
}

// Row `row` of what a norm has normalised, as the forward pass has left it.
void normalise(const ResidualNormGradient& op, int64_t row, int64_t n, float* normalised) {
    if (op.normalised.codes) {
        const int8_t* codes = op.normalised.codes + row * n;
        const float scale = op.normalised.scale[row];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) normalised[i] = static_cast<float>(codes[i]) * scale;
        return;
    }
    const float *line = op.z + row * n, mean = op.mean ? op.mean[row] : 0.0f, rstd = op.rstd[row];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) normalised[i] = (line[i] - mean) * rstd;
}

}  // namespace

LSQ_OPERATION(ResidualNorm, op) {
    const int64_t n = op.columns;
    const Magnitude rounded = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) -> Magnitude {
        const float* z = add_residual(op.sum, row, n, scratch);
        if (!op.weight) return 0;
        const float mean = op.mean ? sum_of(z, n) / static_cast<float>(n) : 0.0f;
        float *x = scratch.b.data(), squares = 0.0f;
        Magnitude largest = 0;
#pragma omp simd reduction(+ : squares) reduction(max : largest)
        for (int64_t i = 0; i < n; ++i) {
            x[i] = z[i] - mean;
            squares += x[i] * x[i];
            const Magnitude bits = magnitude_of(x[i]);
            largest = bits > largest ? bits : largest;
        }
        const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(n) + op.epsilon);
        if (op.normalised.codes) keep(op.normalised, row, n, x, largest, rstd);
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
    finish(op.rounded, rounded);
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
        const float *upstream = op.dout + row * n, *weight = op.weight, rstd = op.rstd[row];
        float *g = scratch.a.data(), *normalised = scratch.b.data(), total = 0.0f, along = 0.0f;
        normalise(op, row, n, normalised);
#pragma omp simd reduction(+ : total, along)
        for (int64_t i = 0; i < n; ++i) {
            g[i] = upstream[i] * weight[i];
            total += g[i];
            along += g[i] * normalised[i];
        }
        weight_sums.add_product(block, upstream, normalised);
        norm_bias_sums.add(block, upstream);
        const float average = op.centred ? total / static_cast<float>(n) : 0.0f;
        const float projection = along / static_cast<float>(n);
        sink.add(block, row, scratch,
                 [=](int64_t i) { return rstd * (g[i] - average - normalised[i] * projection); });
    });
    weight_sums.write(op.dweight);
    norm_bias_sums.write(op.dbias);
    sink.finish();
}
