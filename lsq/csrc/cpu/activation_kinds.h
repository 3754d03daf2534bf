// Loops over an activation that is known when they are compiled.
#pragma once

#include <type_traits>

#include "structs.h"
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

}  // namespace lsq
