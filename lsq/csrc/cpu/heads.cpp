// Rows of a product to heads and back. Row t * B + b of [T * B, P * N * D] holds P parts of N heads of D columns.
#include "rows.h"

using namespace lsq;

// y product [rows, parts * heads * width] -> up to three tensors [B, N, T, D]; the first is multiplied by `factor`.
LSQ_EXPORT void lsq_split_heads(const void* y, int64_t kind, const float* y_scale, const float* bias, float* first,
                                float* second, float* third, float factor, int64_t parts, int64_t rows, int64_t batch,
                                int64_t heads, int64_t width) {
    const Product product{y, kind, y_scale};
    float* outputs[3] = {first, second, third};
    const int64_t n = parts * heads * width, time = rows / batch;
#pragma omp parallel
    {
        Scratch scratch(n);
        float* x = scratch.a.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t t = row / batch, b = row % batch;
            product.read(row, n, x);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) x[i] += bias[i];
#pragma omp simd
            for (int64_t i = 0; i < heads * width; ++i) x[i] *= factor;
            for (int64_t part = 0; part < parts; ++part) {
                for (int64_t head = 0; head < heads; ++head) {
                    std::memcpy(outputs[part] + ((b * heads + head) * time + t) * width,
                                x + (part * heads + head) * width, width * sizeof(float));
                }
            }
        }
    }
}

// Gradients of those tensors -> gradient of the product, dclip of y [1], dbias [parts * heads * width].
LSQ_EXPORT void lsq_split_heads_backward(const float* first, const float* second, const float* third, float factor,
                                         int64_t parts, const void* y, int64_t, const float*, const uint8_t* clipped,
                                         const float* error, float clip_factor, const float* weight_scale,
                                         const int64_t* key, int64_t stream, void* dy, float* row_scale, float* dclip,
                                         float* dbias, int64_t rows, int64_t batch, int64_t heads, int64_t width) {
    const float* inputs[3] = {first, second, third};
    const int64_t n = parts * heads * width, time = rows / batch;
    const StraightThrough straight{static_cast<const int8_t*>(y), clipped, error};
    const GradientSink sink{dy, row_scale, weight_scale, key, stream};
    const Blocks blocks(rows);
    ColumnSums bias_sums(blocks.count, n, dbias);
    std::vector<double> clip_sums(blocks.count, 0.0);
#pragma omp parallel
    {
        Scratch scratch(n);
        float* g = scratch.a.data();
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                const int64_t t = row / batch, b = row % batch;
                for (int64_t part = 0; part < parts; ++part) {
                    for (int64_t head = 0; head < heads; ++head) {
                        std::memcpy(g + (part * heads + head) * width,
                                    inputs[part] + ((b * heads + head) * time + t) * width, width * sizeof(float));
                    }
                }
#pragma omp simd
                for (int64_t i = 0; i < heads * width; ++i) g[i] *= factor;
                bias_sums.add(block, g);
                clip_sums[block] += straight.apply(row * n, n, g);
                sink.write(row, n, g, scratch.words.data());
            }
        }
    }
    bias_sums.write(dbias);
    write_sum(clip_sums, clip_factor, dclip);
}

// context [B, N, T, D] -> rows [T * B, N * D] as codes under `clip` (largest > 0), or as float.
LSQ_EXPORT void lsq_merge_heads(const float* context, const float* clip, int64_t largest, void* out, float* scale,
                                uint8_t* clipped, float* error, int64_t rows, int64_t batch, int64_t heads,
                                int64_t width) {
    const int64_t n = heads * width, time = rows / batch;
    const float q = static_cast<float>(largest);
    const Rounding rounding{static_cast<int8_t*>(out), clipped, error};
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        Scratch scratch(n);
        float* x = scratch.a.data();
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t t = row / batch, b = row % batch;
            for (int64_t head = 0; head < heads; ++head) {
                std::memcpy(x + head * width, context + ((b * heads + head) * time + t) * width, width * sizeof(float));
            }
            if (largest) {
                missing |= rounding.round(row * n, n, x, clip[0], q, scratch.b.data(), scratch.flags.data());
            } else {
                std::memcpy(static_cast<float*>(out) + row * n, x, n * sizeof(float));
            }
        }
    }
    if (largest) scale[0] = poisoned(clip[0] / q, missing);
}
