// Sums over the logits of a row, and a row's losses. Rows keep a running maximum (Milakov and
// Gimelshein 2018, "Online normalizer calculation for softmax").
#pragma once

#include "reduce.cuh"

namespace lsq {

// If all are minus infinity, any finite shift gives exp = 0.
LSQ_INLINE float shift_of(float largest) { return largest == -infinity() ? 0.0f : largest; }

// Puts `value` behind the first `words` of eight.
LSQ_INLINE void fill_up(int words, float value, float (&x)[kVector]) {
    if (words >= kVector) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < words ? x[i] : value;
}

// Two largest magnitudes of words, and the word of the first; the smaller word of equal ones.
struct TwoLargest {
    float first = 0.0f, second = 0.0f;
    uint32_t word = 0;

    LSQ_INLINE void add(const TwoLargest& other) {
        const uint32_t mine = magnitude_of(first), its = magnitude_of(other.first);
        const bool larger = its > mine || (its == mine && other.word < word);
        const uint32_t next = magnitude_of(larger ? other.second : second);
        second = float_of(Largest::join(larger ? mine : its, next));
        first = larger ? other.first : first;
        word = larger ? other.word : word;
    }

    LSQ_INLINE TwoLargest times(float factor) const {
        return {first * factor, second * factor, word};
    }
};

// Logits of a row: the largest, the sum of exp(logit - largest), and the sum. For codes, too: the
// largest multiples of exp(logit - largest) by the weight's scale, without the target.
struct LogitSums {
    float largest = -infinity(), sum = 0.0f, total = 0.0f;
    TwoLargest others;

    // Makes exponentials relative to `highest`.
    LSQ_INLINE void raise(float highest) {
        if (!(highest > largest)) return;
        const float factor = bounded_exponential(largest - highest);
        sum *= factor;
        others = others.times(factor);
        largest = highest;
    }

    LSQ_INLINE void add(const LogitSums& other) {
        raise(Maximum::join(other.largest, largest));
        const float factor = bounded_exponential(other.largest - shift_of(largest));
        sum += other.sum * factor;
        others.add(other.others.times(factor));
        total += other.total;
    }

    // In two halves of 16 bytes, `apart` of them apart.
    LSQ_INLINE void store(float4* to, int64_t apart) const {
        store_words(to, make_uint4(bits_of(largest), bits_of(sum), bits_of(total), others.word));
        store_words(to + apart, make_uint4(bits_of(others.first), bits_of(others.second), 0, 0));
    }

    LSQ_INLINE static LogitSums load(const float4* from, int64_t apart) {
        const uint4 one = load_words<uint4>(from), other = load_words<uint4>(from + apart);
        LogitSums sums;
        sums.largest = float_of(one.x), sums.sum = float_of(one.y), sums.total = float_of(one.z);
        sums.others = {float_of(other.x), float_of(other.y), one.w};
        return sums;
    }
};

// Writes the losses of row m. `chosen`: the target's logit, NaN for unknown words. -> log of the
// normaliser
LSQ_INLINE float write_losses(const VocabularyLoss& op, int64_t m, const LogitSums& row,
                              float chosen, float* losses, float* nlls) {
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

// Sum of a row's target weights.
LSQ_INLINE float gradient_factor(const Prediction& given) {
    return given.target_weight + given.each * static_cast<float>(given.vocabulary);
}

}  // namespace lsq
