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

inline float sum_of_products(const float* x, const float* y, int64_t n) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
    return sum;
}

// z [n] becomes row `row` of the sum, which is stored where that is wanted.
inline void add_residual(const ResidualSum& sum, int64_t row, int64_t n, float* z, Scratch& scratch) {
    const float* residual = sum.residual + row * n;
    if (sum.update) {
        std::memcpy(z, sum.update + row * n, n * sizeof(float));
        apply(sum.dropout, row * n, n, z, scratch.words.data());
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) z[i] += residual[i];
    } else {
        std::memcpy(z, residual, n * sizeof(float));
    }
    if (sum.z) std::memcpy(sum.z + row * n, z, n * sizeof(float));
}

// The end of a norm: row `row` as floats, as codes, or both. -> whether a value was NaN
inline int store_row(float* out, const Coded& rounded, int64_t row, int64_t n, const float* x, Scratch& scratch) {
    if (out) std::memcpy(out + row * n, x, n * sizeof(float));
    if (!rounded.codes) return 0;
    return round_row(rounded, row * n, n, x, scratch.flags.data());
}

// The end of a norm's backward loop: the gradients of what was added up.
class ResidualSink {
public:
    ResidualSink(const Blocks& blocks, int64_t n, const ResidualSumGradient& sum)
        : n_(n), sum_(sum), update_(blocks, n, sum.dupdate, sum.rounded, sum.dupdate_sum) {}

    // g [n] is what comes through the norm to row `row`. Changes it.
    void add(int64_t block, int64_t row, float* g, Scratch& scratch) {
        if (sum_.dz) {
            const float* direct = sum_.dz + row * n_;
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) g[i] += direct[i];
        }
        if (sum_.dresidual) std::memcpy(sum_.dresidual + row * n_, g, n_ * sizeof(float));
        apply(sum_.dropout, row * n_, n_, g, scratch.words.data());
        update_.add(block, row, g, scratch);
    }

    void finish() const { update_.finish(); }

private:
    int64_t n_;
    const ResidualSumGradient& sum_;
    GradientSink update_;
};

}  // namespace lsq
