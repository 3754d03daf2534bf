// Bias, dropout, residual, LayerNorm and rounding between two blocks, forward and backward.
//
// M rows, N = COLUMNS columns; lsq/ops/residual_norm.py is the reference. A row stays in registers: its variance is the
// mean of squared differences, and what is normalised is z as it was stored. Sums over rows stay in registers (bias and
// clip) or in shared memory (weight and bias of the norm), see rows.cuh.
// Backward: -DNORMED=0 there is no norm, -DPRODUCT=0 nothing was added to z.
#include "gradient.cuh"
#include "product.cuh"

#ifndef NORMED
#define NORMED 1
#endif
#ifndef PRODUCT
#define PRODUCT 1
#endif

namespace {

// Sum of the squares of one row.
__device__ __forceinline__ float squares_of(const Values& x) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum += x[v][i] * x[v][i];
    }
    return row_sum(sum);
}

// What the backward pass reads of a row.
struct Operands {
    Packed<Float> upstream[kVectors], z[kVectors];
    float mean, rstd;
};

}  // namespace

// y [M, N] or null, its scale, bias [N], residual [M, N], weight and norm_bias [N] or null, clip [1] or null
// -> z [M, N], mean and rstd [M], out [M, N], codes [M, N] with scale [1], clipped bits, error. Null outputs: skipped.
LSQ_KERNEL __launch_bounds__(kThreads, kMedium) lsq_residual_norm(
    In<ProductValue> y, In<float> y_scale, In<float> bias, In<Float> residual, In<float> weight, In<float> norm_bias,
    In<float> clip, In<int64_t> key, Out<Float> z, Out<float> mean, Out<float> rstd, Out<Float> out, Out<int8_t> codes,
    Out<float> scale, Out<uint8_t> clipped, Out<float> error, Out<uint32_t> ticket, int64_t rows, int64_t stream,
    int64_t threshold, float keep, float epsilon, float largest) {
    const ProductValue* values = y;
    const Float* carried = residual;
    Float* stored = z;
    const Dropout dropout{key, stream, threshold, keep};
    const ResultSink sink{out, {codes, clipped, error}, clip, largest};
    bool missing = false;
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < rows; first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < rows;
        Packed<Float> added[kVectors] = {};
        Packed<ProductValue> product[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            added[v] = load_packed(carried + row * COLUMNS + column_of(v));
            if (values) product[v] = load_packed(values + row * COLUMNS + column_of(v));
        }
        Values x = {};
        float total = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            unpack8(added[v], x[v]);
            if (values) {
                float value[kVector];
                read_biased8(product[v], y_scale, bias, column_of(v), value);
                dropout.apply8(row * COLUMNS + column_of(v), value);
#pragma unroll
                for (int i = 0; i < kVector; ++i) x[v][i] = as_stored<Float>(value[i] + x[v][i]);
            }
            if (stored) store8(stored + row * COLUMNS + column_of(v), x[v]);
#pragma unroll
            for (int i = 0; i < kVector; ++i) total += x[v][i];
        }
        if (!weight) continue;
        const float centre = row_sum(total) / COLUMNS;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] -= centre;
        }
        const float factor = 1.0f / sqrtf(squares_of(x) / COLUMNS + epsilon);
        if (!inside) continue;
        if (threadIdx.x % LANES == 0) mean[row] = centre, rstd[row] = factor;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float slope[kVector], shift[kVector];
            load8(weight + column_of(v), slope);
            load8(norm_bias + column_of(v), shift);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] = x[v][i] * factor * slope[i] + shift[i];
            missing |= sink.write8(row * COLUMNS + column_of(v), x[v]);
        }
    }
    sink.finish<kThreads>(ticket, missing, scale);
}
LSQ_EXPORT(lsq_residual_norm)

// dout [M, N] of the norm's result (-DNORMED), dz [M, N] of z itself or null, z [M, N], mean and rstd [M], weight [N]
// -> dresidual [M, N] (-DNORMED; else it is dz), dy [M, N] (-DPRODUCT; with row_scale [M] if -DROUNDED), partial sums
// for dweight and dnorm_bias (-DNORMED), dbias and dclip (-DPRODUCT).
LSQ_KERNEL __launch_bounds__(kThreads, kSumming) lsq_residual_norm_backward(
    In<Float> dout, In<Float> dz, In<Float> z, In<float> mean, In<float> rstd, In<float> weight, In<int8_t> y,
    In<uint8_t> clipped, In<float> error, In<float> weight_scale, In<int64_t> key, Out<Float> dresidual,
    Out<GradientValue> dy, Out<float> row_scale, Out<float> partial, int64_t rows, int64_t stream, int64_t threshold,
    int64_t gradient_stream, float keep) {
    const Float *upstream = dout, *direct = dz, *line = z;
    Float* down = dresidual;
    const Dropout dropout{key, stream, threshold, keep};
#if NORMED
    extern __shared__ float4 words[];
    const SharedColumnSums weight_sums{words}, norm_bias_sums{words + SharedColumnSums::kWords};
    weight_sums.clear();
    norm_bias_sums.clear();
#endif
#if PRODUCT
    ProductGradient result{{y, clipped, error}, {dy, row_scale, weight_scale, key, gradient_stream}};
#endif
    const auto load = [&](int64_t row) {
        Operands operands;
#if NORMED
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            operands.upstream[v] = load_packed(upstream + row * COLUMNS + column_of(v));
            operands.z[v] = load_packed(line + row * COLUMNS + column_of(v));
        }
        operands.mean = mean[row], operands.rstd = rstd[row];
#endif
        return operands;
    };
    for_rows(rows, load, [&](int64_t row, bool inside, const Operands& operands) {
        Packed<Float> other[kVectors] = {};  // of z itself
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (direct && inside && has(v)) other[v] = load_packed(direct + row * COLUMNS + column_of(v));
        }
#if NORMED
        float average = 0.0f, projection = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            float above[kVector], normalised[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            unpack8(operands.z[v], normalised);
            norm_bias_sums.add(v, above);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                normalised[i] = (normalised[i] - operands.mean) * operands.rstd;
                average += above[i] * slope[i];
                projection += above[i] * slope[i] * normalised[i];
                above[i] *= normalised[i];
            }
            weight_sums.add(v, above);
        }
        row_sums(average, projection);
        average /= COLUMNS, projection /= COLUMNS;
#endif
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            unpack8(other[v], g[v]);
#if NORMED
            // Computed again: keeping them would take too many registers.
            float above[kVector], normalised[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            unpack8(operands.z[v], normalised);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                normalised[i] = (normalised[i] - operands.mean) * operands.rstd;
                const float own = operands.rstd * (above[i] * slope[i] - average - normalised[i] * projection);
                g[v][i] = as_stored<Float>(direct ? own + g[v][i] : own);
            }
            store8(down + element, g[v]);
#endif
#if PRODUCT
            dropout.apply8(element, g[v]);
#endif
        }
#if PRODUCT
        result.add(row, inside, g);
#endif
    });
    float* sums = partial + blockIdx.x * ((2 * NORMED + PRODUCT) * COLUMNS + kPadding);
#if NORMED
    weight_sums.write(sums);
    norm_bias_sums.write(sums + COLUMNS);
#endif
#if PRODUCT
    result.write_sums(sums + 2 * NORMED * COLUMNS, sums + (2 * NORMED + 1) * COLUMNS);
#endif
}
LSQ_EXPORT(lsq_residual_norm_backward)
