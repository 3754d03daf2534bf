// What the kernels of the vocabulary's loss share: sums over logits of a row, and what the loss makes of a whole row.
//
// Rows keep a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
#pragma once

#include "reduce.cuh"

namespace lsq {

// Nothing above minus infinity: any finite shift gives exp = 0.
__device__ __forceinline__ float shift_of(float largest) { return largest == -infinity() ? 0.0f : largest; }

// Puts `value` behind the first `words` of eight.
__device__ __forceinline__ void fill_up(int words, float value, float (&x)[kVector]) {
    if (words >= kVector) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < words ? x[i] : value;
}

// Of some logits of a row: the largest, of exp(logit - largest) the sum and, without the target, the largest magnitude of
// a multiple by the weight's scale, of codes alone; and the sum of the logits.
struct alignas(16) LogitSums {
    float largest = -infinity(), sum = 0.0f, scaled = 0.0f, total = 0.0f;

    // Takes `highest`, which is not below the largest, for what exponentials are relative to.
    __device__ __forceinline__ void raise(float highest) {
        if (!(highest > largest)) return;
        const float factor = bounded_exponential(largest - highest);
        sum *= factor;
        scaled *= factor;
        largest = highest;
    }

    __device__ __forceinline__ void add(const LogitSums& other) {
        raise(Maximum::join(other.largest, largest));
        const float factor = bounded_exponential(other.largest - shift_of(largest));
        sum += other.sum * factor;
        scaled = float_of(Largest::join(magnitude_of(scaled), magnitude_of(other.scaled * factor)));
        total += other.total;
    }
};

// Writes what the loss makes of row m. `chosen`: the logit of its target, NaN for a word outside of the vocabulary.
// -> log of the normaliser
__device__ __forceinline__ float write_losses(
    const VocabularyLoss& op, int64_t m, const LogitSums& row, float chosen, float* losses, float* nlls) {
    const Prediction& given = op.prediction;
    const bool counted = given.target[m] != given.padding;
    const float normaliser = row.largest + logf(row.sum);
    const float missed = counted ? normaliser - chosen : 0.0f;
    const float smooth = static_cast<float>(given.vocabulary) * normaliser - row.total;
    nlls[m] = missed;
    losses[m] = counted ? given.target_weight * missed + given.each * smooth : 0.0f;
    if (op.normaliser) op.normaliser[m] = normaliser;
    return normaliser;
}

// What the gradient of a row weighs in all.
__device__ __forceinline__ float gradient_factor(const Prediction& given) {
    return given.target_weight + given.each * static_cast<float>(given.vocabulary);
}

}  // namespace lsq
