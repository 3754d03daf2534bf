// What follows the backward products of an integer product; see lsq/ops/linear_gradient.py for the formulas.
#include "loops.h"

using namespace lsq;

// A block of dx, rows [first, first + rows): int32 with row_scale, or float (then product == dx + first * n).
// Masks it by `clipped` and adds its part of the clip's gradient to dclip [1].
LSQ_EXPORT void lsq_straight_through(const void* product, const float* row_scale, const int8_t* codes,
                                     const uint8_t* clipped, const float* error, float factor, float* dx, float* dclip,
                                     int64_t first, int64_t rows, int64_t n) {
    const StraightThrough straight{codes, clipped, error};
    const Blocks blocks(rows);
    std::vector<double> clip_sums(blocks.count, 0.0);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks.count; ++block) {
        for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
            float* out = dx + (first + row) * n;
            if (row_scale) {
                const int32_t* sums = static_cast<const int32_t*>(product) + row * n;
                const float scale = row_scale[first + row];
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(sums[i]) * scale;
            }
            clip_sums[block] += straight.apply((first + row) * n, n, out);
        }
    }
    float sum;
    write_sum(clip_sums, factor, &sum);
    dclip[0] += sum;
}

// codes int8 [m, n] * row_scale [m] -> rounded per column at random [m, n] with column_scale [n].
LSQ_EXPORT void lsq_round_columns(const int8_t* codes, const float* row_scale, const int64_t* key, int64_t stream,
                                  int8_t* rounded, float* column_scale, int64_t m, int64_t n) {
    const Blocks blocks(m);
    std::vector<float> largest(blocks.count * n, 0.0f);
    std::vector<uint8_t> missing(blocks.count, 0);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks.count; ++block) {
        float* column = largest.data() + block * n;
        for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
            const float scale = row_scale[row];
            missing[block] |= !(std::fabs(scale) < std::numeric_limits<float>::infinity());
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const float magnitude = std::fabs(static_cast<float>(codes[row * n + i]) * scale);
                column[i] = magnitude > column[i] ? magnitude : column[i];
            }
        }
    }
    std::vector<float> reciprocal(n);
    const bool poison = any(missing);
    for (int64_t i = 0; i < n; ++i) {
        float overall = 0.0f;
        for (int64_t block = 0; block < blocks.count; ++block) overall = std::max(overall, largest[block * n + i]);
        const GradientScale s = gradient_scale(poison ? std::numeric_limits<float>::quiet_NaN() : overall);
        column_scale[i] = s.scale;
        reciprocal[i] = s.reciprocal;
    }
#pragma omp parallel
    {
        std::vector<uint32_t> words(n + 8);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) {
            const int64_t offset = row * n % 4;
            philox(key[0], stream, row * n - offset, n + offset, words.data());
            const uint32_t* drawn = words.data() + offset;
            const float scale = row_scale[row], *factor = reciprocal.data();
            const int8_t* line = codes + row * n;
            int8_t* out = rounded + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                out[i] = round_at_random(static_cast<float>(line[i]) * scale * factor[i], drawn[i]);
            }
        }
    }
}

// Rows [first, first + rows) of a weight's gradient. product [rows, n]: int32 with column_scale [n] and weight_scale, or
// float (column_scale null). -> dweight masked by |weight| <= clip, and what each row adds to the gradient of its
// clip; `in_range` adds LSQ's term.
LSQ_EXPORT void lsq_weight_straight_through(const void* product, const float* column_scale, const float* weight_scale,
                                            const float* weight, const float* clip, int64_t clips, int64_t largest,
                                            int64_t in_range, float* dweight, float* clip_sums, int64_t first,
                                            int64_t rows, int64_t n) {
    const float q = static_cast<float>(largest);
#pragma omp parallel for schedule(static)
    for (int64_t block_row = 0; block_row < rows; ++block_row) {
        const int64_t row = first + block_row;
        float* out = dweight + row * n;
        const float* w = weight + row * n;
        if (column_scale) {
            const int32_t* line = static_cast<const int32_t*>(product) + block_row * n;
            const float scale = weight_scale[row];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(line[i]) * column_scale[i] / scale;
        } else {
            std::memcpy(out, static_cast<const float*>(product) + block_row * n, n * sizeof(float));
        }
        const float limit = clip[clips > 1 ? row : 0];
        float sum = 0.0f;
        if (in_range) {
            const float step = limit / q;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; ++i) {
                const float rounded = std::nearbyint(w[i] / step) * step;
                sum += std::fabs(w[i]) <= limit ? out[i] * (rounded - w[i]) / limit : 0.0f;
            }
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const bool outside = std::fabs(w[i]) > limit;
            const float signed_gradient = w[i] > 0.0f ? out[i] : -out[i];
            sum += outside ? signed_gradient : 0.0f;
            out[i] = outside ? 0.0f : out[i];
        }
        clip_sums[row] = sum;
    }
}
