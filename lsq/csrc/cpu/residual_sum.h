// What the loops of norms between two blocks share; lsq/ops/residual_sum.py is the reference.
#pragma once

#include "loops.h"

namespace lsq {

inline float sum_of(const float* x, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i];
    return sum;
}

// Makes row `row` of the sum: in the tensor that keeps it, or in scratch. -> that row [n]
inline const float* add_residual(const ResidualSum& sum, int64_t row, int64_t n, Scratch& scratch) {
    const float* residual = sum.residual + row * n;
    float* z = sum.z ? sum.z + row * n : scratch.a.data();
    if (sum.update) {
        dropped(sum.dropout, row * n, n, sum.update + row * n, scratch.words.data(),
                [&](int64_t i, float update) { z[i] = update + residual[i]; });
        return z;
    }
    if (!sum.z) return residual;
    std::memcpy(z, residual, n * sizeof(float));
    return z;
}

// The end of a norm's backward loop: the gradients of what was added up.
class ResidualSink {
public:
    ResidualSink(const Blocks& blocks, int64_t n, const ResidualSumGradient& sum)
        : n_(n), sum_(sum), update_(blocks, n, sum.dupdate, sum.rounded, sum.dupdate_sum) {}

    // through(i) is what comes through the norm to element i of row `row`; it may stand in the
    // first floats of `scratch`.
    template <class Through>
    void add(int64_t block, int64_t row, Scratch& scratch, const Through& through) {
        float *g = scratch.a.data(), *residual = sum_.dresidual ? sum_.dresidual + row * n_ : g;
        if (sum_.dz) {
            const float* direct = sum_.dz + row * n_;
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) residual[i] = through(i) + direct[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) residual[i] = through(i);
        }
        if (!update_.wanted()) return;
        dropped(sum_.dropout, row * n_, n_, residual, scratch.words.data(),
                [g](int64_t i, float y) { g[i] = y; });
        update_.add(block, row, g, g);
    }

    void finish() const { update_.finish(); }

private:
    int64_t n_;
    const ResidualSumGradient& sum_;
    GradientSink update_;
};

}  // namespace lsq
