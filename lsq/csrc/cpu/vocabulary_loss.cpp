// Log-softmax, label-smoothed cross-entropy and their gradient on a block of logits; see lsq/ops/vocabulary_loss.py.
//
// The logits [rows, P] of a block, from row `first` on, are int32 sums where the operation has codes, else float.
#include "loops.h"

using namespace lsq;

namespace {

// Reads row `row` of a block into x [P].
void read_logits(const Prediction& given, const void* logits, int64_t row, float* x) {
    const int64_t n = given.columns;
    if (!given.x.coded.codes) {
        std::memcpy(x, static_cast<const float*>(logits) + row * n, n * sizeof(float));
        return;
    }
    const int32_t* sums = static_cast<const int32_t*>(logits) + row * n;
    const float input = given.x.coded.scale[0], *scale = given.weight.scale;
#pragma omp simd
    for (int64_t v = 0; v < n; ++v) x[v] = static_cast<float>(sums[v]) * (input * scale[v]);
}

// What the gradient of a row weighs in all.
float factor_of(const Prediction& given) {
    return given.target_weight + given.each * static_cast<float>(given.vocabulary);
}

struct Row {
    float largest, sum, total, target;  // max, sum of exp(logit - max), sum of logits, the target's logit
};

// Replaces logits x [V] by exp(logit - max).
Row exponentials(float* x, int64_t vocabulary, int64_t target) {
    float largest = -std::numeric_limits<float>::infinity(), total = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < vocabulary; ++v) largest = x[v] > largest ? x[v] : largest;
    const float chosen = x[target];
#pragma omp simd reduction(+ : total, sum)
    for (int64_t v = 0; v < vocabulary; ++v) {
        total += x[v];
        x[v] = exponential(x[v] - largest);
        sum += x[v];
    }
    return {largest, sum, total, chosen};
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
        read_logits(given, logits, row, x);
        const Row sums = exponentials(x, vocabulary, counted ? word : 0);
        const float normaliser = sums.largest + std::log(sums.sum);
        const float smooth = static_cast<float>(vocabulary) * normaliser - sums.total;
        nlls[m] = counted ? normaliser - sums.target : 0.0f;
        losses[m] = counted ? target_weight * nlls[m] + each * smooth : 0.0f;
        if (op.normaliser) op.normaliser[m] = normaliser;
        if (!op.rounded.codes) return 0;
        if (counted) {
            const float share = factor / sums.sum;
#pragma omp simd
            for (int64_t v = 0; v < vocabulary; ++v) x[v] = x[v] * share - each;
            x[word] -= target_weight;
            std::fill(x + vocabulary, x + n, 0.0f);
        } else {
            std::fill(x, x + n, 0.0f);
        }
        round_row(op.rounded, m, n, x, scratch.words.data());
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
