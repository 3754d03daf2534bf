// Rounding of activations, weights and the sums of integer products; dequantising a product by itself.
#include "loops.h"

using namespace lsq;

// x [numel], clip [1] -> codes, scale [1], clipped bits, error or null.
LSQ_EXPORT void lsq_quantize(const float* x, const float* clip, int8_t* codes, float* scale, uint8_t* clipped,
                             float* error, int64_t numel, int64_t largest) {
    constexpr int64_t kChunk = 2048;
    const float q = static_cast<float>(largest);
    const Rounding rounding{codes, clipped, error};
    const int64_t chunks = (numel + kChunk - 1) / kChunk;
    int missing = 0;
#pragma omp parallel for schedule(static) reduction(| : missing)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        float scaled[kChunk];
        uint8_t outside[kChunk];
        const int64_t first = chunk * kChunk;
        missing |= rounding.round(first, std::min(kChunk, numel - first), x + first, clip[0], q, scaled, outside);
    }
    scale[0] = poisoned(clip[0] / q, missing);
}

// weight [valid, n], clip [valid] or [1] -> codes [rows, n], scale [rows]; rows from `valid` on are padding.
LSQ_EXPORT void lsq_quantize_weight(const float* weight, const float* clip, int64_t clips, int8_t* codes, float* scale,
                                    int64_t valid, int64_t rows, int64_t n, int64_t largest) {
    const float q = static_cast<float>(largest);
    const Rounding rounding{codes, nullptr, nullptr};
    std::vector<uint8_t> missing(valid, 0);
#pragma omp parallel
    {
        std::vector<float> scaled(n);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            if (row >= valid) {
                std::memset(codes + row * n, 0, n);
                scale[row] = 1.0f;
                continue;
            }
            const float step = clip[clips > 1 ? row : 0] / q;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) scaled[i] = weight[row * n + i] / step;
            missing[row] = rounding.write(row * n, n, scaled.data(), nullptr, q);
            scale[row] = poisoned(step, missing[row]);
        }
    }
    if (clips == 1 && any(missing)) {
        std::fill(scale, scale + valid, std::numeric_limits<float>::quiet_NaN());
    }
}

// sums int32 [rows, n] of a block that begins at row `first` -> codes: rint(clamp(sum * alpha[n])); poisons scale [1].
LSQ_EXPORT void lsq_round_sums(const int32_t* sums, const float* alpha, int8_t* codes, float* scale, uint8_t* clipped,
                               float* error, int64_t first, int64_t rows, int64_t n, int64_t largest) {
    const float q = static_cast<float>(largest);
    const Rounding rounding{codes, clipped, error};
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        std::vector<float> scaled(n);
        std::vector<uint8_t> outside(n);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int32_t* sum = sums + row * n;
            for (int64_t i = 0; i < n; ++i) scaled[i] = static_cast<float>(sum[i]) * alpha[i];
            for (int64_t i = 0; i < n; ++i) outside[i] = std::fabs(scaled[i]) > q;
            missing |= rounding.write((first + row) * n, n, scaled.data(), outside.data(), q);
        }
    }
    scale[0] = poisoned(scale[0], missing);
}

// y product [rows, n], bias [n] or null -> out float [rows, n].
LSQ_EXPORT void lsq_read_product(const void* y, int64_t kind, const float* y_scale, const float* bias, float* out,
                                 int64_t rows, int64_t n) {
    const Product product{y, kind, y_scale};
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        float* line = out + row * n;
        product.read(row, n, line);
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) line[i] += bias[i];
        }
    }
}

// Gradient [rows, n] of the values read -> gradient of the product, dclip [1], dbias [n].
LSQ_EXPORT void lsq_read_product_backward(const float* gradient, const void* y, int64_t, const float*,
                                          const uint8_t* clipped, const float* error, float factor,
                                          const float* weight_scale, const int64_t* key, int64_t stream, void* dy,
                                          float* row_scale, float* dclip, float* dbias, int64_t rows, int64_t n) {
    const Blocks blocks(rows);
    ProductGradient result(blocks, n, {static_cast<const int8_t*>(y), clipped, error},
                           {dy, row_scale, weight_scale, key, stream}, dbias);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        std::memcpy(scratch.a.data(), gradient + row * n, n * sizeof(float));
        result.add(block, row, scratch.a.data(), scratch);
    });
    result.finish(factor, dclip, dbias);
}
