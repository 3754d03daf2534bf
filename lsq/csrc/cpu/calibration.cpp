// The clip of least squared rounding error, row by row.
#include <omp.h>

#include "../include/clip_search.h"
#include "aligned.h"
#include "lanes.h"
#include "rows.h"

using namespace lsq;

namespace {

constexpr int kTogether = 4;  // clips whose errors are summed together
constexpr int kParts = kRunLanes / kLanes;
constexpr int64_t kBlock = kJoined * kRun;

// The sum of the lanes of a run.
float joined_lanes(Lanes (&parts)[kParts]) {
#pragma GCC unroll 8
    for (int half = kParts / 2; half; half /= 2) {
        for (int part = 0; part < half; ++part) parts[part] += parts[part + half];
    }
    float lane[kLanes];
    std::memcpy(lane, &parts[0], sizeof lane);
#pragma GCC unroll 8
    for (int half = kLanes / 2; half; half /= 2) {
        for (int l = 0; l < half; ++l) lane[l] += lane[l + half];
    }
    return lane[0];
}

// Magnitudes of a row and sums over them, by all threads if it is searched `alone`.
class Sample {
public:
    Sample(int64_t count, bool alone)
        : values_((count + kRunLanes - 1) / kRunLanes * kRunLanes),
          totals_((count + kBlock - 1) / kBlock * kTogether), count_(count), alone_(alone) {}

    float* values() { return values_.data(); }
    int64_t count() const { return count_; }

    // Takes values of x `stride` apart.
    void take(const float* x, int64_t stride) {
        for (int64_t i = 0; i < count_; ++i) values_[i] = usable_magnitude(x[i * stride]);
    }

    float largest(float smallest) const {
        float most = smallest;
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < count_; ++i) most = values_[i] > most ? values_[i] : most;
        return most;
    }

    void divide_by(float largest) {
#pragma omp simd
        for (int64_t i = 0; i < count_; ++i) values_[i] /= largest;
    }

    // totals[k] = the sum of term(values, k), which is 0 for values of 0.
    template <int K, class Term>
    void sum(const Term& term, double (&totals)[K]) {
        static_assert(K <= kTogether);
        const int64_t blocks = (count_ + kBlock - 1) / kBlock;
#pragma omp parallel for schedule(static) if (alone_ && blocks > 1)
        for (int64_t block = 0; block < blocks; ++block) sum_block<K>(block, term);
        for (int k = 0; k < K; ++k) totals[k] = 0.0;
        for (int64_t block = 0; block < blocks; ++block) {
            for (int k = 0; k < K; ++k) totals[k] += totals_[block * kTogether + k];
        }
    }

private:
    template <int K, class Term>
    void sum_block(int64_t block, const Term& term) {
        const int64_t end = std::min<int64_t>((block + 1) * kBlock, values_.size());
        float joined[K] = {};
        for (int64_t run = block * kBlock; run < end; run += kRun) {
            const int64_t stop = std::min<int64_t>(run + kRun, end);
            Lanes sum[K][kParts] = {};
            for (int64_t i = run; i < stop; i += kRunLanes) {
#pragma GCC unroll 8
                for (int part = 0; part < kParts; ++part) {
                    const Lanes values = lanes_at(values_.data() + i + part * kLanes);
#pragma GCC unroll 8
                    for (int k = 0; k < K; ++k) sum[k][part] += term(values, k);
                }
            }
#pragma GCC unroll 8
            for (int k = 0; k < K; ++k) joined[k] += joined_lanes(sum[k]);
        }
        for (int k = 0; k < K; ++k) totals_[block * kTogether + k] = joined[k];
    }

    Aligned<float> values_;  // and zeros behind them
    Aligned<double> totals_;
    int64_t count_;
    bool alone_;
};

void try_clips(Sample& sample, int search, BestClip& best) {
    const float around = best.clip;
    const Lanes q = all_lanes(best.q);
    for (int first = 0; first < kCandidates[search]; first += kTogether) {
        float tried[kTogether];
        Lanes reciprocal[kTogether];
        for (int k = 0; k < kTogether; ++k) {
            tried[k] = candidate(search, first + k, around);
            reciprocal[k] = all_lanes(best.q / tried[k]);
        }
        double errors[kTogether];
        sample.sum([&](Lanes values, int k) { return squared_error(values, reciprocal[k], q); },
                   errors);
        const int wanted = std::min(kTogether, kCandidates[search] - first);
        for (int k = 0; k < wanted; ++k) best.consider(tried[k], errors[k]);
    }
}

