// Log-softmax, label-smoothed cross-entropy and their gradient on a block of logits; see lsq/ops/vocabulary_loss.py.
//
// The logits [rows, P] of a block, from row `first` on, are int32 sums where the operation has codes, else float.
#include "loops.h"

using namespace lsq;

namespace {

// Reads row `row` of a block into x [P]. -> the largest of the vocabulary's logits
float read_logits(const Prediction& given, const void* logits, int64_t row, float* x) {
    const int64_t n = given.columns, vocabulary = given.vocabulary;
    float largest = -infinity();
    if (!given.x.coded.codes) {
        const float* from = static_cast<const float*>(logits) + row * n;
#pragma omp simd reduction(max : largest)
        for (int64_t v = 0; v < vocabulary; ++v) {
            x[v] = from[v];
            largest = x[v] > largest ? x[v] : largest;
        }
        return largest;
    }
    const int32_t* sums = static_cast<const int32_t*>(logits) + row * n;
    const float input = given.x.coded.scale[0], *scale = given.weight.scale;
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < vocabulary; ++v) {
        x[v] = static_cast<float>(sums[v]) * (input * scale[v]);
        largest = x[v] > largest ? x[v] : largest;
    }
    return largest;
}

// What the gradient of a row weighs in all.
float factor_of(const Prediction& given) {
    return given.target_weight + given.each * static_cast<float>(given.vocabulary);
}

struct Row {
    float sum, total;  // of exp(logit - max), of logits
};

// Replaces logits x [V] by exp(logit - max).
Row exponentials(float* x, int64_t vocabulary, float largest) {
    float total = 0.0f, sum = 0.0f;
#pragma omp simd reduction(+ : total, sum)
    for (int64_t v = 0; v < vocabulary; ++v) {
        total += x[v];
        x[v] = bounded_exponential(x[v] - largest);
        sum += x[v];
    }
    return {sum, total};
}

// x [begin, end) of exponentials becomes that of the gradient times the scales of the weight. -> bits of its largest
// magnitude, which order like magnitudes
uint32_t scaled_gradient(float* x, const float* weight_scale, float share, float each, int64_t begin, int64_t end) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t v = begin; v < end; ++v) {
        x[v] = (x[v] * share - each) * weight_scale[v];
        const uint32_t bits = bits_of(x[v]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

}  // namespace

// Writes both losses of each row, and what is wanted of normalisers and rounded gradient.
LSQ_EXPORT void lsq_VocabularyLoss(
    const VocabularyLoss& op, const void* logits, int64_t first, int64_t rows, float* losses, float* nlls) {
    const Prediction& given = op.prediction;
    const int64_t n = given.columns, vocabulary = given.vocabulary;
    const float factor = factor_of(given), each = given.each, target_weight = given.target_weight;
    for_rows(rows, n, [&](int64_t row, Scratch& scratch) {
        float* x = scratch.a.data();
        const int64_t m = first + row, word = given.target[m];
        const bool counted = word != given.padding;
        const float largest = read_logits(given, logits, row, x), target = x[counted ? word : 0];
        const Row sums = exponentials(x, vocabulary, largest);
        const float normaliser = largest + std::log(sums.sum);
        const float smooth = static_cast<float>(vocabulary) * normaliser - sums.total;
        nlls[m] = counted ? normaliser - target : 0.0f;
        losses[m] = counted ? target_weight * nlls[m] + each * smooth : 0.0f;
        if (op.normaliser) op.normaliser[m] = normaliser;
        if (!op.rounded.codes) return 0;
        uint32_t most = 0;
        if (counted) {
            const float share = factor / sums.sum, *weight_scale = op.rounded.weight_scale;
            const float chosen = (x[word] * share - each - target_weight) * weight_scale[word];
            most = std::max(scaled_gradient(x, weight_scale, share, each, 0, word),
                            scaled_gradient(x, weight_scale, share, each, word + 1, vocabulary));
            most = std::max(most, bits_of(chosen) & 0x7FFFFFFFu);
            x[word] = chosen;
            std::fill(x + vocabulary, x + n, 0.0f);
        }
        round_scaled(op.rounded, m, n, x, float_of(most), scratch.words.data());
        return 0;
    });
}

LSQ_EXPORT void lsq_VocabularyLossGradient(
    const VocabularyLossGradient& op, const void* logits, int64_t first, int64_t rows) {
    const Prediction& given = op.prediction;
    const int64_t n = given.columns, vocabulary = given.vocabulary;
    const float factor = factor_of(given), each = given.each, upstream = op.dloss[0];
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t m = first + row, word = given.target[m];
        float* x = op.dlogits + m * n;
        if (word == given.padding) {
            std::fill(x, x + n, 0.0f);
            continue;
        }
        read_logits(given, logits, row, x);
        const float shift = op.normaliser[m];
#pragma omp simd
        for (int64_t v = 0; v < vocabulary; ++v) x[v] = (exponential(x[v] - shift) * factor - each) * upstream;
        x[word] -= given.target_weight * upstream;
        std::fill(x + vocabulary, x + n, 0.0f);
    }
}

LSQ_OPERATION(ScaleRows, op) {
    for (int64_t row = 0; row < op.rows; ++row) op.out[row] = op.scale[row] * op.factor[0];
}
