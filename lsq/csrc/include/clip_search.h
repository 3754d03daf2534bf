// Search for the clip of least squared rounding error among magnitudes (within [0, 1] if anew),
// shared by CPU and CUDA; lsq.quant.octav_clip explains it.
//
// Every device adds in one order: value i of a run of kRun belongs to lane i % kRunLanes, a lane
// adds its values in order, lanes are joined in halves. Runs are added in order, kJoined of them in
// float32, and those sums in double precision.
#pragma once

#include "arithmetic.h"

namespace lsq {

constexpr int kRun = 512, kRunLanes = 32, kJoined = 8;
constexpr int kIterations = 16, kTriedRoots = 32;

// Each search goes around the best clip of the one before: three anew, two around an earlier clip.
constexpr int kAnew = 0, kAgain = 3, kSearches = 5;
constexpr int kCandidates[kSearches] = {kTriedRoots + 1, 33, 65, 11, 11};

// The magnitude of a value; that of NaN and infinity counts as 0.
LSQ_INLINE float usable_magnitude(float x) {
    const float magnitude = fabsf(x);
    return magnitude < infinity() ? magnitude : 0.0f;
}

// Squared error of a magnitude that is rounded to codes up to q, in units of the scale. T: float,
// or a vector of them.
template <class T>
LSQ_INLINE T squared_error(T magnitude, T reciprocal, T q) {
    const T ratio = magnitude * reciprocal, bounded = ratio > q ? q : ratio;
    // 1.5 * 2^23: rounds half to even.
    const T difference = ((bounded + 12582912.0f) - 12582912.0f) - ratio;
    return difference * difference;
}

// OCTAV's iteration, kept inside the bracket that the sign of its model's derivative gives.
struct FixedPoint {
    double nonzero;
    float q, clip, low, high;

    // Magnitudes: their sum, and how many are above 0 and in all.
    LSQ_INLINE FixedPoint(double sum, double nonzero, int64_t values, float q)
        : nonzero(nonzero), q(q), clip(static_cast<float>(sum / static_cast<double>(values))),
          low(0.0f), high(1.0f) {}

    // `sum` and `count` of the magnitudes above `clip`.
    LSQ_INLINE void step(double sum, double count) {
        const double weight = (nonzero - count) / (12.0 * q * q) + count;
        const float proposal = static_cast<float>(sum / weight);
        (proposal > clip ? low : high) = clip;
        clip = low < proposal && proposal < high ? proposal : (low + high) / 2;
    }

    LSQ_INLINE float start() const { return clip > 1e-30f ? clip : 1e-30f; }
};

// Candidates of a search. Anew: from `around` up to 1, then within 50 % of it, then within 3 %.
// Again: within 31 %, then within 4 %. Only roots and products in double precision are the same
// everywhere.
LSQ_INLINE float candidate(int search, int number, float around) {
    const float n = static_cast<float>(number);
    if (search == kAnew + 1) return around * (0.5f + n / 32.0f);
    if (search == kAnew + 2) return around * (31.0f / 32.0f + n / 1024.0f);
    if (search == kAgain) return around * (11.0f / 16.0f + n / 16.0f);
    if (search == kAgain + 1) return around * (123.0f / 128.0f + n / 128.0f);
    double root = around, power = 1.0;
    for (int i = 1; i < kTriedRoots; i *= 2) root = sqrt(root);
    for (int i = number; i < kTriedRoots; ++i) power *= root;
    return static_cast<float>(power);
}

// The best clip so far.
struct BestClip {
    float q, clip;
    double error = infinity();

    // `errors`: the sum of squared_error under that clip.
    LSQ_INLINE void consider(float tried, double errors) {
        const double scale = tried / q, squares = errors * scale * scale;
        if (squares < error) error = squares, clip = tried;
    }

    // Whether the least error lies near `before`, after the first search again. Not beyond 1.5
    // times the largest magnitude; not below 2^-16 of it, where float32 sums cannot tell clips
    // apart; not without a finite error.
    LSQ_INLINE bool near(float before, float largest) const {
        const float low = candidate(kAgain, 0, before),
                    high = candidate(kAgain, kCandidates[kAgain] - 1, before);
        return error < infinity() && low < clip && clip < high && clip <= 1.5f * largest &&
               largest <= 65536.0f * clip;
    }
};

}  // namespace lsq
