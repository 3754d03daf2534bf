// Activations and their slopes; lsq/ops/nonlinearity.py is the reference. Included after
// operations.h.
#pragma once

namespace lsq {

template <Activation KIND>
LSQ_INLINE float activated(float x) {
    if constexpr (KIND == Activation::relu) return relu(x);
    if constexpr (KIND == Activation::gelu) return gelu(x);
    if constexpr (KIND == Activation::gelu_tanh) return gelu_tanh(x);
    if constexpr (KIND == Activation::silu) return silu(x);
    if constexpr (KIND == Activation::squared_relu) return squared_relu(x);
    return x;
}

// Its derivative; of ReLU 0 at 0.
template <Activation KIND>
LSQ_INLINE float activation_slope(float x) {
    if constexpr (KIND == Activation::relu) return x > 0.0f ? 1.0f : 0.0f;
    if constexpr (KIND == Activation::gelu) return gelu_slope(x);
    if constexpr (KIND == Activation::gelu_tanh) return gelu_tanh_slope(x);
    if constexpr (KIND == Activation::silu) return silu_slope(x);
    if constexpr (KIND == Activation::squared_relu) return squared_relu_slope(x);
    return 1.0f;
}

}  // namespace lsq
