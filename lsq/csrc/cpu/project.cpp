// The end of a product with a weight: scale, bias, activation, dropout, rounding, in one pass over each row of it.
#include "loops.h"

using namespace lsq;

namespace {

// y -> activation(y), in place, and what the backward pass wants to know of y: row `row` of n values. `flags` is
// n bytes, y > 0.
void activate(const Nonlinearity& end, int64_t row, int64_t n, float* y, uint8_t* flags) {
    if (end.before) std::memcpy(end.before + row * n, y, n * sizeof(float));
    if (end.activation == Activation::gelu && end.slope) {
        int8_t* slope = end.slope + row * n;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float x = y[i];
            slope[i] = slope_code(gelu_slope(x));
            y[i] = gelu(x);
        }
    } else if (end.activation == Activation::gelu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] = gelu(y[i]);
    } else if (end.activation == Activation::relu) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            flags[i] = y[i] > 0.0f;
            y[i] = relu(y[i]);
        }
    }
}

// Ends rows [first, first + rows) of the product; read(row, y) makes y of one, which may stand where it is already. The
// scale is written with row 0 and poisoned by the others, because a product comes in blocks of rows.
template <class Read>
void end(const Project& op, int64_t first, int64_t rows, const Read& read) {
    const int64_t n = op.columns;
    const int64_t unit = n % 8 ? 8 : 1, units = (rows + unit - 1) / unit;  // of rows that begin at a byte of `positive`
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        Scratch scratch(n);
        std::vector<uint8_t> flags(unit * n);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < units; ++block) {
            const int64_t begin = first + block * unit, past = std::min(begin + unit, first + rows);
            for (int64_t row = begin; row < past; ++row) {
                float* y = op.out ? op.out + row * n : scratch.a.data();
                read(row, y);
                activate(op.nonlinearity, row, n, y, flags.data() + (row - begin) * n);
                apply(op.nonlinearity.dropout, row * n, n, y, scratch.words.data());
                if (op.rounded.codes) {
                    missing |= round_row(op.rounded, row * n, n, y, scratch.c.data(), scratch.flags.data());
                }
            }
            uint8_t* positive = op.nonlinearity.positive;
            if (positive) pack_bits(flags.data(), (past - begin) * n, positive + begin * n / 8);
        }
    }
    if (!op.rounded.scale) return;
    if (first == 0) finish(op.rounded, missing);
    op.rounded.scale[0] = poisoned(op.rounded.scale[0], missing);
}

}  // namespace

// sums int32 [rows, P]: those of rows [first, first + rows) of codes.
LSQ_EXPORT void lsq_end_sums(const Project& op, const int32_t* sums, int64_t first, int64_t rows) {
    const int64_t n = op.columns;
    std::vector<float> alpha(n);
    for (int64_t i = 0; i < n; ++i) alpha[i] = op.x.coded.scale[0] * op.weight.scale[i];
    const float *factor = alpha.data(), *bias = op.bias;
    end(op, first, rows, [&](int64_t row, float* y) {
        const int32_t* sum = sums + (row - first) * n;
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(sum[i]) * factor[i] + bias[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(sum[i]) * factor[i];
        }
    });
}

// The product of floats stands in `out`, where its result goes.
LSQ_EXPORT void lsq_end_floats(const Project& op) {
    const float* bias = op.bias;
    end(op, 0, op.rows, [&](int64_t, float* y) {
        if (!bias) return;
#pragma omp simd
        for (int64_t i = 0; i < op.columns; ++i) y[i] += bias[i];
    });
}
