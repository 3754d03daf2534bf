// What the kernels of the vocabulary's loss share: sums over logits of a row, and what the loss
// makes of a whole row.
//
// Rows keep a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for
// softmax").
#pragma once

#include "reduce.cuh"

namespace lsq {

// Nothing above minus infinity: any finite shift gives exp = 0.
__device__ __forceinline__ float shift_of(float largest) {
    return largest == -infinity() ? 0.0f : largest;
}

// Puts `value` behind the first `words` of eight.
__device__ __forceinline__ void fill_up(int words, float value, float (&x)[kVector]) {
    if (words >= kVector) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < words ? x[i] : value;
}

// Of some words the two largest magnitudes, and the word of the first; of equal ones that of the
// smaller word.
struct TwoLargest {
    float first = 0.0f, second = 0.0f;
    uint32_t word = 0;

    __device__ __forceinline__ void add(const TwoLargest& other) {
        const uint32_t mine = magnitude_of(first), its = magnitude_of(other.first);
        const bool larger = its > mine || (its == mine && other.word < word);
        const uint32_t next = magnitude_of(larger ? other.second : second);
        second = float_of(Largest::join(larger ? mine : its, next));
        first = larger ? other.first : first;
        word = larger ? other.word : word;
    }

    __device__ __forceinline__ TwoLargest times(float factor) const {
        return {first * factor, second * factor, word};
    }
};

// Of some logits of a row: the largest, of exp(logit - largest) the sum, and the sum of the logits.
// Of codes alone: of the words but the target, the largest multiples of exp(logit - largest) by the
// weight's scale.
struct LogitSums {
    float largest = -infinity(), sum = 0.0f, total = 0.0f;
    TwoLargest others;

    // Takes `highest`, which is not below the largest, for what exponentials are relative to.
    __device__ __forceinline__ void raise(float highest) {
        if (!(highest > largest)) return;
        const float factor = bounded_exponential(largest - highest);
        sum *= factor;
        others = others.times(factor);
        largest = highest;
    }

    __device__ __forceinline__ void add(const LogitSums& other) {
        raise(Maximum::join(other.largest, largest));
        const float factor = bounded_exponential(other.largest - shift_of(largest));
        sum += other.sum * factor;
        others.add(other.others.times(factor));
        total += other.total;
    }

    // In two halves of 16 bytes, `apart` of them apart.
    __device__ __forceinline__ void store(float4* to, int64_t apart) const {
        store_words(to, make_uint4(bits_of(largest), bits_of(sum), bits_of(total), others.word));
        store_words(to + apart, make_uint4(bits_of(others.first), bits_of(others.second), 0, 0));
    }

    __device__ __forceinline__ static LogitSums load(const float4* from, int64_t apart) {
        const uint4 one = load_words<uint4>(from), other = load_words<uint4>(from + apart);
        LogitSums sums;
        sums.largest = float_of(one.x), sums.sum = float_of(one.y), sums.total = float_of(one.z);
        sums.others = {float_of(other.x), float_of(other.y), one.w};
        return sums;
    }
};

// Writes what the loss makes of row m. `chosen`: the logit of its target, NaN for a word outside of
// the vocabulary. -> log of the normaliser
__device__ __forceinline__ float write_losses(const VocabularyLoss& op, int64_t m,
                                              const LogitSums& row, float chosen, float* losses,
                                              float* nlls) {
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
