// Dropout, residual, LayerNorm or RMSNorm, and rounding between two blocks, forward and backward.
//
// M rows, N = COLUMNS columns; lsq/ops/residual_norm.py is the reference. A row stays in registers:
// its variance is the mean of squared differences, and the stored z is normalised. Sums over rows
// stay in registers (bias) or in shared memory (norm), see rows.cuh. Backward: -DNORM_SUMS=0 no
// norm, 1 RMSNorm (a weight), 2 LayerNorm (and a bias); -DNORMALISED=1 reads codes of normalised
// rows in place of z; -DPRODUCT=0 nothing was added to the residual.
#include "gradient.cuh"

#ifndef PRODUCT
#define PRODUCT 1
#endif

#ifndef NORMALISED
#define NORMALISED 0
#endif
#ifndef NORM_SUMS
#define NORM_SUMS 2
#endif

namespace {

// Rows of a ResidualSum, as they are stored.
struct ResidualSource {
    const Float *residual, *update;
    Float* stored;  // may be null
    DropoutMask dropout;

    LSQ_INLINE explicit ResidualSource(const ResidualSum& sum)
        : residual(sum.residual), update(sum.update), stored(sum.z), dropout(sum.dropout) {}

    // Makes a row of the sum, and stores it if wanted; zeros if the row does not exist.
    LSQ_INLINE void load(int64_t row, bool inside, Values& z) const {
        Packed<Float> carried[kVectors] = {}, added[kVectors] = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            carried[v] = load_packed(residual + row * COLUMNS + column_of(v));
            if (update) added[v] = load_packed(update + row * COLUMNS + column_of(v));
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            unpack8(carried[v], z[v]);
            if (update) {
                float value[kVector];
                unpack8(added[v], value);
                dropout.apply8(row * COLUMNS + column_of(v), value);
#pragma unroll
                for (int i = 0; i < kVector; ++i) z[v][i] = as_stored<Float>(value[i] + z[v][i]);
            }
            if (stored) store8(stored + row * COLUMNS + column_of(v), z[v]);
        }
    }
};

LSQ_INLINE float sum_of(const Values& x) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum += x[v][i];
    }
    return row_sum(sum);
}
LSQ_INLINE float squares_of(const Values& x) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum += x[v][i] * x[v][i];
    }
    return row_sum(sum);
}

// Gradients of the residual and the update of a norm.
struct ResidualSink {
    const Float* direct;
    Float* down;  // null where nothing comes through a norm
    DropoutMask dropout;
#if PRODUCT
    GradientSink update;
#endif

    LSQ_INLINE explicit ResidualSink(const ResidualSumGradient& sum)
        : direct(sum.dz), down(sum.dresidual), dropout(sum.dropout)
#if PRODUCT
          ,
          update(sum.dupdate, sum.rounded)
#endif
    {
    }

    // Loads the gradient of z itself in a row, or zeros, before it is needed.
    LSQ_INLINE PackedRow<Float> load(int64_t row, bool inside) const {
        PackedRow<Float> row_of = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (direct && inside && has(v))
                row_of.part[v] = load_packed(direct + row * COLUMNS + column_of(v));
        }
        return row_of;
    }

    // g: gradient of a vector through the norm -> of the update.
    LSQ_INLINE void join(int64_t element, const Packed<Float>& of_z, float (&g)[kVector]) const {
        if (direct) {
            float other[kVector];
            unpack8(of_z, other);
            add8(other, g);
        }
        if (down) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) g[i] = as_stored<Float>(g[i]);
            store8(down + element, g);
        }
#if PRODUCT
        dropout.apply8(element, g);
#endif
    }

    // Takes a row's g after join(), and changes it. All threads of the block must call this.
    LSQ_INLINE void add(int64_t row, bool inside, Values& g) {
#if PRODUCT
        update.add(row, inside, g);
#endif
    }

    // Writes the block's sums for the bias in the update. All threads of the block must call this.
    LSQ_INLINE void write(float* sums) const {
#if PRODUCT
        update.bias_sums.write(sums);
#endif
    }
};

constexpr bool kCentred = NORM_SUMS == 2;

using Kept = Select<NORMALISED, int8_t, Float>;

struct Operands {
    Packed<Float> upstream[kVectors];
    Packed<Kept> kept[kVectors];
    float mean, rstd, scale;

    LSQ_INLINE void normalised(int v, float (&x)[kVector]) const {
#if NORMALISED
        int32_t code[kVector];
        unpack8(kept[v], code);
        scale8(code, scale, x);
#else
        unpack8(kept[v], x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = (x[i] - mean) * rstd;
#endif
    }
};

// Keeps row `row` for the backward pass as codes: x times rstd. All threads of the block must call
// this.
LSQ_INLINE void keep(const NormalisedRows& to, int64_t row, bool inside, const Values& x,
                     float rstd) {
    const GradientScale s = gradient_scale(row_largest(x), to.largest);
    if (!inside) return;
    if (threadIdx.x % LANES == 0) to.scale[row] = s.scale * rstd;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (has(v)) store_nearest8(to.codes + row * COLUMNS + column_of(v), x[v], s.reciprocal);
    }
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kMedium)
    lsq_residual_norm(const ResidualNorm op, Out<uint32_t> ticket) {
    wait_for_launches();
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
    wait_for_launches();
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
