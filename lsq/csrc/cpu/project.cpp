// The epilogue of a product: scale, bias, activation, dropout, rounding, in one pass over each row
// of it.
#include "nonlinearity.h"
#include "floats.h"
#include "loops.h"
#include "strips.h"

using namespace lsq;

namespace {

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
void activate(const Nonlinearity& end, int64_t row, int64_t n, float* y, uint8_t* flags) {
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
          flags_(unit() * n) {}

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

protected:
    int64_t n_;
    Border<float> out_;
    Scratch scratch_;

private:
    int64_t unit() const { return n_ % 8 ? 8 : 1; }  // of rows that begin at a byte of `positive`

    const Nonlinearity& nonlinearity_;
    const Coded& rounded_;
    Aligned<uint8_t> flags_;
};

// Applies the epilogue to rows of a product with a weight on one thread.
class Epilogue : RowEpilogue {
public:
    explicit Epilogue(const Project& op)
        : RowEpilogue(op.nonlinearity, op.rounded, {op.out, op.out_dtype}, op.columns), op_(op),
          alpha_(op.x.coded.codes ? n_ : 0) {
        if (op.x.coded.codes && !op.x.coded.by_row) set_factors(op.x.coded.scale[0]);
    }

    // Sums of codes. -> the largest magnitude
    Magnitude operator()(int64_t first, int64_t rows, const int32_t* sums, int64_t stride) {
#if defined(LSQ_WIDE)
        if (straight()) {
            Magnitude largest = 0;
            for (int64_t row = 0; row < rows; ++row) {
                largest = std::max(
                    largest, round_sums(first + row, sums + row * stride, factors(first + row)));
            }
            return largest;
        }
        if (plain()) {
            for (int64_t row = 0; row < rows; ++row) {
                store_scaled((first + row) * n_, sums + row * stride, factors(first + row));
            }
            return 0;
        }
#endif
        return end_sums(first, rows, sums, stride);
    }

    Magnitude operator()(int64_t first, int64_t rows, const LongSum* sums, int64_t stride) {
        return end_sums(first, rows, sums, stride);
    }

    // Floats, in place.
    Magnitude operator()(int64_t first, int64_t rows, const float*, int64_t) {
        return end(first, rows, [&](int64_t, float* y) {
            if (op_.bias) add_to(op_.bias, n_, y);
        });
    }

private:
    void set_factors(float input) {
        const float* scale = op_.weight.scale;
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) alpha_[i] = input * scale[i];
    }

    // Factors of a row's sums.
    const float* factors(int64_t row) {
        if (op_.x.coded.by_row) set_factors(op_.x.coded.scale[row]);
        return alpha_.data();
    }

    template <class Sum>
    Magnitude end_sums(int64_t first, int64_t rows, const Sum* sums, int64_t stride) {
        return end(first, rows, [&](int64_t row, float* y) {
            scale_sums(sums + row * stride, n_, factors(first + row), op_.bias, y);
        });
    }

#if defined(LSQ_WIDE)
    // Whether rows go from sums to codes in registers.
    bool straight() const {
        const Coded& to = op_.rounded;
        const Nonlinearity& end = op_.nonlinearity;
        if (!to.codes || to.error || op_.out || end.before || !is_cut(end.activation) || n_ % 8)
            return false;
        return WideClip::fits(to.clip[0]);
    }

    // Whether sums are only scaled.
    bool plain() const {
        const Nonlinearity& end = op_.nonlinearity;
        return !op_.rounded.codes && !end.before && end.activation == Activation::none &&
               !end.dropout.threshold;
    }

    void store_scaled(int64_t at, const int32_t* sums, const float* factor) const {
        const float* bias = op_.bias;
        each_sixteen(n_, [&](int64_t i, __mmask16 there) {
            store_sixteen(out_, at + i, there, scaled(sums, factor, bias, i, there));
        });
    }

