// What stands around the product for the gradient of a weight; lsq/ops/weight_gradient.py has the formulas.
#include "loops.h"

using namespace lsq;

// The codes of x [M, K] times the row scales of the gradient -> codes [M, K], rounded per column at random, and
// column_scale [K], with the scale of x in it.
LSQ_EXPORT void lsq_round_columns(const ProjectWeightGradient& op, int8_t* rounded, float* column_scale) {
    const int8_t* codes = op.x.coded.codes;
    const float* row_scale = op.gradient.scale;
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
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
    const float q = op.gradient.largest;
    const bool poison = any(missing);
    for (int64_t i = 0; i < n; ++i) {
        float overall = 0.0f;
        for (int64_t block = 0; block < blocks.count; ++block) overall = std::max(overall, largest[block * n + i]);
        const GradientScale s = gradient_scale(poison ? not_a_number() : overall, q);
        column_scale[i] = s.scale * op.x.coded.scale[0];
        reciprocal[i] = s.reciprocal;
    }
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        const int64_t offset = row * n % 4;
        philox(op.key[0], op.subsequence, row * n - offset, n + offset, scratch.words.data());
        const uint32_t* drawn = scratch.words.data() + offset;
        const float scale = row_scale[row], most = q, *factor = reciprocal.data();
        const int8_t* line = codes + row * n;
        int8_t* out = rounded + row * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            out[i] = round_at_random(static_cast<float>(line[i]) * scale * factor[i], drawn[i], most);
        }
        return 0;
    });
}

// Rows [first, first + rows) of the product [rows, K]: int32 sums with column_scale [K], or floats where that is null.
// -> dweight, and sums [N]: what each row adds to the gradient of its clip.
LSQ_EXPORT void lsq_end_weight_gradient(
    const ProjectWeightGradient& op, const void* product, const float* column_scale, float* sums, int64_t first,
    int64_t rows) {
    const int64_t n = op.columns;
#pragma omp parallel for schedule(static)
    for (int64_t row = first; row < first + rows; ++row) {
        const void* from = static_cast<const char*>(product) + (row - first) * n * sizeof(float);
        float* out = op.dweight + row * n;
        const float* w = op.weight.values + row * n;
        if (column_scale) {
            const int32_t* line = static_cast<const int32_t*>(from);
            const float scale = op.weight.scale[row];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(line[i]) * column_scale[i] / scale;
        } else {
            std::memcpy(out, from, n * sizeof(float));
        }
        const float limit = op.weight.clip[op.clips > 1 ? row : 0];
        float sum = 0.0f;
        if (op.lsq) {
            const int8_t* codes = op.weight.codes + row * n;
            const float step = op.weight.scale[row];
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < n; ++i) {
                const float decoded = static_cast<float>(codes[i]) * step;
                sum += std::fabs(w[i]) > limit ? 0.0f : out[i] * (decoded - w[i]) / limit;
            }
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const bool outside = std::fabs(w[i]) > limit;
            const float signed_gradient = w[i] > 0.0f ? out[i] : -out[i];
            sum += outside ? signed_gradient : 0.0f;
            out[i] = outside ? 0.0f : out[i];
        }
        sums[row] = sum;
    }
}

// sums [N] -> dclip.
LSQ_EXPORT void lsq_finish_weight_gradient(const ProjectWeightGradient& op, const float* sums) {
    if (!op.dclip) return;
    const int64_t per_clip = op.weight_rows / op.clips;
    for (int64_t clip = 0; clip < op.clips; ++clip) {
        double sum = 0.0;
        for (int64_t row = clip * per_clip; row < (clip + 1) * per_clip; ++row) sum += sums[row];
        op.dclip[clip] = static_cast<float>(sum * op.clip_factor);
    }
}
