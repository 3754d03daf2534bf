// The epilogue of a row of floats: activation, dropout, rounding.
#pragma once

#include "floats.h"
#include "loops.h"
#include "nonlinearity.h"

namespace lsq {

// y -> activation(y), in place, with its slope in codes: n values.
template <Activation KIND>
void activate_with_slope(int64_t n, float* y, int8_t* slope) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float x = y[i];
        slope[i] = slope_code(activation_slope<KIND>(x));
        y[i] = activated<KIND>(x);
    }
}

// y -> activation(y), in place, with slopes or signs for the backward pass. `flags`: n bytes, y >
// 0.
inline void activate(const Nonlinearity& end, int64_t row, int64_t n, float* y, uint8_t* flags) {
    if (end.before) std::memcpy(end.before + row * n, y, n * sizeof(float));
    if (end.activation == Activation::relu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            flags[i] = y[i] > 0.0f;
            y[i] = relu(y[i]);
        }
        return;
    }
    int8_t* slope = end.slope ? end.slope + row * n : nullptr;
    with_activation(end.activation, [=](auto kind) {
        if constexpr (is_cut(kind)) return;
        if (slope) {
            activate_with_slope<kind>(n, y, slope);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = activated<kind>(y[i]);
        }
    });
}

// Applies the epilogue to rows of n values on one thread: activation, dropout, rounding.
class RowEpilogue {
public:
    // factor [M]: of each row, behind dropout; may be null.
    RowEpilogue(const Nonlinearity& nonlinearity, const Coded& rounded, Border<float> out,
                int64_t n, const float* factor = nullptr)
        : n_(n), out_(out), scratch_(n), nonlinearity_(nonlinearity), rounded_(rounded),
          factor_(factor), flags_(unit() * n) {}

    // read(i, y) sets y to row first + i. -> the largest magnitude
    template <class Read>
    Magnitude end(int64_t first, int64_t rows, const Read& read) {
        Magnitude largest = 0;
        for (int64_t begin = 0; begin < rows; begin += unit()) {
            const int64_t past = std::min(begin + unit(), rows);
            for (int64_t i = begin; i < past; ++i) {
                const int64_t row = first + i;
                float* y = out_.is_wide() ? out_.wide(row * n_) : scratch_.a.data();
                read(i, y);
                activate(nonlinearity_, row, n_, y, flags_.data() + (i - begin) * n_);
                apply(nonlinearity_.dropout, row * n_, n_, y, scratch_.words.data());
                if (factor_) multiply(factor_[row], n_, y);
                if (out_.is_narrow()) narrow_row(y, n_, out_.narrow(row * n_));
                if (!rounded_.codes) continue;
                largest =
                    std::max(largest, round_row(rounded_, row * n_, n_, y, scratch_.flags.data()));
            }
            uint8_t* positive = nonlinearity_.positive;
            if (positive)
                pack_bits(flags_.data(), (past - begin) * n_, positive + (first + begin) * n_ / 8);
        }
        return largest;
    }

#if defined(LSQ_WIDE)
    // Whether a row goes through end_straight().
    bool straight() const {
        const Nonlinearity& end = nonlinearity_;
        if (end.before || !is_cut(end.activation)) return false;
        if (n_ % 8 && (rounded_.codes || end.positive)) return false;
        if (!rounded_.codes) return true;
        const bool floats = out_.is_wide() || out_.is_narrow();
        return !rounded_.error && !floats && WideClip::fits(rounded_.clip[0]);
    }

    // Takes a row in registers: read(i, mask) makes sixteen of its values. -> the largest magnitude
    template <class Read>
    Magnitude end_straight(int64_t row, const Read& read) {
        return rounded_.codes ? end_straight<true>(row, read) : end_straight<false>(row, read);
    }

#endif

protected:
    int64_t n_;
    Border<float> out_;
    Scratch scratch_;

private:
#if defined(LSQ_WIDE)
    template <bool ROUNDS, class Read>
    Magnitude end_straight(int64_t row, const Read& read) {
        const Dropout& dropout = nonlinearity_.dropout;
        const int64_t first = row * n_;
        const uint32_t* words = scratch_.words.data();
        const bool drops = dropout.threshold,
                   is_relu = nonlinearity_.activation == Activation::relu;
        if (drops) philox(dropout.key[0], dropout.subsequence, first, n_, scratch_.words.data());
        const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(dropout.threshold));
        const __m512 keep = _mm512_set1_ps(dropout.keep), zero = _mm512_setzero_ps(),
                     factor = _mm512_set1_ps(factor_ ? factor_[row] : 1.0f);
        const float clip = ROUNDS ? rounded_.clip[0] : 1.0f;
        const WideClip wide(clip, ROUNDS ? clip / rounded_.largest : 1.0f);
        __m512i largest = _mm512_setzero_si512();
        WideBits outside, positive;
        each_sixty_four(
            n_,
            [&](int64_t i, int64_t at, __mmask16 there) LSQ_FORCED {
                __m512 y = read(i, there);
                if (is_relu) {
                    positive.add(at, _mm512_cmp_ps_mask(y, zero, _CMP_GT_OQ));
                    y = _mm512_max_ps(zero, y);  // NaN stays NaN
                }
                if (drops) {
                    const __m512i word = _mm512_maskz_loadu_epi32(there, words + i);
                    y = _mm512_maskz_mul_ps(_mm512_cmpge_epu32_mask(word, limit), y, keep);
                }
                if (factor_) y = _mm512_mul_ps(y, factor);
                if (ROUNDS) {
                    outside.add(at, wide.round(y, there, rounded_.codes + first + i, largest));
                } else {
                    store_sixteen(out_, first + i, there, y);
                }
            },
            [&](int64_t column, int64_t count) LSQ_FORCED {
                if (ROUNDS) outside.store(rounded_.clipped, first + column, count);
                positive.store(nonlinearity_.positive, first + column, count);
            });
        return _mm512_reduce_max_epu32(largest);
    }

#endif
    int64_t unit() const { return n_ % 8 ? 8 : 1; }  // of rows that begin at a byte of `positive`

    const Nonlinearity& nonlinearity_;
    const Coded& rounded_;
    const float* factor_;
    Aligned<uint8_t> flags_;
};

}  // namespace lsq