    // Scales 16 sums from column i on, with a bias if there is one.
    static __m512 scaled(const int32_t* sums, const float* factor, const float* bias, int64_t i,
                         __mmask16 there) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums + i));
        const __m512 y = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, factor + i));
        return bias ? _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, bias + i)) : y;
    }

    // -> the largest magnitude
    Magnitude round_sums(int64_t row, const int32_t* sums, const float* factor) {
        const Dropout& dropout = op_.nonlinearity.dropout;
        const int64_t first = row * n_;
        const uint32_t* words = scratch_.words.data();
        const float *bias = op_.bias, clip = op_.rounded.clip[0];
        const bool drops = dropout.threshold,
                   is_relu = op_.nonlinearity.activation == Activation::relu;
        if (drops) philox(dropout.key[0], dropout.subsequence, first, n_, scratch_.words.data());
        const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(dropout.threshold));
        const __m512 keep = _mm512_set1_ps(dropout.keep), zero = _mm512_setzero_ps();
        const WideClip wide(clip, clip / op_.rounded.largest);
        __m512i largest = _mm512_setzero_si512();
        WideBits outside, positive;
        each_sixty_four(
            n_,
            [&](int64_t i, int64_t at, __mmask16 there) {
                __m512 y = scaled(sums, factor, bias, i, there);
                if (is_relu) {
                    positive.add(at, _mm512_cmp_ps_mask(y, zero, _CMP_GT_OQ));
                    y = _mm512_max_ps(zero, y);  // NaN stays NaN
                }
                if (drops) {
                    const __m512i word = _mm512_maskz_loadu_epi32(there, words + i);
                    y = _mm512_maskz_mul_ps(_mm512_cmpge_epu32_mask(word, limit), y, keep);
                }
                outside.add(at, wide.round(y, there, op_.rounded.codes + first + i, largest));
            },
            [&](int64_t column, int64_t count) {
                outside.store(op_.rounded.clipped, first + column, count);
                positive.store(op_.nonlinearity.positive, first + column, count);
            });
        return _mm512_reduce_max_epu32(largest);
    }

#endif
    const Project& op_;
    Aligned<float> alpha_;
};

// The scale is written with row 0 and poisoned by the others, because a product may come in blocks
// of rows.
void write_scale(const Project& op, int64_t first, Magnitude largest) {
    if (!op.rounded.scale) return;
    const float before = first == 0 ? 0.0f : op.rounded.scale[0];
    finish(op.rounded, largest);
    op.rounded.scale[0] = poisoned(op.rounded.scale[0], before != before);
}

}  // namespace

LSQ_EXPORT void lsq_multiply_project(const Project& op, const TileProduct& product) {
    write_scale(op, 0, multiply_rows(product, [&] { return Epilogue(op); }));
}

// sums [rows, P] of rows [first, first + rows) of codes. No rows: the scale alone.
LSQ_EXPORT void lsq_end_long_project(const Project& op, const LongSum* sums, int64_t first,
                                     int64_t rows) {
    write_scale(op, first, read_rows(sums, first, rows, op.columns, [&] { return Epilogue(op); }));
}

// The product of floats lies in `out`.
LSQ_EXPORT void lsq_end_floats(const Project& op) {
    write_scale(op, 0, read_rows(op.out, 0, op.rows, op.columns, [&] { return Epilogue(op); }));
}

// `sums` [M, N] are a product with adapters; a result of floats replaces them.
LSQ_EXPORT void lsq_end_adapted(const Adapt& op, float* sums) {
    const Magnitude largest = read_rows(sums, 0, op.rows, op.columns, [&] {
        return [&, end = RowEpilogue(op.nonlinearity, op.rounded, {sums, 0}, op.columns)](
                   int64_t first, int64_t rows, const float*, int64_t) mutable {
            return end.end(first, rows, [](int64_t, float*) {});
        };
    });
    finish(op.rounded, largest);
}
