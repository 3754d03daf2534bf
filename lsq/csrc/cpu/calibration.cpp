// The clip of least squared rounding error, row by row.
#include "../clip_search.h"
#include "rows.h"

using namespace lsq;

namespace {

// Sum of term(v) over a run of n <= kRun values.
template <class Term>
float run_sum(const float* v, int64_t n, const Term& term) {
    float lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int l = 0; l < kLanes; ++l) lane[l] += term(v[i + l]);
    }
    for (int l = 0; i + l < n; ++l) lane[l] += term(v[i + l]);
    for (int half = kLanes / 2; half; half /= 2) {
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    return lane[0];
}

template <class Term>
double sum_of(const std::vector<float>& v, const Term& term) {
    const int64_t n = static_cast<int64_t>(v.size());
    double total = 0.0;
    for (int64_t first = 0; first < n; first += kJoined * kRun) {
        const int64_t end = std::min<int64_t>(first + kJoined * kRun, n);
        float joined = 0.0f;
        for (int64_t run = first; run < end; run += kRun) {
            joined += run_sum(v.data() + run, std::min<int64_t>(kRun, end - run), term);
        }
        total += joined;
    }
    return total;
}

// Of magnitudes in [0, 1].
float least_error(const std::vector<float>& v, float q) {
    const auto sum_above = [&](float clip) { return sum_of(v, [=](float x) { return x > clip ? x : 0.0f; }); };
    const auto count_above = [&](float clip) { return sum_of(v, [=](float x) { return x > clip ? 1.0f : 0.0f; }); };
    FixedPoint point(sum_above(0.0f), count_above(0.0f), v.size(), q);
    for (int i = 0; i < kIterations; ++i) point.step(sum_above(point.clip), count_above(point.clip));
    BestClip best{q, point.start()};
    for (int search = 0; search < kSearches; ++search) {
        const float around = best.clip;
        for (int i = 0; i < kCandidates[search]; ++i) {
            const float tried = candidate(search, i, around), reciprocal = q / tried;
            best.consider(tried, sum_of(v, [=](float x) { return squared_error(x, reciprocal, q); }));
        }
    }
    return best.clip;
}

// Rows of zeros get the mean clip of the others.
void fill_empty(float* clip, int64_t rows, float smallest) {
    double sum[kLanes] = {}, total = 0.0, count = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        if (clip[row] > smallest) sum[row % kLanes] += clip[row], ++count;
    }
    for (double part : sum) total += part;
    if (count == 0.0) return;
    const float mean = static_cast<float>(total / count);
    for (int64_t row = 0; row < rows; ++row) clip[row] = clip[row] > smallest ? clip[row] : mean;
}

}  // namespace

LSQ_OPERATION(LeastErrorClip, op) {
    const float smallest = op.smallest;
#pragma omp parallel
    {
        std::vector<float> v(op.sampled);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.rows; ++row) {
            const float* line = op.x + row * op.columns;
            int64_t unusable = 0;
#pragma omp simd reduction(+ : unusable)
            for (int64_t i = 0; i < op.columns; ++i) unusable += !(std::fabs(line[i]) < infinity());
            op.unusable[row] = unusable;
            float largest = smallest;
            for (int64_t i = 0; i < op.sampled; ++i) {
                v[i] = usable_magnitude(line[i * op.stride]);
                largest = std::max(largest, v[i]);
            }
            for (float& magnitude : v) magnitude /= largest;
            op.clip[row] = std::max(least_error(v, op.largest) * largest, smallest);
        }
    }
    fill_empty(op.clip, op.rows, smallest);
}
