// Rows of a product to heads and back. Row t * B + b of [T * B, P * N * D] holds P parts of N heads of D columns.
//
// -DPARTS=P, -DWIDTH=D, -DCOLUMNS=P * N * D; lsq/ops/heads.py is the reference. Where D is a multiple of 8, eight
// neighbouring values belong to one head and move together; otherwise they move one at a time.
#include "gradient.cuh"
#include "product.cuh"

#ifndef PARTS
#define PARTS 1
#endif
#ifndef WIDTH
#define WIDTH 8
#endif

namespace {

constexpr int kHeads = COLUMNS / (PARTS * WIDTH);
static_assert(COLUMNS % (PARTS * WIDTH) == 0, "a row is whole heads");

// One row of the tensors [B, N, T, D], of which there are PARTS.
template <class T>
struct HeadRow {
    T *first, *second, *third;  // where head 0 of the row begins
    int64_t stride;             // from one head to the next: T * D

    __device__ __forceinline__ HeadRow(T* a, T* b, T* c, int64_t row, int64_t batch, int64_t time)
        : stride(time * WIDTH) {
        // 32 bits are enough for rows and a division of 64 bits takes three times as long.
        const uint32_t step = static_cast<uint32_t>(row) / static_cast<uint32_t>(batch);
        const uint32_t sentence = static_cast<uint32_t>(row) - step * static_cast<uint32_t>(batch);
        const int64_t offset = (static_cast<int64_t>(sentence) * kHeads * time + step) * WIDTH;
        first = a + offset, second = b + offset, third = c + offset;
    }

    // Where the value of a column of the row stands.
    __device__ __forceinline__ T* at(int column) const {
        const int head = column / WIDTH % kHeads, part = column / (kHeads * WIDTH);
        T* begin = PARTS == 1 || part == 0 ? first : PARTS == 2 || part == 1 ? second : third;
        return begin + head * stride + column % WIDTH;
    }
};

__device__ __forceinline__ Packed<Float> load_heads8(const HeadRow<const Float>& row, int column) {
    if constexpr (WIDTH % kVector == 0) return load_packed<Float>(row.at(column));
    Packed<Float> packed;
    float x[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = widen(*row.at(column + i));
    pack8(x, packed);
    return packed;
}

__device__ __forceinline__ void store_heads8(const HeadRow<Float>& row, int column, const float (&x)[kVector]) {
    if constexpr (WIDTH % kVector == 0) {
        store8(row.at(column), x);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) *row.at(column + i) = narrow<Float>(x[i]);
    }
}

// The first part is multiplied by `factor`.
__device__ __forceinline__ void scale_first8(int column, float factor, float (&x)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = PARTS == 1 || column + i < kHeads * WIDTH ? x[i] * factor : x[i];
}

}  // namespace

// y [M, P * H], its scale, bias [P * H] or null -> P tensors [B, N, T, D]; the first is multiplied by `factor`.
LSQ_KERNEL __launch_bounds__(kThreads, kLight) lsq_split_heads(
    In<ProductValue> y, In<float> y_scale, In<float> bias, Out<Float> first, Out<Float> second, Out<Float> third,
    int64_t rows, int64_t batch, int64_t time, float factor) {
    const ProductValue* values = y;
    Float *a = first, *b = second, *c = third;
    const int64_t begin = static_cast<int64_t>(kRows) * blockIdx.x + row_in_block();
    for (int64_t row = begin; row < rows; row += kRows * gridDim.x) {
        const HeadRow<Float> heads(a, b, c, row, batch, time);
        Packed<ProductValue> product[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) product[v] = load_packed(values + row * COLUMNS + column_of(v));
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float x[kVector];
            read_biased8(product[v], y_scale, bias, column_of(v), x);
            scale_first8(column_of(v), factor, x);
            store_heads8(heads, column_of(v), x);
        }
    }
}
LSQ_EXPORT(lsq_split_heads)

// P gradients [B, N, T, D], and codes, clipped bits, error of the product or null
// -> dy [M, P * H] (with row_scale [M] if -DROUNDED), partial sums for dbias and dclip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming) lsq_split_heads_backward(
    In<Float> first, In<Float> second, In<Float> third, In<int8_t> y, In<uint8_t> clipped, In<float> error,
    In<float> weight_scale, In<int64_t> key, Out<GradientValue> dy, Out<float> row_scale, Out<float> partial,
    int64_t rows, int64_t batch, int64_t time, int64_t gradient_stream, float factor) {
    const Float *a = first, *b = second, *c = third;
    ProductGradient result{{y, clipped, error}, {dy, row_scale, weight_scale, key, gradient_stream}};
    const auto load = [&](int64_t row) {
        const HeadRow<const Float> heads(a, b, c, row, batch, time);
        PackedRow<Float> gradient;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) gradient.part[v] = load_heads8(heads, column_of(v));
        }
        return gradient;
    };
    for_rows(rows, load, [&](int64_t row, bool inside, const PackedRow<Float>& gradient) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            unpack8(gradient.part[v], g[v]);
            scale_first8(column_of(v), factor, g[v]);
        }
        result.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    result.write_sums(sums, sums + COLUMNS);
}
LSQ_EXPORT(lsq_split_heads_backward)

// context [B, N, T, D] -> rows [M, H], as codes with scale [1], clipped bits, error under clip [1], or as they are.
LSQ_KERNEL __launch_bounds__(kThreads, kMedium) lsq_merge_heads(
    In<Float> context, In<float> clip, Out<Float> out, Out<int8_t> codes, Out<float> scale, Out<uint8_t> clipped,
    Out<float> error, Out<uint32_t> ticket, int64_t rows, int64_t batch, int64_t time, float largest) {
    const Float* values = context;
    const ResultSink sink{out, {codes, clipped, error}, clip, largest};
    bool missing = false;
    const int64_t begin = static_cast<int64_t>(kRows) * blockIdx.x + row_in_block();
    for (int64_t row = begin; row < rows; row += kRows * gridDim.x) {
        const HeadRow<const Float> heads(values, values, values, row, batch, time);
        Packed<Float> packed[kVectors];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) packed[v] = load_heads8(heads, column_of(v));
        }
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float x[kVector];
            unpack8(packed[v], x);
            missing |= sink.write8(row * COLUMNS + column_of(v), x);
        }
    }
    sink.finish<kThreads>(ticket, missing, scale);
}
LSQ_EXPORT(lsq_merge_heads)
