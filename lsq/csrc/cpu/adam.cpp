// Adam on float32 master weights; the new weight leaves as int8 codes as well. lsq/ops/adam.py is the reference.
#include "loops.h"

using namespace lsq;

namespace {

struct Step {
    float size, first, second, epsilon, decay, factor;  // first, second: 1 - beta1, 1 - beta2

    explicit Step(const float* numbers)
        : size(numbers[0]), first(numbers[1]), second(numbers[2]), epsilon(numbers[3]), decay(numbers[4]),
          factor(numbers[5]) {}

    // Elements [begin, end).
    void apply(const Adam& op, int64_t begin, int64_t end) const {
        const float *weight = op.weight, *gradient = op.gradient, *m = op.first, *v = op.second;
        float *new_weight = op.new_weight, *new_m = op.new_first, *new_v = op.new_second;
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
            const float g = gradient[i] * factor;
            const float mean = m[i] * (1.0f - first) + g * first;
            const float square = v[i] * (1.0f - second) + g * second * g;
            const float decayed = weight[i] - weight[i] * decay;
            new_weight[i] = decayed - mean / (std::sqrt(square) + epsilon) * size;
            new_m[i] = mean;
            new_v[i] = square;
        }
    }
};

// Codes of row `row` of the new weight. -> whether a value was NaN
bool round_weight_row(const Adam& op, int64_t row) {
    const int64_t n = op.columns;
    const float q = op.rounded.largest, step = op.rounded.clip[op.clips > 1 ? row : 0] / q;
    const float* x = op.new_weight + row * n;
    int8_t* codes = op.rounded.codes + row * n;
    int missing = 0;
#pragma omp simd reduction(| : missing)
    for (int64_t i = 0; i < n; ++i) {
        const float ratio = x[i] / step;
        missing |= ratio != ratio;
        codes[i] = code_of(ratio, q);
    }
    op.rounded.scale[row] = poisoned(step, missing);
    return missing != 0;
}

}  // namespace

LSQ_OPERATION(Adam, op) {
    const Step step(op.numbers);
    if (!op.rounded.codes) {
        constexpr int64_t kRun = 4096;
#pragma omp parallel for schedule(static)
        for (int64_t begin = 0; begin < op.numel; begin += kRun) step.apply(op, begin, std::min(begin + kRun, op.numel));
        return;
    }
    const int64_t n = op.columns;
    int missing = 0;
#pragma omp parallel for schedule(static) reduction(| : missing)
    for (int64_t row = 0; row < op.rows; ++row) {
        if (row < op.valid) {
            step.apply(op, row * n, (row + 1) * n);
            missing |= round_weight_row(op, row);
        } else {
            std::memset(op.rounded.codes + row * n, 0, n);
            op.rounded.scale[row] = 1.0f;
        }
    }
    if (op.clips == 1 && missing) std::fill(op.rounded.scale, op.rounded.scale + op.valid, not_a_number());
    if (!op.transposed) return;
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < n; ++column) {
        for (int64_t row = 0; row < op.rows; ++row) {
            op.transposed[column * op.rows + row] = op.rounded.codes[row * n + column];
        }
    }
}
