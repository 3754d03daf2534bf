// Rotary embeddings of queries and keys, norms of their heads before, and rounding;
// lsq/ops/rotation.py is the reference.
//
// -DWIDTH: columns of a head, of which the first -DROTATED are rotated; -DHEADS: heads of queries
// and keys, with which a row of COLUMNS begins; -DNORMED=1: heads have norms.
#include "gradient.cuh"

namespace {

constexpr int kHalf = ROTATED / 2;
// Least blocks of a multiprocessor.
constexpr int kHeld = NORMED ? kSumming : kMedium;

static_assert(WIDTH % kVector == 0 && kHalf % kVector == 0, "vectors lie in a half of a head");

LSQ_INLINE bool in_head(int column) { return column < HEADS * WIDTH; }
LSQ_INLINE bool rotates(int column) { return in_head(column) && column % WIDTH < ROTATED; }
LSQ_INLINE bool low(int column) { return column % WIDTH < kHalf; }
// Column that is rotated together with this one.
LSQ_INLINE int partner(int column) { return low(column) ? column + kHalf : column - kHalf; }

// Rotates x with its partner `other`, back if `direction` is -1; line: the table's row of the
// position.
LSQ_INLINE void rotate8(const float* line, int column, float direction,
                        const float (&other)[kVector], float (&x)[kVector]) {
    const int first = column % WIDTH % kHalf;
    const float sign = low(column) ? -direction : direction;
    float cosine[kVector], sine[kVector];
    load8(line + first, cosine);
    load8(line + kHalf + first, sine);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * cosine[i] + other[i] * (sign * sine[i]);
}

#if NORMED
using EachVector = float[kVectors];

// A thread's number of each vector -> the sums over their heads. All threads of the block must call
// this.
LSQ_INLINE void head_sums(EachVector& mine) {
    constexpr int kInRow = COLUMNS / kVector, kInHead = WIDTH / kVector;
    __shared__ float part[kRows * kInRow];
    float* row = part + row_in_block() * kInRow;
    __syncthreads();  // the values of a call before have been read
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (has(v)) row[column_of(v) / kVector] = mine[v];
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v) || !in_head(column_of(v))) continue;
        const int first = column_of(v) / WIDTH * kInHead;
        mine[v] = 0.0f;
        for (int i = 0; i < kInHead; ++i) mine[v] += row[first + i];
    }
}

LSQ_INLINE const float* weight_of(const HeadNorms& norms, int64_t queries, int column) {
    return (column / WIDTH < queries ? norms.query : norms.key) + column % WIDTH;
}

LSQ_INLINE void multiply8(const float* by, float rstd, float (&x)[kVector]) {
    float weight[kVector];
    load8(by, weight);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * rstd * weight[i];
}
#endif

LSQ_INLINE void unpack(const PackedRow<Float>& packed, bool inside, Values& x) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (inside && has(v)) unpack8(packed.part[v], x[v]);
    }
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kHeld) lsq_rotate(const Rotate op, Out<uint32_t> ticket) {
    wait_for_launches();
    const Float* from = op.x;
    Float* out = op.out;
    const CodeSink codes{op.rounded};
    Magnitude largest = 0;
    for_rows(op.rows, row_loader(from),
             [&](int64_t row, bool inside, const PackedRow<Float>& packed) {
                 Values x = {};
                 unpack(packed, inside, x);
#if NORMED
                 EachVector rstd = {};
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
#pragma unroll
                     for (int i = 0; i < kVector; ++i) rstd[v] += x[v][i] * x[v][i];
                 }
                 head_sums(rstd);
#endif
                 if (!inside) return;
                 const float* line = op.rotation.table + op.rotation.positions[row] * ROTATED;
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!has(v)) continue;
                     const int column = column_of(v);
                     float other[kVector];
                     if (rotates(column)) load8(from + row * COLUMNS + partner(column), other);
#if NORMED
                     if (in_head(column)) {
                         rstd[v] = 1.0f / sqrtf(rstd[v] / WIDTH + op.norms.epsilon);
                         multiply8(weight_of(op.norms, op.rotation.queries, column), rstd[v], x[v]);
                         if (column % WIDTH == 0)
                             op.norms.rstd[row * HEADS + column / WIDTH] = rstd[v];
                     }
                     if (rotates(column))
                         multiply8(weight_of(op.norms, op.rotation.queries, partner(column)),
                                   rstd[v], other);
#endif
                     if (rotates(column)) rotate8(line, column, 1.0f, other, x[v]);
                     const int64_t element = row * COLUMNS + column;
                     if (out) store8(out + element, x[v]);
                     largest = Largest::join(largest, codes.write8(element, x[v]));
                 }
             });
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_rotate)

// partial: the block's sums for the bias; of_norms: the same of columns for the weights of norms.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_rotate_gradient(const RotateGradient op, Out<float> partial, Out<float> of_norms) {
    wait_for_launches();
    const Float* from = op.gradient;
    GradientSink sink{op.dx.floats, op.dx.rounded};
#if NORMED
    const Float* input = op.x;
    ColumnSums norm_sums;
#endif
    for_rows(op.rows, row_loader(from),
             [&](int64_t row, bool inside, const PackedRow<Float>& packed) {
                 Values g = {};
                 unpack(packed, inside, g);
                 const float* line =
                     op.rotation.table + (inside ? op.rotation.positions[row] * ROTATED : 0);
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!inside || !has(v) || !rotates(column_of(v))) continue;
                     float other[kVector];
                     load8(from + row * COLUMNS + partner(column_of(v)), other);
                     rotate8(line, column_of(v), -1.0f, other, g[v]);
                 }
#if NORMED
                 EachVector along = {}, rstd = {};
                 Values normalised = {};
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!inside || !has(v) || !in_head(column_of(v))) continue;
                     const int column = column_of(v);
                     rstd[v] = op.norms.rstd[row * HEADS + column / WIDTH];
                     load8(input + row * COLUMNS + column, normalised[v]);
                     float weight[kVector], product[kVector];
                     load8(weight_of(op.norms, op.rotation.queries, column), weight);
#pragma unroll
                     for (int i = 0; i < kVector; ++i) {
                         normalised[v][i] *= rstd[v];
                         product[i] = g[v][i] * normalised[v][i];
                         g[v][i] *= weight[i];
                         along[v] += g[v][i] * normalised[v][i];
                     }
                     norm_sums.add(v, product);
                 }
                 head_sums(along);
#pragma unroll
                 for (int v = 0; v < kVectors; ++v) {
                     if (!has(v) || !in_head(column_of(v))) continue;
                     const float projection = along[v] / WIDTH;
#pragma unroll
                     for (int i = 0; i < kVector; ++i)
                         g[v][i] = rstd[v] * (g[v][i] - normalised[v][i] * projection);
                 }
#endif
                 sink.add(row, inside, g);
             });
    sink.bias_sums.write(partial + blockIdx.x * (COLUMNS + kPadding));
#if NORMED
    norm_sums.write(of_norms + blockIdx.x * (COLUMNS + kPadding));
#endif
}
LSQ_EXPORT(lsq_rotate_gradient)
