// Bias, ReLU or GELU, dropout and rounding between the two products of a feed-forward block, forward and backward.
#include "exponential.h"
#include "rows.h"

using namespace lsq;

namespace {

enum Activation { kRelu = 0, kGelu = 1 };

// x -> activation(x), in place.
void activate(int64_t activation, int64_t n, float* x) {
    if (activation == kRelu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];  // NaN stays NaN
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] * 0.5f * (1.0f + error_function(x[i] * 0.70710678118654752f));
    }
}

// gradient *= activation'(x)
void activate_backward(int64_t activation, int64_t n, const float* x, float* gradient) {
    if (activation == kRelu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] = x[i] > 0.0f ? gradient[i] : 0.0f;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float density = exponential(-0.5f * x[i] * x[i]) * 0.39894228040143268f;
            gradient[i] *= 0.5f * (1.0f + error_function(x[i] * 0.70710678118654752f)) + x[i] * density;
        }
    }
}

}  // namespace

// y product [rows, n], bias [n] -> codes (largest > 0) or float `out` [rows, n], scale [1], clipped, error.
LSQ_EXPORT void lsq_bias_activation(const void* y, int64_t kind, const float* y_scale, const float* bias,
                                    const float* clip, const int64_t* key, int64_t stream, int64_t threshold,
                                    float keep, int64_t activation, int64_t largest, void* out, float* scale,
                                    uint8_t* clipped, float* error, int64_t rows, int64_t n) {
    const Product product{y, kind, y_scale};
    const Dropout dropout{key, stream, threshold, keep};
    const float q = static_cast<float>(largest);
    const Rounding rounding{static_cast<int8_t*>(out), clipped, error};
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        Scratch scratch(n);
        float* x = scratch.a.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            product.read(row, n, x);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
            activate(activation, n, x);
            dropout.apply(row * n, n, x, scratch.words.data());
            if (largest) {
                missing |= rounding.round(row * n, n, x, clip[0], q, scratch.b.data(), scratch.flags.data());
            } else {
                std::memcpy(static_cast<float*>(out) + row * n, x, n * sizeof(float));
            }
        }
    }
    if (largest) scale[0] = poisoned(clip[0] / q, missing);
}

// gradient [rows, n] of the result -> gradient of the product, dclip of y [1], dbias [n].
LSQ_EXPORT void lsq_bias_activation_backward(const float* gradient, const void* y, int64_t kind, const float* y_scale,
                                             const uint8_t* clipped, const float* error, float factor,
                                             const float* bias, const int64_t* key, int64_t stream, int64_t threshold,
                                             float keep, int64_t activation, const float* weight_scale,
                                             int64_t gradient_stream, void* dy, float* row_scale, float* dclip,
                                             float* dbias, int64_t rows, int64_t n) {
    const Product product{y, kind, y_scale};
    const Dropout dropout{key, stream, threshold, keep};
    const StraightThrough straight{static_cast<const int8_t*>(y), clipped, error};
    const GradientSink sink{dy, row_scale, weight_scale, key, gradient_stream};
    const Blocks blocks(rows);
    ColumnSums bias_sums(blocks.count, n, true);
    std::vector<double> clip_sums(blocks.count, 0.0);
#pragma omp parallel
    {
        Scratch scratch(n);
        float *x = scratch.a.data(), *g = scratch.b.data();
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                product.read(row, n, x);
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
                std::memcpy(g, gradient + row * n, n * sizeof(float));
                dropout.apply(row * n, n, g, scratch.words.data());
                activate_backward(activation, n, x, g);
                bias_sums.add(block, g);
                clip_sums[block] += straight.apply(row * n, n, g);
                sink.write(row, n, g, scratch.words.data());
            }
        }
    }
    bias_sums.write(dbias);
    write_sum(clip_sums, factor, dclip);
}
