// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
//
// M rows, N = COLUMNS columns; lsq/ops/residual_norm.py is the reference. A row stays in registers:
// its variance is the mean of squared differences, and what is normalised is z as it was stored.
// Sums over rows stay in registers (bias) or in shared memory (weight and bias of the norm), see
// rows.cuh. Backward: -DNORM_SUMS=0 there is no norm, 1 for RMSNorm (a weight), 2 for LayerNorm
// (and a bias); -DNORMALISED=1 reads codes of normalised rows in place of z.
#include "residual_sum.cuh"

#ifndef NORM_SUMS
#define NORM_SUMS 2
#endif
#ifndef NORMALISED
#define NORMALISED 0
#endif

namespace {

constexpr bool kCentred = NORM_SUMS == 2;

#if NORMALISED
using Kept = int8_t;
#else
using Kept = Float;
#endif

// What the backward pass reads of a row.
struct Operands {
    Packed<Float> upstream[kVectors];
    Packed<Kept> kept[kVectors];
    float mean, rstd, scale;

    // Vector v as it was normalised.
    __device__ __forceinline__ void normalised(int v, float (&x)[kVector]) const {
#if NORMALISED
        int32_t code[kVector];
        unpack8(kept[v], code);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(code[i]) * scale;
#else
        unpack8(kept[v], x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = (x[i] - mean) * rstd;
#endif
    }
};

// Row `row` as codes for the backward pass: x times rstd. All threads of the block must call this.
__device__ __forceinline__ void keep(const NormalisedRows& to, int64_t row, bool inside,
                                     const Values& x, float rstd) {
    const GradientScale s = gradient_scale(row_largest(x), to.largest);
    if (!inside) return;
    if (threadIdx.x % LANES == 0) to.scale[row] = s.scale * rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
        int8_t code[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            code[i] = s.reciprocal == 0.0f ? static_cast<int8_t>(0)
                                           : nearest_code(x[v][i] * s.reciprocal);
        }
        store8(to.codes + row * COLUMNS + column_of(v), code);
    }
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kMedium)
    lsq_residual_norm(const ResidualNorm op, Out<uint32_t> ticket) {
    const float *weight = op.weight, *bias = op.bias;
    Float* out = op.out;
    const ResidualSource sum{op.sum};
    const CodeSink codes{op.rounded};
    Magnitude largest = 0;
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.rows;
         first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.rows;
        Values x = {};
        sum.load(row, inside, x);
        if (!weight) continue;
        const float centre = op.mean ? sum_of(x) / COLUMNS : 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] -= centre;
        }
        const float factor = 1.0f / sqrtf(squares_of(x) / COLUMNS + op.epsilon);
        if (op.normalised.codes) keep(op.normalised, row, inside, x, factor);
        if (!inside) continue;
        if (threadIdx.x % LANES == 0) {
            if (op.mean) op.mean[row] = centre;
            op.rstd[row] = factor;
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float slope[kVector], shift[kVector] = {};
            load8(weight + column_of(v), slope);
            if (bias) load8(bias + column_of(v), shift);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] = x[v][i] * factor * slope[i] + shift[i];
            const int64_t element = row * COLUMNS + column_of(v);
            if (out) store8(out + element, x[v]);
            largest = Largest::join(largest, codes.write8(element, x[v]));
        }
    }
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_residual_norm)

// partial: the block's sums for dweight and dbias (-DNORM_SUMS) and for dupdate_sum (-DPRODUCT).
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_residual_norm_gradient(const ResidualNormGradient op, Out<float> partial) {
    const Float* upstream = op.dout;
    const float *rstd = op.rstd, *weight = op.weight;
#if NORMALISED
    const Kept* line = op.normalised.codes;
#else
    const Kept* line = op.z;
#endif
#if NORM_SUMS
    extern __shared__ float4 words[];
    const SharedColumnSums weight_sums{words}, norm_bias_sums{words + SharedColumnSums::kWords};
    weight_sums.clear();
    if (kCentred) norm_bias_sums.clear();
#endif
    ResidualSink sink{op.sum};
    const auto load = [&](int64_t row) {
        Operands operands;
#if NORM_SUMS
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            operands.upstream[v] = load_packed(upstream + row * COLUMNS + column_of(v));
            operands.kept[v] = load_packed(line + row * COLUMNS + column_of(v));
        }
        operands.rstd = rstd[row];
#if NORMALISED
        operands.scale = op.normalised.scale[row];
#else
        operands.mean = kCentred ? op.mean[row] : 0.0f;
#endif
#endif
        return operands;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const Operands& operands) {
        const PackedRow<Float> direct = sink.load(row, inside);
#if NORM_SUMS
        float average = 0.0f, projection = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            float above[kVector], normalised[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            operands.normalised(v, normalised);
            if (kCentred) norm_bias_sums.add(v, above);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (kCentred) average += above[i] * slope[i];
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
#if NORM_SUMS
            // Computed again: keeping them would take too many registers.
            float above[kVector], normalised[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            operands.normalised(v, normalised);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                g[v][i] =
                    operands.rstd * (above[i] * slope[i] - average - normalised[i] * projection);
            }
#endif
            sink.join(row * COLUMNS + column_of(v), direct.part[v], g[v]);
        }
        sink.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * ((NORM_SUMS + PRODUCT) * COLUMNS + kPadding);
#if NORM_SUMS
    weight_sums.write(sums);
    if (kCentred) norm_bias_sums.write(sums + COLUMNS);
#endif
    sink.write(sums + NORM_SUMS * COLUMNS);
}
LSQ_EXPORT(lsq_residual_norm_gradient)
