// What looks at each value by itself: the float values of a product, sums of two tensors, copies.
//
// M rows, N columns. -DUNIT says how many values are read at a time: 8, or 1 where rows are no multiple of 8.
#include "patch.cuh"
#include "product.cuh"

#ifndef UNIT
#define UNIT 8
#endif

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t thread_of_grid() {
    return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

}  // namespace

// y [M, N], its scale, bias [N] or null -> out [M, N].
LSQ_KERNEL __launch_bounds__(kPatchThreads) lsq_read_product(
    In<ProductValue> y, In<float> y_scale, In<float> bias, Out<Float> out, int64_t rows, int64_t columns) {
    const int64_t row = patch_row(), column = patch_column();
    if (column >= columns) return;
    const ProductValue* values = y + (row * columns + column);
    Float* results = out + (row * columns + column);
#if UNIT == 8
    Packed<ProductValue> product[kPatchRows];
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r < rows) product[r] = load_packed(values + r * columns);
    }
#pragma unroll
    for (int r = 0; r < kPatchRows; ++r) {
        if (row + r >= rows) continue;
        float x[kVector];
        read_biased8(product[r], y_scale, bias, column, x);
        store8(results + r * columns, x);
    }
#else
    const int count = static_cast<int>(min(columns - column, static_cast<int64_t>(kVector)));
    for (int r = 0; r < kPatchRows && row + r < rows; ++r) {
        for (int i = 0; i < count; ++i) {
            const float x = read_product(values[r * columns + i], y_scale, column + i);
            results[r * columns + i] = narrow<Float>(bias ? x + bias[column + i] : x);
        }
    }
#endif
}
LSQ_EXPORT(lsq_read_product)

// a, b -> out = a + b, `count` values; the last thread takes what is left over of eights.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_add(In<Float> a, In<Float> b, Out<Float> out, int64_t count) {
    const Float *left = a, *right = b;
    Float* sum = out;
    const int64_t begin = thread_of_grid() * kVector;
    if (begin + kVector <= count) {
        float x[kVector], y[kVector];
        load8(left + begin, x);
        load8(right + begin, y);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] += y[i];
        store8(sum + begin, x);
    } else {
        for (int64_t i = begin; i < count; ++i) sum[i] = narrow<Float>(widen(left[i]) + widen(right[i]));
    }
}
LSQ_EXPORT(lsq_add)

// before [rows, past], now [rows, step] -> out [rows, past + step]; both widths are multiples of UNIT.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_append(
    In<Float> before, In<Float> now, Out<Float> out, int64_t rows, int64_t past, int64_t step) {
    const int64_t begin = thread_of_grid() * UNIT, width = past + step;
    if (begin >= rows * width) return;
    const int64_t row = begin / width, column = begin - row * width;
    const Float* from = column < past ? before + row * past + column : now + row * step + (column - past);
#if UNIT == 8
    store_packed(out + begin, load_packed(from));
#else
    out[begin] = *from;
#endif
}
LSQ_EXPORT(lsq_append)
