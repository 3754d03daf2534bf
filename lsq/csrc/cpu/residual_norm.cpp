// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
#include "loops.h"

using namespace lsq;

namespace {

float sum_of(const float* x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

// Makes row `row` of the sum, in its tensor or in scratch. -> that row [n]
const float* add_residual(const ResidualSum& sum, int64_t row, int64_t n, Scratch& scratch) {
    const float* residual = sum.residual + row * n;
    float* z = sum.z ? sum.z + row * n : scratch.a.data();
    if (sum.update) {
        dropped(sum.dropout, row * n, n, sum.update + row * n, scratch.words.data(),
                [&](int64_t i, float update) { z[i] = update + residual[i]; });
        return z;
    }
    if (!sum.z) return residual;
    std::memcpy(z, residual, n * sizeof(float));
    return z;
}

// Gradients of the residual and the update of a norm.
class ResidualSink {
public:
    ResidualSink(const Blocks& blocks, int64_t n, const ResidualSumGradient& sum)
        : n_(n), sum_(sum), update_(blocks, n, sum.dupdate, sum.rounded, sum.dupdate_sum) {}

    // through(i): gradient of element i of row `row` through the norm; may use the first floats of
    // `scratch`.
    template <class Through>
    void add(int64_t block, int64_t row, Scratch& scratch, const Through& through) {
        float *g = scratch.a.data(), *residual = sum_.dresidual ? sum_.dresidual + row * n_ : g;
        if (sum_.dz) {
            const float* direct = sum_.dz + row * n_;
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) residual[i] = through(i) + direct[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) residual[i] = through(i);
        }
        if (!update_.wanted()) return;
        dropped(sum_.dropout, row * n_, n_, residual, scratch.words.data(),
                [g](int64_t i, float y) { g[i] = y; });
        update_.add(block, row, g, g);
    }

    void finish() const { update_.finish(); }

private:
    int64_t n_;
    const ResidualSumGradient& sum_;
    GradientSink update_;
};

// Keeps row `row` for the backward pass as codes: centred [n] times rstd; `largest`: its largest
// magnitude.
void keep(const NormalisedRows& to, int64_t row, int64_t n, const float* centred, uint32_t largest,
          float rstd) {
    to.scale[row] = round_nearest(centred, n, largest, to.largest, to.codes + row * n) * rstd;
}

// Row `row` of the normalised values.
void normalise(const ResidualNormGradient& op, int64_t row, int64_t n, float* normalised) {
    if (op.normalised.codes) {
        decode(op.normalised.codes + row * n, n, op.normalised.scale[row], normalised);
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
