// The epilogue of a product, undone in a row of the gradient.
#pragma once

#include <type_traits>

#include "rows.h"
#include "../include/activations.h"

namespace lsq {

template <Activation KIND>
using Kind = std::integral_constant<Activation, KIND>;

// Calls body(Kind<...>()), in which `kind` is a constant.
template <class Body>
void with_activation(Activation kind, const Body& body) {
    switch (kind) {
        case Activation::none: return body(Kind<Activation::none>());
        case Activation::relu: return body(Kind<Activation::relu>());
        case Activation::gelu: return body(Kind<Activation::gelu>());
        case Activation::gelu_tanh: return body(Kind<Activation::gelu_tanh>());
        case Activation::silu: return body(Kind<Activation::silu>());
        case Activation::squared_relu: return body(Kind<Activation::squared_relu>());
    }
}

// Whether it is cheap enough for a row to go from sums to codes in registers.
constexpr bool is_cut(Activation kind) {
    return kind == Activation::none || kind == Activation::relu;
}

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

// Undoes dropout, then the activation; words: scratch for n + 4 numbers.
inline void undo(const Nonlinearity& end, int64_t row, int64_t n, float* gradient,
                 uint32_t* words) {
    apply(end.dropout, row * n, n, gradient, words);
    undo_activation(end, row, n, gradient);
}

}  // namespace lsq
