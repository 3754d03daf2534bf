// The gradient of the float values of a product. M rows, N = COLUMNS columns; lsq/ops/read.py is the reference. The
// values themselves, whose rows may be wider than a block can hold, are read in linear.cu.
#include "gradient.cuh"

// gradient [M, N], and codes, clipped bits, error of the product or null
// -> dy [M, N] (with row_scale [M] if -DROUNDED), partial sums for dbias and dclip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming) lsq_read_product_backward(
    In<Float> gradient, In<int8_t> y, In<uint8_t> clipped, In<float> error, In<float> weight_scale, In<int64_t> key,
    Out<GradientValue> dy, Out<float> row_scale, Out<float> partial, int64_t rows, int64_t gradient_stream) {
    const Float* upstream = gradient;
    ProductGradient result{{y, clipped, error}, {dy, row_scale, weight_scale, key, gradient_stream}};
    const auto load = [&](int64_t row) {
        PackedRow<Float> loaded;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) loaded.part[v] = load_packed(upstream + row * COLUMNS + column_of(v));
        }
        return loaded;
    };
    for_rows(rows, load, [&](int64_t row, bool inside, const PackedRow<Float>& loaded) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (inside && has(v)) unpack8(loaded.part[v], g[v]);
        }
        result.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    result.write_sums(sums, sums + COLUMNS);
}
LSQ_EXPORT(lsq_read_product_backward)
