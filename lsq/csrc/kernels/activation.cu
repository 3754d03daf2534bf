// Bias, ReLU or GELU, dropout and rounding between the two products of a feed-forward block, forward and backward.
//
// M rows, N = COLUMNS columns; -DACTIVATION=0 ReLU, 1 GELU; lsq/ops/activation.py is the reference. The backward pass
// computes what the activation was applied to again from the product; sums for bias and clip stay in registers.
#include "gradient.cuh"
#include "product.cuh"

#ifndef ACTIVATION
#define ACTIVATION 0
#endif

namespace {

// What the backward pass reads of a row.
struct Operands {
    Packed<ProductValue> product[kVectors];
    Packed<Float> gradient[kVectors];
};

}  // namespace

// y [M, N], its scale, bias [N], clip [1] or null -> codes [M, N] with scale [1], clipped bits, error; or out [M, N].
LSQ_KERNEL __launch_bounds__(kThreads, kLight) lsq_bias_activation(
    In<ProductValue> y, In<float> y_scale, In<float> bias, In<float> clip, In<int64_t> key, Out<Float> out,
    Out<int8_t> codes, Out<float> scale, Out<uint8_t> clipped, Out<float> error, Out<uint32_t> ticket, int64_t rows,
    int64_t stream, int64_t threshold, float keep, float largest) {
    const ProductValue* values = y;
    const Dropout dropout{key, stream, threshold, keep};
    const ResultSink sink{out, {codes, clipped, error}, clip, largest};
    bool missing = false;
    const int64_t begin = static_cast<int64_t>(kRows) * blockIdx.x + row_in_block();
    for (int64_t row = begin; row < rows; row += kRows * gridDim.x) {
        Packed<ProductValue> product[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) product[v] = load_packed(values + row * COLUMNS + column_of(v));
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float x[kVector];
            read_biased8(product[v], y_scale, bias, column_of(v), x);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[i] = ACTIVATION == kRelu ? relu(x[i]) : gelu(x[i]);
            dropout.apply8(element, x);
            missing |= sink.write8(element, x);
        }
    }
    sink.finish<kThreads>(ticket, missing, scale);
}
LSQ_EXPORT(lsq_bias_activation)

// gradient [M, N] of the result -> dy [M, N] (with row_scale [M] if -DROUNDED), partial sums for dbias and dclip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming) lsq_bias_activation_backward(
    In<Float> gradient, In<ProductValue> y, In<float> y_scale, In<uint8_t> clipped, In<float> error, In<float> bias,
    In<float> weight_scale, In<int64_t> key, Out<GradientValue> dy, Out<float> row_scale, Out<float> partial,
    int64_t rows, int64_t stream, int64_t threshold, int64_t gradient_stream, float keep) {
    const ProductValue* values = y;
    const Float* upstream = gradient;
    const Dropout dropout{key, stream, threshold, keep};
    ProductGradient result{{codes_of(values), clipped, error}, {dy, row_scale, weight_scale, key, gradient_stream}};
    const auto load = [&](int64_t row) {
        Operands operands;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            operands.product[v] = load_packed(values + row * COLUMNS + column_of(v));
            operands.gradient[v] = load_packed(upstream + row * COLUMNS + column_of(v));
        }
        return operands;
    };
    for_rows(rows, load, [&](int64_t row, bool inside, const Operands& operands) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            float x[kVector];
            read_biased8(operands.product[v], y_scale, bias, column_of(v), x);
            unpack8(operands.gradient[v], g[v]);
            dropout.apply8(row * COLUMNS + column_of(v), g[v]);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (ACTIVATION == kRelu) {
                    g[v][i] = x[i] > 0.0f ? g[v][i] : 0.0f;
                } else {
                    g[v][i] *= gelu_slope(x[i]);
                }
            }
        }
        result.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    result.write_sums(sums, sums + COLUMNS);
}
LSQ_EXPORT(lsq_bias_activation_backward)
