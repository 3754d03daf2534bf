// Bias, dropout, residual, LayerNorm and rounding between two blocks, forward and backward.
#include "loops.h"

using namespace lsq;

namespace {

float sum_of(const float* x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

float sum_of_products(const float* x, const float* y, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
    return sum;
}

}  // namespace

// y product [rows, n] or null, residual [rows, n]; weight null: no norm; clip null: no rounding. Null outputs are skipped.
LSQ_EXPORT void lsq_residual_norm(const void* y, int64_t kind, const float* y_scale, const float* bias,
                                  const float* residual, const float* weight, const float* norm_bias,
                                  const float* clip, const int64_t* key, int64_t stream, int64_t threshold, float keep,
                                  float epsilon, int64_t largest, float* z_out, float* mean_out, float* rstd_out,
                                  float* out, int8_t* codes, float* scale, uint8_t* clipped, float* error,
                                  int64_t rows, int64_t n) {
    const Product product{y, kind, y_scale};
    const Dropout dropout{key, stream, threshold, keep};
    const float q = static_cast<float>(largest);
    const Rounding rounding{codes, clipped, error};
    const int missing = for_rows(rows, n, [&](int64_t row, Scratch& scratch) {
        float *z = scratch.a.data(), *x = scratch.b.data();
        const float* add = residual + row * n;
        if (y) {
            product.read(row, n, z);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) z[i] += bias[i];
            dropout.apply(row * n, n, z, scratch.words.data());
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) z[i] += add[i];
        } else {
            std::memcpy(z, add, n * sizeof(float));
        }
        if (z_out) std::memcpy(z_out + row * n, z, n * sizeof(float));
        if (!weight) return 0;
        const float mean = sum_of(z, n) / static_cast<float>(n);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = z[i] - mean;
        const float variance = sum_of_products(x, x, n) / static_cast<float>(n);
        const float rstd = 1.0f / std::sqrt(variance + epsilon);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i] + norm_bias[i];
        mean_out[row] = mean;
        rstd_out[row] = rstd;
        if (out) std::memcpy(out + row * n, x, n * sizeof(float));
        return codes ? rounding.round(row * n, n, x, clip[0], q, scratch.c.data(), scratch.flags.data()) : 0;
    });
    if (codes) scale[0] = poisoned(clip[0] / q, missing);
}

// dout [rows, n] of the norm's result (null without a norm), dz of z itself (or null) -> dresidual (null: it is dz),
// dweight [n], dnorm_bias [n]; with a product also its gradient, dclip of y [1] and dbias [n].
LSQ_EXPORT void lsq_residual_norm_backward(const float* dout, const float* dz, const float* z, const float* mean,
                                           const float* rstd, const float* weight, const void* y, int64_t,
                                           const float*, const uint8_t* clipped, const float* error, float factor,
                                           const int64_t* key, int64_t stream, int64_t threshold, float keep,
                                           const float* weight_scale, int64_t gradient_stream, float* dresidual,
                                           float* dweight, float* dnorm_bias, void* dy, float* row_scale, float* dclip,
                                           float* dbias, int64_t rows, int64_t n) {
    const Dropout dropout{key, stream, threshold, keep};
    const Blocks blocks(rows);
    ColumnSums weight_sums(blocks.count, n, dout), norm_bias_sums(blocks.count, n, dout);
    ProductGradient result(blocks, n, {static_cast<const int8_t*>(y), clipped, error},
                           {dy, row_scale, weight_scale, key, gradient_stream}, dbias);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float *g = scratch.a.data(), *normalised = scratch.b.data();
        if (dout) {
            const float *upstream = dout + row * n, *line = z + row * n;
            const float centre = mean[row], factor_of_row = rstd[row];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) normalised[i] = (line[i] - centre) * factor_of_row;
            weight_sums.add_product(block, upstream, normalised);
            norm_bias_sums.add(block, upstream);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) g[i] = upstream[i] * weight[i];
            const float average = sum_of(g, n) / static_cast<float>(n);
            const float projection = sum_of_products(g, normalised, n) / static_cast<float>(n);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                g[i] = factor_of_row * (g[i] - average - normalised[i] * projection);
            }
            if (dz) {
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) g[i] += dz[row * n + i];
            }
            std::memcpy(dresidual + row * n, g, n * sizeof(float));
        } else {
            std::memcpy(g, dz + row * n, n * sizeof(float));
        }
        if (!dbias) return;
        dropout.apply(row * n, n, g, scratch.words.data());
        result.add(block, row, g, scratch);
    });
    weight_sums.write(dweight);
    norm_bias_sums.write(dnorm_bias);
    result.finish(factor, dclip, dbias);
}
