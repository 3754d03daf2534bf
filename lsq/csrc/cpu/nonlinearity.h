// The epilogue of a product, undone in a row of the gradient.
#pragma once

#include "activation_kinds.h"
#include "rows.h"

namespace lsq {

// gradient *= activation', of row `row`.
inline void undo_activation(const Nonlinearity& end, int64_t row, int64_t n, float* gradient) {
    const int64_t first = row * n;
    if (end.activation == Activation::relu) {
        keep_where(end.positive, first, n, gradient);
    } else if (end.slope) {
        const int8_t* slope = end.slope + first;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= slope_of(slope[i]);
    } else if (end.before) {
        const float* before = end.before + first;
        with_activation(end.activation, [=](auto kind) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) gradient[i] *= activation_slope<kind>(before[i]);
        });
    }
}

// The same after the dropout behind it; words: scratch for n + 4 numbers.
inline void undo(const Nonlinearity& end, int64_t row, int64_t n, float* gradient,
                 uint32_t* words) {
    apply(end.dropout, row * n, n, gradient, words);
    undo_activation(end, row, n, gradient);
}

}  // namespace lsq
