// Dropout, residual, RMSNorm and rounding between two blocks, forward and backward.
//
// M rows, N = COLUMNS columns; lsq/ops/rms_norm.py is the reference. A row stays in registers, and what is normalised is
// z as it was stored. Sums over rows stay in registers (bias) or in shared memory (weight), see rows.cuh.
#include "residual_sum.cuh"

namespace {

// What the backward pass reads of a row.
struct Operands {
    Packed<Float> upstream[kVectors], z[kVectors];
    float rstd;
};

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kMedium) lsq_rms_norm(const RMSNorm op, Out<uint32_t> ticket) {
    const float* weight = op.weight;
    Float* out = op.out;
    const ResidualSource sum{op.sum};
    const CodeSink codes{op.rounded};
    bool missing = false;
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.rows; first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.rows;
        Values x = {};
        sum.load(row, inside, x);
        const float factor = 1.0f / sqrtf(squares_of(x) / COLUMNS + op.epsilon);
        if (!inside) continue;
        if (threadIdx.x % LANES == 0) op.rstd[row] = factor;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float slope[kVector];
            load8(weight + column_of(v), slope);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] = x[v][i] * factor * slope[i];
            const int64_t element = row * COLUMNS + column_of(v);
            if (out) store8(out + element, x[v]);
            missing |= codes.write8(element, x[v]);
        }
    }
    codes.finish<kThreads>(ticket, missing);
}
LSQ_EXPORT(lsq_rms_norm)

// partial: the block's sums for dweight and for dupdate_sum (-DPRODUCT).
LSQ_KERNEL __launch_bounds__(kThreads, kSumming) lsq_rms_norm_gradient(const RMSNormGradient op, Out<float> partial) {
    const Float *upstream = op.dout, *line = op.z;
    const float *rstd = op.rstd, *weight = op.weight;
    extern __shared__ float4 words[];
    const SharedColumnSums weight_sums{words};
    weight_sums.clear();
    ResidualSink sink{op.sum};
    const auto load = [&](int64_t row) {
        Operands operands;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            operands.upstream[v] = load_packed(upstream + row * COLUMNS + column_of(v));
            operands.z[v] = load_packed(line + row * COLUMNS + column_of(v));
        }
        operands.rstd = rstd[row];
        return operands;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const Operands& operands) {
        const PackedRow<Float> direct = sink.load(row, inside);
        float projection = 0.0f;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            float above[kVector], normalised[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            unpack8(operands.z[v], normalised);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                above[i] *= normalised[i] * operands.rstd;
                projection += above[i] * slope[i];
            }
            weight_sums.add(v, above);
        }
        projection = row_sum(projection) / COLUMNS;
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            // Loaded again: keeping them would take too many registers.
            float above[kVector], z[kVector], slope[kVector];
            load8(weight + column_of(v), slope);
            unpack8(operands.upstream[v], above);
            unpack8(operands.z[v], z);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                g[v][i] = operands.rstd * (above[i] * slope[i] - z[i] * operands.rstd * projection);
            }
            sink.join(row * COLUMNS + column_of(v), direct.part[v], g[v]);
        }
        sink.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * ((1 + PRODUCT) * COLUMNS + kPadding);
    weight_sums.write(sums);
    sink.write(sums + COLUMNS);
}
LSQ_EXPORT(lsq_rms_norm_gradient)
