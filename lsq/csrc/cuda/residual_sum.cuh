// What the kernels of norms between two blocks share; lsq/ops/residual_sum.py is the reference.
//
// Rows are those of rows.cuh. Backward: -DPRODUCT=0 nothing was added to the residual.
#pragma once

#include "gradient.cuh"

#ifndef PRODUCT
#define PRODUCT 1
#endif

namespace lsq {

// Rows of a sum, as they are stored: a ResidualSum with its pointers at hand.
struct ResidualSource {
    const Float *residual, *update;
    Float* stored;  // may be null
    DropoutMask dropout;

    __device__ __forceinline__ explicit ResidualSource(const ResidualSum& sum)
        : residual(sum.residual), update(sum.update), stored(sum.z), dropout(sum.dropout) {}

    // z becomes a row of the sum, which is stored where that is wanted; zeros where the row does
    // not exist.
    __device__ __forceinline__ void load(int64_t row, bool inside, Values& z) const {
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

// Sums of the values of one row, and of their squares.
__device__ __forceinline__ float sum_of(const Values& x) {
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum += x[v][i];
    }
    return row_sum(sum);
}
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

// The end of a norm's backward kernel: the gradients of what was added up.
struct ResidualSink {
    const Float* direct;
    Float* down;  // null where nothing comes through a norm
    DropoutMask dropout;
#if PRODUCT
    GradientSink update;
#endif

    __device__ __forceinline__ explicit ResidualSink(const ResidualSumGradient& sum)
        : direct(sum.dz), down(sum.dresidual), dropout(sum.dropout)
#if PRODUCT
          , update(sum.dupdate, sum.rounded)
#endif
    {
    }

    // The gradient of z itself in a row, zeros where there is none: asked for before it is needed.
    __device__ __forceinline__ PackedRow<Float> load(int64_t row, bool inside) const {
        PackedRow<Float> found = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (direct && inside && has(v))
                found.part[v] = load_packed(direct + row * COLUMNS + column_of(v));
        }
        return found;
    }

    // g is what comes through the norm to a vector of a row, and becomes the gradient of the
    // update.
    __device__ __forceinline__ void join(int64_t element, const Packed<Float>& of_z,
                                         float (&g)[kVector]) const {
        if (direct) {
            float other[kVector];
            unpack8(of_z, other);
#pragma unroll
            for (int i = 0; i < kVector; ++i) g[i] += other[i];
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

    // All vectors of a row have been joined in g. Changes it. All threads of the block must call
    // this.
    __device__ __forceinline__ void add(int64_t row, bool inside, Values& g) {
#if PRODUCT
        update.add(row, inside, g);
#endif
    }

    // Writes the block's sums for the bias in the update. All threads of the block must call this.
    __device__ __forceinline__ void write(float* sums) const {
#if PRODUCT
        update.bias_sums.write(sums);
#endif
    }
};

}  // namespace lsq
