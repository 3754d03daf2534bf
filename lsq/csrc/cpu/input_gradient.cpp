// What follows the product for the gradient of an input; lsq/ops/input_gradient.py has the formulas.
#include "loops.h"

using namespace lsq;

namespace {

constexpr int64_t kStripe = 256;   // columns that a thread adds up at a time

// gradient *= activation', of row `row`, which starts at a byte of `positive`.
void undo_activation(const Nonlinearity& end, int64_t row, int64_t n, float* gradient) {
    const int64_t first = row * n;
    if (end.activation == Activation::relu) {
        const uint8_t* positive = end.positive + first / 8;
        int64_t i = 0;
        for (; i + 8 <= n; i += 8) {
            const uint32_t eight = positive[i / 8];
#pragma omp simd
            for (int64_t j = 0; j < 8; ++j) gradient[i + j] = eight & (1u << j) ? gradient[i + j] : 0.0f;
        }
        for (; i < n; ++i) gradient[i] = positive[i / 8] >> (i % 8) & 1 ? gradient[i] : 0.0f;
    } else if (end.slope) {
        const int8_t* slope = end.slope + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= slope_of(slope[i]);
    } else if (end.before) {
        const float* before = end.before + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= gelu_slope(before[i]);
    }
}

// Row `row` of the product, int32 sums or floats, becomes the gradient g [n]. -> its part of the clip's gradient
float finished_row(const ProjectInputGradient& op, int64_t row, const void* product, float* g, uint32_t* words) {
    const int64_t n = op.columns;
    if (op.gradient.codes) {
        const int32_t* sums = static_cast<const int32_t*>(product);
        const float scale = op.gradient.scale[row];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) g[i] = static_cast<float>(sums[i]) * scale;
    } else if (g != product) {
        std::memcpy(g, product, n * sizeof(float));
    }
    const float clip_sum = straight_through(op.x, row * n, n, g);
    apply(op.nonlinearity.dropout, row * n, n, g, words);
    undo_activation(op.nonlinearity, row, n, g);
    if (op.added) {
        const float* added = op.added + row * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) g[i] += added[i];
    }
    return clip_sum;
}

}  // namespace

// Rows [first, first + rows) of the product [rows, K]: int32 sums, or floats, which may lie where dx is. Blocks come in
// order. -> dx or its codes, clip_sums [M], and partial [ceil(M / part_rows), K] where the sum over rows is wanted.
LSQ_EXPORT void lsq_end_input_gradient(
    const ProjectInputGradient& op, const void* product, float* partial, float* clip_sums, int64_t first,
    int64_t rows) {
    const int64_t n = op.columns, end = first + rows, step = op.part_rows;
#pragma omp parallel
    {
        Scratch scratch(n);
        uint32_t* words = scratch.words.data();
#pragma omp for schedule(static)
        for (int64_t part = first / step; part <= (end - 1) / step; ++part) {
            float* sum = partial + part * n;
            for (int64_t row = std::max(first, part * step); row < std::min(end, (part + 1) * step); ++row) {
                const void* line = static_cast<const char*>(product) + (row - first) * n * sizeof(float);
                float* g = op.dx ? op.dx + row * n : scratch.a.data();
                clip_sums[row] = finished_row(op, row, line, g, words);
                if (op.sum && row % step == 0) {
                    std::memcpy(sum, g, n * sizeof(float));
                } else if (op.sum) {
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) sum[i] += g[i];
                }
                if (op.rounded.codes) round_row(op.rounded, row, n, g, words);
            }
        }
    }
}

// Adds up what the blocks have left.
LSQ_EXPORT void lsq_finish_input_gradient(
    const ProjectInputGradient& op, const float* partial, const float* clip_sums) {
    const int64_t n = op.columns, parts = (op.rows + op.part_rows - 1) / op.part_rows;
    if (op.sum) {
#pragma omp parallel for schedule(static)
        for (int64_t begin = 0; begin < n; begin += kStripe) {
            const int64_t end = std::min(begin + kStripe, n);
            std::fill(op.sum + begin, op.sum + end, 0.0f);
            for (int64_t part = 0; part < parts; ++part) {
#pragma omp simd
                for (int64_t i = begin; i < end; ++i) op.sum[i] += partial[part * n + i];
            }
        }
    }
    if (op.dclip) {
        double sum = 0.0;
        for (int64_t row = 0; row < op.rows; ++row) sum += clip_sums[row];
        op.dclip[0] = static_cast<float>(sum * op.x.clip_factor);
    }
}
