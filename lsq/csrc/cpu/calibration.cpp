// The clip of least squared rounding error, row by row; the same search as lsq.quant.octav_clip, which explains it.
#include "rows.h"

using namespace lsq;

namespace {

constexpr int64_t kPart = 4096;  // float sums of so many values are added up in double

// Squared rounding error of v [n] >= 0 under `clip`.
double rounding_error(const float* v, int64_t n, float clip, float q) {
    const float scale = clip / q, reciprocal = q / clip;
    double error = 0.0;
    for (int64_t first = 0; first < n; first += kPart) {
        const int64_t last = std::min(first + kPart, n);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = first; i < last; ++i) {
            const float ratio = v[i] * reciprocal, bounded = ratio > q ? q : ratio;
            const float difference = std::nearbyint(bounded) - ratio;
            sum += difference * difference;
        }
        error += sum;
    }
    return error * scale * scale;
}

// Sum and number of the values above `clip`.
void tail(const float* v, int64_t n, float clip, double* sum, double* count) {
    *sum = *count = 0.0;
    for (int64_t first = 0; first < n; first += kPart) {
        const int64_t last = std::min(first + kPart, n);
        float part = 0.0f, number = 0.0f;
#pragma omp simd reduction(+ : part, number)
        for (int64_t i = first; i < last; ++i) {
            part += v[i] > clip ? v[i] : 0.0f;
            number += v[i] > clip ? 1.0f : 0.0f;
        }
        *sum += part;
        *count += number;
    }
}

// Where OCTAV's error model is stationary, for v [n] in [0, 1].
float fixed_point(const float* v, int64_t n, float q) {
    double total, nonzero;
    tail(v, n, 0.0f, &total, &nonzero);
    float clip = static_cast<float>(total / n), low = 0.0f, high = 1.0f;
    for (int iteration = 0; iteration < 16; ++iteration) {
        double sum, count;
        tail(v, n, clip, &sum, &count);
        const double weight = (nonzero - count) / (12.0 * q * q) + count;
        const float proposal = static_cast<float>(sum / weight);
        (proposal > clip ? low : high) = clip;
        clip = low < proposal && proposal < high ? proposal : (low + high) / 2;
    }
    return clip;
}

struct Best {
    const float* v;
    int64_t n;
    float q, clip;
    double error;

    void consider(float candidate) {
        const double found = rounding_error(v, n, candidate, q);
        if (found < error) {
            error = found;
            clip = candidate;
        }
    }
};

}  // namespace

// x [rows, n], of which every `stride`-th value of a row counts -> clip [rows], at least `smallest`.
LSQ_EXPORT void lsq_least_error_clip(const float* x, int64_t rows, int64_t n, int64_t stride, int64_t maximum,
                                     float smallest, float* clip) {
    const float q = static_cast<float>(maximum);
    const int64_t count = (n + stride - 1) / stride;
#pragma omp parallel
    {
        std::vector<float> values(count);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) {
            const float* line = x + row * n;
            float largest = smallest;
            for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(line[i * stride]));
            float* v = values.data();
            for (int64_t i = 0; i < count; ++i) v[i] = std::fabs(line[i * stride]) / largest;
            const float start = std::max(fixed_point(v, count, q), 1e-30f);
            Best best{v, count, q, start, std::numeric_limits<double>::infinity()};
            for (int i = 0; i <= 32; ++i) best.consider(std::pow(start, 1.0f - i / 32.0f));
            const float around = best.clip;
            for (int i = 0; i <= 32; ++i) best.consider(around * (0.5f + i / 32.0f));
            const float closer = best.clip;
            for (int i = 0; i <= 64; ++i) best.consider(closer * (31.0f / 32.0f + i / 1024.0f));
            clip[row] = std::max(best.clip * largest, smallest);
        }
    }
}
