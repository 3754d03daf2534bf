// Embeds words and positions, and scatters the gradient.
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(Embed, op) {
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        const int64_t token = op.tokens[row];
        const float *word = op.weight + token * n, *position = op.table + op.positions[row] * n;
        const float scale = op.scale;
        float* x = op.x + row * n;
        if (token == op.padding) {
            std::fill(x, x + n, 0.0f);
            return 0;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = word[i] * scale + position[i];
        apply(op.dropout, row * n, n, x, scratch.words.data());
        return 0;
    });
}

// Each thread owns a strip of columns and adds rows in order.
LSQ_OPERATION(EmbedGradient, op) {
    constexpr int64_t kStrip = 64;
    const int64_t n = op.columns, strips = (n + kStrip - 1) / kStrip;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < op.vocabulary; ++row)
        std::memset(op.dweight + row * n, 0, n * sizeof(float));
    if (op.dtable) std::memset(op.dtable, 0, op.table_rows * n * sizeof(float));
#pragma omp parallel for schedule(static)
    for (int64_t strip = 0; strip < strips; ++strip) {
        const int64_t begin = strip * kStrip, width = std::min(kStrip, n - begin);
        const float scale = op.scale;
        float g[kStrip];
        uint32_t words[kStrip + 8];
        for (int64_t row = 0; row < op.rows; ++row) {
            const int64_t token = op.tokens[row];
            if (token == op.padding) continue;
            const int64_t first = row * n + begin;
            std::memcpy(g, op.gradient + first, width * sizeof(float));
            apply(op.dropout, first, width, g, words);
            float* word = op.dweight + token * n + begin;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) word[i] += g[i] * scale;
            if (!op.dtable) continue;
            float* position = op.dtable + op.positions[row] * n + begin;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) position[i] += g[i];
        }
    }
}
