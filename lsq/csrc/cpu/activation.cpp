// Bias, ReLU or GELU, dropout and rounding between the two products of a feed-forward block, forward and backward.
#include "loops.h"

using namespace lsq;

namespace {

// x -> activation(x), in place.
void activate(int64_t activation, int64_t n, float* x) {
    if (activation == kRelu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = relu(x[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = gelu(x[i]);
    }
}

// gradient *= activation'(x)
void activate_backward(int64_t activation, int64_t n, const float* x, float* gradient) {
    if (activation == kRelu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] = x[i] > 0.0f ? gradient[i] : 0.0f;
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= gelu_slope(x[i]);
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
    const RowSink sink{out, clip, largest, scale, clipped, error};
    sink.finish(for_rows(rows, n, [&](int64_t row, Scratch& scratch) {
        float* x = scratch.a.data();
        product.read(row, n, x);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
        activate(activation, n, x);
        dropout.apply(row * n, n, x, scratch.words.data());
        return sink.write(row, n, x, scratch);
    }));
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
    const Blocks blocks(rows);
    ProductGradient result(blocks, n, {static_cast<const int8_t*>(y), clipped, error},
                           {dy, row_scale, weight_scale, key, gradient_stream}, true);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float *x = scratch.a.data(), *g = scratch.b.data();
        product.read(row, n, x);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
        std::memcpy(g, gradient + row * n, n * sizeof(float));
        dropout.apply(row * n, n, g, scratch.words.data());
        activate_backward(activation, n, x, g);
        result.add(block, row, g, scratch);
    });
    result.finish(factor, dclip, dbias);
}
