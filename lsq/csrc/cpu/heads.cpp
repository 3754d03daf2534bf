// Rows of a product to heads and back. Row t * B + b of [T * B, P * N * D] holds P parts of N heads of D columns.
#include "loops.h"

using namespace lsq;

// y product [rows, parts * heads * width] -> up to three tensors [B, N, T, D]; the first is multiplied by `factor`.
LSQ_EXPORT void lsq_split_heads(const void* y, int64_t kind, const float* y_scale, const float* bias, float* first,
                                float* second, float* third, float factor, int64_t parts, int64_t rows, int64_t batch,
                                int64_t heads, int64_t width) {
    const Product product{y, kind, y_scale};
    float* outputs[3] = {first, second, third};
    const int64_t n = parts * heads * width, time = rows / batch;
    for_rows(rows, n, [&](int64_t row, Scratch& scratch) {
        float* x = scratch.a.data();
        const int64_t t = row / batch, b = row % batch;
        product.read(row, n, x);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
#pragma omp simd
        for (int64_t i = 0; i < heads * width; ++i) x[i] *= factor;
        for (int64_t part = 0; part < parts; ++part) {
            for (int64_t head = 0; head < heads; ++head) {
                std::memcpy(outputs[part] + ((b * heads + head) * time + t) * width, x + (part * heads + head) * width,
                            width * sizeof(float));
            }
        }
        return 0;
    });
}

// Gradients of those tensors -> gradient of the product, dclip of y [1], dbias [parts * heads * width].
LSQ_EXPORT void lsq_split_heads_backward(const float* first, const float* second, const float* third, float factor,
                                         int64_t parts, const void* y, int64_t, const float*, const uint8_t* clipped,
                                         const float* error, float clip_factor, const float* weight_scale,
                                         const int64_t* key, int64_t stream, void* dy, float* row_scale, float* dclip,
                                         float* dbias, int64_t rows, int64_t batch, int64_t heads, int64_t width) {
    const float* inputs[3] = {first, second, third};
    const int64_t n = parts * heads * width, time = rows / batch;
    const Blocks blocks(rows);
    ProductGradient result(blocks, n, {static_cast<const int8_t*>(y), clipped, error},
                           {dy, row_scale, weight_scale, key, stream}, dbias);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float* g = scratch.a.data();
        const int64_t t = row / batch, b = row % batch;
        for (int64_t part = 0; part < parts; ++part) {
            for (int64_t head = 0; head < heads; ++head) {
                std::memcpy(g + (part * heads + head) * width, inputs[part] + ((b * heads + head) * time + t) * width,
                            width * sizeof(float));
            }
        }
#pragma omp simd
        for (int64_t i = 0; i < heads * width; ++i) g[i] *= factor;
        result.add(block, row, g, scratch);
    });
    result.finish(clip_factor, dclip, dbias);
}

// context [B, N, T, D] -> rows [T * B, N * D] as codes under `clip` (largest > 0), or as float.
LSQ_EXPORT void lsq_merge_heads(const float* context, const float* clip, int64_t largest, void* out, float* scale,
                                uint8_t* clipped, float* error, int64_t rows, int64_t batch, int64_t heads,
                                int64_t width) {
    const int64_t n = heads * width, time = rows / batch;
    const RowSink sink{out, clip, largest, scale, clipped, error};
    sink.finish(for_rows(rows, n, [&](int64_t row, Scratch& scratch) {
        float* x = scratch.a.data();
        const int64_t t = row / batch, b = row % batch;
        for (int64_t head = 0; head < heads; ++head) {
            std::memcpy(x + head * width, context + ((b * heads + head) * time + t) * width, width * sizeof(float));
        }
        return sink.write(row, n, x, scratch);
    }));
}
