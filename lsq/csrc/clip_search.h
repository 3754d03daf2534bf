// The search for the clip of least squared rounding error among magnitudes within [0, 1], as the CPU loop and the CUDA
// kernel share it; lsq.quant.octav_clip explains it.
//
// Sums are taken in one order everywhere, so that every device finds the same clip: value i of a run of kRun belongs to
// lane i % kLanes, a lane adds its values in order, and lanes are joined in halves. Runs are added in order, kJoined of
// them in float32, and those sums in double precision.
#pragma once

#include "arithmetic.h"

namespace lsq {

constexpr int kRun = 512, kLanes = 32, kJoined = 8;
constexpr int kIterations = 16, kSearches = 3, kTriedRoots = 32;
constexpr int kCandidates[kSearches] = {kTriedRoots + 1, 33, 65};  // of each search

// The magnitude of a value; that of NaN and infinity counts as 0.
LSQ_INLINE float usable_magnitude(float x) {
    const float magnitude = fabsf(x);
    return magnitude < infinity() ? magnitude : 0.0f;
}

// Squared error of a magnitude that is rounded to codes up to q, in units of the scale.
LSQ_INLINE float squared_error(float magnitude, float reciprocal, float q) {
    const float ratio = magnitude * reciprocal, bounded = ratio > q ? q : ratio;
    const float difference = ((bounded + 12582912.0f) - 12582912.0f) - ratio;  // 1.5 * 2^23: rounds half to even
    return difference * difference;
}

// OCTAV's iteration, kept inside the bracket that the sign of its model's derivative gives.
struct FixedPoint {
    double nonzero;
    float q, clip, low, high;

    // Of `values` magnitudes with that sum, so many of which are above 0.
    LSQ_INLINE FixedPoint(double sum, double nonzero, int64_t values, float q)
        : nonzero(nonzero), q(q), clip(static_cast<float>(sum / static_cast<double>(values))), low(0.0f), high(1.0f) {}

    // `sum` and `count` of the magnitudes above `clip`.
    LSQ_INLINE void step(double sum, double count) {
        const double weight = (nonzero - count) / (12.0 * q * q) + count;
        const float proposal = static_cast<float>(sum / weight);
        (proposal > clip ? low : high) = clip;
        clip = low < proposal && proposal < high ? proposal : (low + high) / 2;
    }

    LSQ_INLINE float start() const { return clip > 1e-30f ? clip : 1e-30f; }
};

// What a search tries: from `around` up to 1, then within 50 % of it, then within 3 %. Roots and products in double
// precision are the same everywhere, powers are not.
LSQ_INLINE float candidate(int search, int number, float around) {
    if (search == 1) return around * (0.5f + static_cast<float>(number) / 32.0f);
    if (search == 2) return around * (31.0f / 32.0f + static_cast<float>(number) / 1024.0f);
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
        const double scale = tried / q, found = errors * scale * scale;
        if (found < error) error = found, clip = tried;
    }
};

}  // namespace lsq
