// Adam on float32 master weights; the new weight leaves as int8 codes as well. lsq/ops/adam.py is
// the reference.
#include <numeric>

#include "floats.h"
#include "loops.h"

using namespace lsq;

namespace {

// Below this many values a loop is over before a second thread has begun.
constexpr int64_t kFewValues = 16384;

struct Step {
    float size, first, second, epsilon, decay, factor;  // first, second: 1 - beta1, 1 - beta2

    explicit Step(const Adam& op)
        : size(op.numbers[0]), first(op.numbers[1]), second(op.numbers[2]), epsilon(op.numbers[3]),
          decay(op.numbers[4]), factor(op.gradient_factor[0]) {}

    void apply(const Adam& op, int64_t begin, int64_t end) const {
        if (op.limited) {
            const float lowest = op.lowest, highest = op.highest;
            apply(op, begin, end, [lowest, highest](float before, float after) {
                const float low = before * lowest, high = before * highest;
                const float raised = after < low ? low : after;
                return raised > high ? high : raised;
            });
        } else {
            apply(op, begin, end, [](float, float after) { return after; });
        }
    }

private:
    template <class Limit>
    void apply(const Adam& op, int64_t begin, int64_t end, const Limit& limit) const {
        const float *weight = op.weight, *gradient = op.gradient, *m = op.first, *v = op.second;
        float *new_weight = op.new_weight, *new_m = op.new_first, *new_v = op.new_second;
        const Step step = *this;
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
            const float g = gradient[i] * step.factor;
            const float mean = m[i] * (1.0f - step.first) + g * step.first;
            const float square = v[i] * (1.0f - step.second) + g * step.second * g;
            const float before = weight[i], decayed = before - before * step.decay;
            new_weight[i] =
                limit(before, decayed - mean / (std::sqrt(square) + step.epsilon) * step.size);
            new_m[i] = mean;
            new_v[i] = square;
        }
    }
};

// Rounds row `row` of the new weight -> whether a value was NaN.
bool round_weight_row(const Adam& op, int64_t row) {
    const int64_t n = op.columns;
    const float* x = op.new_weight + row * n;
    if (op.new_clip)
        op.new_clip[row] = clip_of(bits_of(largest_magnitude(x, n)), op.rounded.clip[row]);
    const float* clip = op.new_clip ? op.new_clip : op.rounded.clip;
    const float q = op.rounded.largest, step = clip[op.clips > 1 ? row : 0] / q;
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
    const Step step(op);
    if (!op.rounded.codes) {
        constexpr int64_t kRun = 4096;
#pragma omp parallel for schedule(static) if (op.numel > kFewValues)
        for (int64_t begin = 0; begin < op.numel; begin += kRun)
            step.apply(op, begin, std::min(begin + kRun, op.numel));
        return;
    }
    const int64_t n = op.columns;
    int missing = 0;
#pragma omp parallel for schedule(static) reduction(| : missing) if (op.numel > kFewValues)
    for (int64_t row = 0; row < op.rows; ++row) {
        if (row < op.valid) {
            step.apply(op, row * n, (row + 1) * n);
            missing |= round_weight_row(op, row);
        } else {
            std::memset(op.rounded.codes + row * n, 0, n);
            op.rounded.scale[row] = 1.0f;
        }
    }
    if (op.clips == 1 && missing)
        std::fill(op.rounded.scale, op.rounded.scale + op.valid, not_a_number());
    if (!op.rounded.transposed) return;
#pragma omp parallel for schedule(static)
    for (int64_t column = 0; column < n; ++column) {
        for (int64_t row = 0; row < op.rows; ++row) {
            op.rounded.transposed[column * op.rows + row] = op.rounded.codes[row * n + column];
        }
    }
}

// Sum of squares of x [n]; neither the processor nor the number of threads changes a bit.
LSQ_EXPORT void lsq_sum_of_squares(const float* x, int64_t n, double* sum) {
    constexpr int64_t kSums = 64;
    const int64_t runs = (n + kFewValues - 1) / kFewValues;
    std::vector<double> of_runs(runs);
#pragma omp parallel for schedule(static) if (runs > 1)
    for (int64_t run = 0; run < runs; ++run) {
        const float* from = x + run * kFewValues;
        const int64_t count = std::min(kFewValues, n - run * kFewValues),
                      whole = count / kSums * kSums;
        float sums[kSums] = {};
        for (int64_t i = 0; i < whole; i += kSums) {
#pragma omp simd
            for (int64_t j = 0; j < kSums; ++j) sums[j] += from[i + j] * from[i + j];
        }
        for (int64_t i = whole; i < count; ++i) sums[i - whole] += from[i] * from[i];
        of_runs[run] = std::accumulate(sums, sums + kSums, 0.0);
    }
    *sum = std::accumulate(of_runs.begin(), of_runs.end(), 0.0);
}
