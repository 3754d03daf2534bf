// What the target's own logit adds to both gradients of a vocabulary's loss; lsq/ops/target_gradient.py has the formulas.
#include <numeric>

#include "floats.h"
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(TargetInputGradient, op) {
    const Prediction& given = op.prediction;
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch&) {
        const int64_t word = given.target[row];
        float* dx = op.dx + row * n;
        if (word == given.padding) {
            std::fill(dx, dx + n, 0.0f);
            return 0;
        }
        const float own = op.target_gradient[row] * op.dloss[0] * given.weight.scale[word];
        const int8_t* codes = given.weight.codes + word * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) dx[i] = static_cast<float>(codes[i]) * own;
        return 0;
    });
}

namespace {

// Adds the rows of one word, those of `first` to `last`, to its row of the gradient.
template <class T>
void add_word(const TargetWeightGradient& op, const int64_t* first, const int64_t* last, float factor, float* sum, T*) {
    const int64_t n = op.columns, word = op.prediction.target[*first];
    std::fill(sum, sum + n, 0.0f);
    for (; first != last; ++first) {
        const int8_t* codes = op.prediction.x.coded.codes + *first * n;
        const float own = op.target_gradient[*first] * factor;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sum[i] += static_cast<float>(codes[i]) * own;
    }
    const T* values = reinterpret_cast<const T*>(op.weight.values) + word * n;
    const T* others = reinterpret_cast<const T*>(op.others) + word * n;
    T* dweight = reinterpret_cast<T*>(op.dweight) + word * n;
    const float clip = op.weight.absmax ? infinity() : op.weight.clip[op.clips == 1 ? 0 : word];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        dweight[i] = narrow<T>(widen(others[i]) + (std::fabs(widen(values[i])) > clip ? 0.0f : sum[i]));
    }
}

}  // namespace

// A word's rows are added by one thread, in order.
LSQ_OPERATION(TargetWeightGradient, op) {
    const Prediction& given = op.prediction;
    const int64_t size = given.vocabulary * op.columns * (op.dweight_dtype ? 2 : 4);
    if (op.others != op.dweight) std::memcpy(op.dweight, op.others, size);
    std::vector<int64_t> order, begins;
    for (int64_t row = 0; row < op.rows; ++row) {
        if (given.target[row] != given.padding) order.push_back(row);
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return given.target[a] < given.target[b]; });
    const int64_t count = order.size();
    for (int64_t i = 0; i < count; ++i) {
        if (i == 0 || given.target[order[i]] != given.target[order[i - 1]]) begins.push_back(i);
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
                add_word(op, order.data() + begins[word], order.data() + begins[word + 1], factor, sum.data(), kind);
            });
        }
    }
}
