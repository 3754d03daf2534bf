// The epilogue of a product: scale, bias, activation, dropout, rounding, in one pass over each row
// of it.
#include "row_epilogue.h"
#include "strips.h"

using namespace lsq;

namespace {

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
                const float* factor = factors(first + row);
                const __m512 of_row = _mm512_set1_ps(row_factor(first + row));
                const auto read = [&](int64_t i, __mmask16 there) LSQ_FORCED {
                    const __m512 y = scaled(sums + row * stride, factor, op_.bias, i, there);
                    return op_.row_factor ? _mm512_mul_ps(y, of_row) : y;
                };
                largest = std::max(largest, end_straight(first + row, read));
            }
            return largest;
        }
#endif
        return end_sums(first, rows, sums, stride);
    }

    Magnitude operator()(int64_t first, int64_t rows, const LongSum* sums, int64_t stride) {
        return end_sums(first, rows, sums, stride);
    }

    // Floats, in place.
    Magnitude operator()(int64_t first, int64_t rows, const float*, int64_t) {
        return end(first, rows, [&](int64_t i, float* y) {
            if (op_.row_factor) multiply(row_factor(first + i), n_, y);
            if (op_.bias) add_to(op_.bias, n_, y);
        });
    }

private:
    void set_factors(float input) {
        const float* scale = op_.weight.scale;
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) alpha_[i] = input * scale[i];
    }

    // Factors of a row's sums, without row_factor.
    const float* factors(int64_t row) {
        if (op_.x.coded.by_row) set_factors(op_.x.coded.scale[row]);
        return alpha_.data();
    }

    float row_factor(int64_t row) const { return op_.row_factor ? op_.row_factor[row] : 1.0f; }

    template <class Sum>
    Magnitude end_sums(int64_t first, int64_t rows, const Sum* sums, int64_t stride) {
        return end(first, rows, [&](int64_t row, float* y) {
            scale_sums(sums + row * stride, n_, factors(first + row), op_.bias, y);
            if (op_.row_factor) multiply(row_factor(first + row), n_, y);
        });
    }

#if defined(LSQ_WIDE)
    // Scales 16 sums from column i on, with a bias if there is one.
    static __m512 scaled(const int32_t* sums, const float* factor, const float* bias, int64_t i,
                         __mmask16 there) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums + i));
        const __m512 y = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, factor + i));
        return bias ? _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, bias + i)) : y;
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
