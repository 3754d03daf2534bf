// Adds the kept words to both gradients of a vocabulary's loss; lsq/ops/vocabulary_loss.py has the
// formulas.
#include <numeric>

#include "floats.h"
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(KeptInputGradient, op) {
    const Prediction& given = op.prediction;
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch&) {
        const int64_t word = given.target[row];
        float* dx = op.dx + row * n;
        if (word == given.padding) {
            std::fill(dx, dx + n, 0.0f);
            return 0;
        }
        const int64_t other = op.kept.likeliest[row];
        const float factor = op.dloss[0], *scale = given.weight.scale;
        const float own = op.kept.gradient[row] * factor * scale[word];
        const float rest = op.kept.gradient[op.rows + row] * factor * scale[other];
        const int8_t *codes = given.weight.codes + word * n,
                     *others = given.weight.codes + other * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            dx[i] = static_cast<float>(codes[i]) * own + static_cast<float>(others[i]) * rest;
        return 0;
    });
}

namespace {

// Word of an occurrence: targets of all rows come first, then their likeliest other words.
int64_t word_of(const KeptWeightGradient& op, int64_t occurrence) {
    const Prediction& given = op.prediction;
    return occurrence < given.rows ? given.target[occurrence]
                                   : op.kept.likeliest[occurrence - given.rows];
}

// Adds a word's occurrences [first, last) to its row of the gradient.
template <class T>
void add_word(const KeptWeightGradient& op, const int64_t* first, const int64_t* last, float factor,
              float* sum, T*) {
    const int64_t n = op.columns, word = word_of(op, *first);
    std::fill(sum, sum + n, 0.0f);
    for (; first != last; ++first) {
        const int8_t* codes = op.prediction.x.coded.codes + *first % op.prediction.rows * n;
        const float own = op.kept.gradient[*first] * factor;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(codes[i]) * own;
    }
    const T* values = reinterpret_cast<const T*>(op.weight.values) + word * n;
    const T* others = reinterpret_cast<const T*>(op.others) + word * n;
    T* dweight = reinterpret_cast<T*>(op.dweight) + word * n;
    if (op.weight.absmax) {  // no clip cuts the weight, which may exist as codes alone
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dweight[i] = narrow<T>(widen(others[i]) + sum[i]);
        return;
    }
    const float clip = op.weight.clip[op.clips == 1 ? 0 : word];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        dweight[i] =
            narrow<T>(widen(others[i]) + (std::fabs(widen(values[i])) > clip ? 0.0f : sum[i]));
    }
}

}  // namespace

// One thread adds a word's occurrences, in order.
LSQ_OPERATION(KeptWeightGradient, op) {
    const Prediction& given = op.prediction;
    const int64_t size = given.vocabulary * op.columns * (op.dweight_dtype ? 2 : 4);
    if (op.others != op.dweight) std::memcpy(op.dweight, op.others, size);
    std::vector<int64_t> order, begins;
    for (int64_t i = 0; i < op.rows; ++i) {
        if (given.target[i % given.rows] != given.padding) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return word_of(op, a) < word_of(op, b); });
    const int64_t count = order.size();
    for (int64_t i = 0; i < count; ++i) {
        if (i == 0 || word_of(op, order[i]) != word_of(op, order[i - 1])) begins.push_back(i);
    }
    const int64_t words = begins.size();
    begins.push_back(count);
    const float factor = op.dloss[0] * given.x.coded.scale[0];
#pragma omp parallel
    {
        Aligned<float> sum(op.columns);
#pragma omp for schedule(dynamic, 16)
        for (int64_t word = 0; word < words; ++word) {
            for_dtype(op.dweight_dtype, [&](auto* kind) {
                add_word(op, order.data() + begins[word], order.data() + begins[word + 1], factor,
                         sum.data(), kind);
            });
        }
    }
}