float search_anew(Sample& sample, float q) {
    double sums[2];  // of the magnitudes above a clip, and how many they are
    const auto sum_above = [&](float clip) {
        const Lanes limit = all_lanes(clip), one = all_lanes(1.0f), zero = {};
        sample.sum([=](Lanes values, int k) { return values > limit ? (k ? one : values) : zero; },
                   sums);
    };
    sum_above(0.0f);
    FixedPoint point(sums[0], sums[1], sample.count(), q);
    for (int i = 0; i < kIterations; ++i) {
        sum_above(point.clip);
        point.step(sums[0], sums[1]);
    }
    BestClip best{q, point.start()};
    for (int search = kAnew; search < kAgain; ++search) try_clips(sample, search, best);
    return best.clip;
}

// Whether the least error lies near the earlier clip; `best` then has its clip.
bool search_near(Sample& sample, float before, float largest, BestClip& best) {
    try_clips(sample, kAgain, best);
    if (!best.near(before, largest)) return false;
    try_clips(sample, kAgain + 1, best);
    return true;
}

// Rows of zeros get the mean clip of the others.
void fill_empty(float* clip, int64_t rows, float smallest) {
    double sum[kRunLanes] = {}, total = 0.0, count = 0.0;
    for (int64_t row = 0; row < rows; ++row) {
        if (clip[row] > smallest) sum[row % kRunLanes] += clip[row], ++count;
    }
    for (double part : sum) total += part;
    if (count == 0.0) return;
    const float mean = static_cast<float>(total / count);
    for (int64_t row = 0; row < rows; ++row) clip[row] = clip[row] > smallest ? clip[row] : mean;
}

// Number of NaN and infinities in x [n].
int64_t count_unusable(const float* x, int64_t n, bool alone) {
    int64_t unusable = 0;
    const auto count = [=](int64_t first) {
        const int64_t end = std::min(first + kBlock, n);
        int32_t here = 0;
#pragma omp simd reduction(+ : here)
        for (int64_t i = first; i < end; ++i) here += std::fabs(x[i]) < infinity() ? 0 : 1;
        return here;
    };
#pragma omp parallel for reduction(+ : unusable) schedule(static) if (alone)
    for (int64_t first = 0; first < n; first += kBlock) unusable += count(first);
    return unusable;
}

void find_clip(const LeastErrorClip& op, int64_t row, Sample& sample) {
    const float q = op.largest, before = op.before ? op.before[row] : 0.0f,
                largest = sample.largest(op.smallest);
    BestClip best{q, before};
    if (!op.before || !search_near(sample, before, largest, best)) {
        sample.divide_by(largest);
        best.clip = search_anew(sample, q) * largest;
    }
    op.clip[row] = std::max<float>(best.clip, op.smallest);
}

void search_row(const LeastErrorClip& op, int64_t row, Sample& sample, bool alone) {
    const float* line = op.x + row * op.columns;
    op.unusable[row] = count_unusable(line, op.columns, alone);
    sample.take(line, op.stride);
    find_clip(op, row, sample);
}

// Searches rows [first, first + kLanes), which are columns of x, for one sample each, by transposed
// blocks.
void search_columns(const LeastErrorClip& op, int64_t first, std::vector<Sample>& samples) {
    const int64_t width = std::min(kLanes, op.rows - first);
    LaneWords unusable = {};
    for (int64_t i = 0; i < op.columns; i += kLanes) {
        Lanes block[kLanes] = {};
        for (int64_t j = 0; j < std::min(kLanes, op.columns - i); ++j) {
            const Lanes x = load_lanes(op.x + (i + j) * op.rows + first, width);
            const Lanes magnitude = (Lanes)((LaneBits)x & 0x7FFFFFFFu);
            const LaneWords usable = magnitude < infinity();  // -1 or 0
            block[j] = usable ? magnitude : Lanes{};
            unusable += usable + 1;
        }
        transpose(block);
        for (int64_t row = 0; row < width; ++row) lanes_at(samples[row].values() + i) = block[row];
    }
    for (int64_t row = 0; row < width; ++row) {
        op.unusable[first + row] = unusable[row];
        find_clip(op, first + row, samples[row]);
    }
}

}  // namespace

LSQ_OPERATION(LeastErrorClip, op) {
    if (op.by_columns) {
#pragma omp parallel
        {
            std::vector<Sample> samples(kLanes, Sample(op.sampled, false));
#pragma omp for schedule(static)
            for (int64_t first = 0; first < op.rows; first += kLanes)
                search_columns(op, first, samples);
        }
    } else if (op.rows < omp_get_max_threads()) {
        Sample sample(op.sampled, true);
        for (int64_t row = 0; row < op.rows; ++row) search_row(op, row, sample, true);
    } else {
#pragma omp parallel
        {
            Sample sample(op.sampled, false);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < op.rows; ++row) search_row(op, row, sample, false);
        }
    }
    fill_empty(op.clip, op.rows, op.smallest);
}
