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
    RowEpilogue(const Nonlinearity& nonlinearity, const Coded& rounded, Border<float> out,
                int64_t n)
        : n_(n), out_(out), scratch_(n), nonlinearity_(nonlinearity), rounded_(rounded),
          flags_(unit() * n)
#if defined(LSQ_WIDE)
          ,
          wide_(rounded.codes ? rounded.clip[0] : 1.0f,
                rounded.codes ? rounded.clip[0] / rounded.largest : 1.0f)
#endif
    {
    }

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
    LSQ_FORCED Magnitude end_straight(int64_t row, const Read& read) {
        return with_straight(row, [&](auto& end) LSQ_FORCED {
            each_sixty_four(
                n_,
                [&](int64_t i, int64_t at, __mmask16 there) LSQ_FORCED {
                    end.take(i, at, there, read(i, there));
                },
                [&](int64_t column, int64_t count) LSQ_FORCED { end.store(column, count); });
        });
    }

    // Calls use(end) for a row, with end.take(i, i % 64, mask, y) for sixteen values y from column
    // i on, and end.store(column, count) after each 64. -> the largest magnitude
    template <class Use>
    LSQ_FORCED Magnitude with_straight(int64_t row, const Use& use) {
        const Dropout& dropout = nonlinearity_.dropout;
        if (dropout.threshold)
            philox(dropout.key[0], dropout.subsequence, row * n_, n_, scratch_.words.data());
        const bool simple = nonlinearity_.activation == Activation::none && !dropout.threshold;
        if (!rounded_.codes && simple) {
            Straight<false, false> end(*this, row);
            use(end);
            return 0;
        }
        if (rounded_.codes) {
            Straight<true, true> end(*this, row);
            use(end);
            return _mm512_reduce_max_epu32(end.largest);
        }
        Straight<false, true> end(*this, row);
        use(end);
        return 0;
    }

#endif

protected:
    int64_t n_;
    Border<float> out_;
    Scratch scratch_;

private:
#if defined(LSQ_WIDE)
    // The end of one row. ROUNDS: to codes, else to floats. ENDS: there is an activation or dropout.
    template <bool ROUNDS, bool ENDS>
    struct Straight {
        const RowEpilogue& of;
        const WideClip wide;
        const int64_t first;
        const uint32_t* words;
        const bool drops, is_relu;
        const __m512i limit;
        const __m512 keep;
        __m512i largest = _mm512_setzero_si512();
        WideBits outside, positive;

        LSQ_FORCED Straight(const RowEpilogue& epilogue, int64_t row)
            : of(epilogue), wide(epilogue.wide_), first(row * epilogue.n_),
              words(epilogue.scratch_.words.data()),
              drops(epilogue.nonlinearity_.dropout.threshold),
              is_relu(epilogue.nonlinearity_.activation == Activation::relu),
              limit(_mm512_set1_epi32(
                  static_cast<int32_t>(epilogue.nonlinearity_.dropout.threshold))),
              keep(_mm512_set1_ps(epilogue.nonlinearity_.dropout.keep)) {}

        LSQ_FORCED void take(int64_t i, int64_t at, __mmask16 there, __m512 y) {
            if (ENDS && is_relu) {
                const __m512 zero = _mm512_setzero_ps();
                positive.add(at, _mm512_cmp_ps_mask(y, zero, _CMP_GT_OQ));
                y = _mm512_max_ps(zero, y);  // NaN stays NaN
            }
            if (ENDS && drops) {
                const __m512i word = _mm512_maskz_loadu_epi32(there, words + i);
                y = _mm512_maskz_mul_ps(_mm512_cmpge_epu32_mask(word, limit), y, keep);
            }
            if (ROUNDS) {
                outside.add(at, wide.round(y, there, of.rounded_.codes + first + i, largest));
            } else {
                store_sixteen(of.out_, first + i, there, y);
            }
        }

        LSQ_FORCED void store(int64_t column, int64_t count) {
            if (ROUNDS) outside.store(of.rounded_.clipped, first + column, count);
            if (ENDS) positive.store(of.nonlinearity_.positive, first + column, count);
        }
    };

#endif
    int64_t unit() const { return n_ % 8 ? 8 : 1; }  // of rows that begin at a byte of `positive`

    const Nonlinearity& nonlinearity_;
    const Coded& rounded_;
    Aligned<uint8_t> flags_;
#if defined(LSQ_WIDE)
    WideClip wide_;
#endif
};

}  // namespace lsq
