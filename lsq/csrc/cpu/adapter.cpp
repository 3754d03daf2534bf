// What adapters read of a product's input, and what goes back to it.
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(AdapterInput, op) {
    const int64_t n = op.columns;
    const Coded& coded = op.x.coded;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float* values = op.values + row * n;
        if (coded.codes) {
            const int8_t* codes = coded.codes + row * n;
            const float scale = coded.scale[coded.by_row ? row : 0];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(codes[i]) * scale;
        } else {
            std::memcpy(values, op.x.floats + row * n, n * sizeof(float));
        }
        apply(op.dropout, row * n, n, values, scratch.words.data());
        return 0;
    });
}

LSQ_OPERATION(AdapterInputGradient, op) {
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float* dx = op.dx + row * n;
        std::memcpy(dx, op.gradient + row * n, n * sizeof(float));
        apply(op.dropout, row * n, n, dx, scratch.words.data());
        if (op.added) {
            const float* added = op.added + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) dx[i] += added[i];
        }
        return 0;
    });
}
