// Log-softmax, label-smoothed cross-entropy and their gradient on a block of logits; see lsq/ops/cross_entropy.py.
#include "rows.h"

using namespace lsq;

namespace {

struct Row {
    float largest, sum, total;  // max, sum of exp(logit - max), sum of logits
};

// Reads a row of logits into `x`, replaces it by exp(logit - max); `target_logit` is read on the way.
Row exponentials(const Product& logits, int64_t row, int64_t columns, int64_t vocabulary, int64_t target,
                 float* target_logit, float* x) {
    logits.read(row, columns, x);
    float largest = -std::numeric_limits<float>::infinity(), total = 0.0f, sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t v = 0; v < vocabulary; ++v) largest = x[v] > largest ? x[v] : largest;
    *target_logit = x[target];
#pragma omp simd reduction(+ : total, sum)
    for (int64_t v = 0; v < vocabulary; ++v) {
        total += x[v];
        x[v] = exponential(x[v] - largest);
        sum += x[v];
    }
    return {largest, sum, total};
}

}  // namespace

// logits [rows, columns] of the rows from `first`: int32 with scale [columns], or float. Writes for each row the loss, the
// nll and, where wanted, the log normaliser or the rounded gradient (codes [M, columns], row_scale [M]).
LSQ_EXPORT void lsq_cross_entropy(const void* logits, int64_t kind, const float* scale, const int64_t* target,
                                  const float* weight_scale, const int64_t* key, int64_t stream, float target_weight,
                                  float each, int64_t padding, int64_t vocabulary, int64_t columns, int64_t first,
                                  int64_t rows, float* loss, float* nll, float* normaliser, int8_t* codes,
                                  float* row_scale) {
    const Product product{logits, kind, scale};
    const GradientSink sink{codes, row_scale, weight_scale, key, stream};
    const float factor = target_weight + each * static_cast<float>(vocabulary);
#pragma omp parallel
    {
        std::vector<float> x(columns);
        std::vector<uint32_t> words(codes ? columns + 8 : 0);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t m = first + row, word = target[m];
            const bool counted = word != padding;
            float target_logit;
            const Row sums =
                exponentials(product, row, columns, vocabulary, counted ? word : 0, &target_logit, x.data());
            const float log_normaliser = sums.largest + std::log(sums.sum);
            nll[m] = counted ? log_normaliser - target_logit : 0.0f;
            const float smooth = static_cast<float>(vocabulary) * log_normaliser - sums.total;
            loss[m] = counted ? target_weight * nll[m] + each * smooth : 0.0f;
            if (normaliser) normaliser[m] = log_normaliser;
            if (!codes) continue;
            if (counted) {
                const float share = factor / sums.sum;
#pragma omp simd
                for (int64_t v = 0; v < vocabulary; ++v) x[v] = x[v] * share - each;
                x[word] -= target_weight;
                std::fill(x.begin() + vocabulary, x.end(), 0.0f);
            } else {
                std::fill(x.begin(), x.end(), 0.0f);
            }
            sink.write(m, columns, x.data(), words.data());
        }
    }
}

// The gradient itself, float [M, columns], from the log normalisers [M], for an upstream gradient dloss [1].
LSQ_EXPORT void lsq_cross_entropy_gradient(const void* logits, int64_t kind, const float* scale, const int64_t* target,
                                           const float* normaliser, const float* dloss, float target_weight,
                                           float each, int64_t padding, int64_t vocabulary, int64_t columns,
                                           int64_t first, int64_t rows, float* dlogits) {
    const Product product{logits, kind, scale};
    const float factor = target_weight + each * static_cast<float>(vocabulary), upstream = dloss[0];
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t m = first + row, word = target[m];
        float* x = dlogits + m * columns;
        if (word == padding) {
            std::fill(x, x + columns, 0.0f);
            continue;
        }
        product.read(row, columns, x);
        const float shift = normaliser[m];
#pragma omp simd
        for (int64_t v = 0; v < vocabulary; ++v) x[v] = (exponential(x[v] - shift) * factor - each) * upstream;
        x[word] -= target_weight * upstream;
        std::fill(x + vocabulary, x + columns, 0.0f);
    }
}
