// Epilogue of the product for the gradient of an input; lsq/ops/input_gradient.py has the formulas.
#include "floats.h"
#include "loops.h"
#include "nonlinearity.h"
#include "strips.h"

using namespace lsq;

namespace {

constexpr int64_t kStripe = 256;  // columns that a thread adds up at a time

// Applies the epilogue to rows on one thread: dx or its codes, clip_sums [M], and partial [ceil(M /
// part_rows), K] if the sum over rows is wanted. Rows of a part come in order, on one thread after
// the other.
class Epilogue {
public:
    Epilogue(const ProjectInputGradient& op, float* partial, float* clip_sums)
        : op_(op), dx_(op.dx, op.dx_dtype), n_(op.columns), partial_(partial),
          clip_sums_(clip_sums), scratch_(n_) {}

    // Sums of codes.
    int operator()(int64_t first, int64_t rows, const int32_t* sums, int64_t stride) {
#if defined(LSQ_WIDE)
        if (straight()) {
            for (int64_t row = 0; row < rows; ++row) end_sums(first + row, sums + row * stride);
            return 0;
        }
#endif
        return scale(first, rows, sums, stride);
    }

    int operator()(int64_t first, int64_t rows, const LongSum* sums, int64_t stride) {
        return scale(first, rows, sums, stride);
    }

    // Floats, perhaps in dx.
    int operator()(int64_t first, int64_t rows, const float* product, int64_t stride) {
        return end(first, rows, [&](int64_t row, float* g) {
            const float* line = product + row * stride;
            if (g != line) std::memcpy(g, line, n_ * sizeof(float));
        });
    }

private:
    template <class Sum>
    int scale(int64_t first, int64_t rows, const Sum* sums, int64_t stride) {
        return end(first, rows, [&](int64_t row, float* g) {
            const float scale = op_.gradient.scale[first + row];
            const Sum* line = sums + row * stride;
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) g[i] = static_cast<float>(line[i]) * scale;
        });
    }

#if defined(LSQ_WIDE)
    // Whether one pass does everything but the rounding of a row.
    bool straight() const {
        return n_ % 8 == 0 && !op_.x.error && is_cut(op_.nonlinearity.activation);
    }

    void end_sums(int64_t row, const int32_t* sums) {
        const Dropout& dropout = op_.nonlinearity.dropout;
        const int64_t at = row * n_;
        const bool is_relu = op_.nonlinearity.activation == Activation::relu,
                   begins = row % op_.part_rows == 0;
        const uint8_t *clipped = op_.x.clipped, *positive = op_.nonlinearity.positive;
        const float *accumulated = op_.accumulated, *added = op_.added;
        const float* weight_scale = op_.rounded.codes ? op_.rounded.weight_scale : nullptr;
        float *scaled = scratch_.a.data(), *part = partial_ + row / op_.part_rows * n_;
        uint32_t* words = scratch_.words.data();
        if (dropout.threshold) philox(dropout.key[0], dropout.subsequence, at, n_, words);
        const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(dropout.threshold));
        const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
        const __m512 scale = _mm512_set1_ps(op_.gradient.scale[row]),
                     keep = _mm512_set1_ps(dropout.keep);
        __m512 clip_sum = _mm512_setzero_ps();
        // Magnitudes order like their bits; NaN is the largest.
        __m512i largest = _mm512_setzero_si512();
        each_sixteen(n_, [&](int64_t i, __mmask16 there) {
            const auto load = [&](const float* from) {
                return _mm512_maskz_loadu_ps(there, from + i);
            };
            __m512 x =
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums + i)), scale);
            if (accumulated) x = _mm512_add_ps(x, load(accumulated + at));
            if (clipped) {
                const __m128i codes = _mm_maskz_loadu_epi8(there, op_.x.codes + at + i);
                x = cut_clipped(x, bits_at(clipped, at + i, there), codes, clip_sum);
            }
            if (dropout.threshold) {
                const __m512i word = _mm512_maskz_loadu_epi32(there, words + i);
                x = _mm512_maskz_mul_ps(_mm512_cmpge_epu32_mask(word, limit), x, keep);
            }
            if (is_relu) x = _mm512_maskz_mov_ps(bits_at(positive, at + i, there), x);
            if (added) x = _mm512_add_ps(x, load(added + at));
            if (op_.sum)
                _mm512_mask_storeu_ps(part + i, there, begins ? x : _mm512_add_ps(load(part), x));
            if (weight_scale) {
                x = _mm512_mul_ps(x, load(weight_scale));
                largest =
                    _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(x), magnitude));
                _mm512_mask_storeu_ps(scaled + i, there, x);
            } else if (op_.dx) {
                store_sixteen(dx_, at + i, there, x);
            }
        });
        clip_sums_[row] = _mm512_reduce_add_ps(clip_sum);
        if (weight_scale)
            round_scaled(op_.rounded, row, n_, scaled, float_of(_mm512_reduce_max_epu32(largest)));
    }

#endif
    // read(i, g) sets g to row first + i.
    template <class Read>
    int end(int64_t first, int64_t rows, const Read& read) {
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t row = first + i;
            float* dx = op_.dx && !dx_.is_narrow() ? dx_.wide(row * n_) : nullptr;
            float* g = dx && op_.accumulated != op_.dx ? dx : scratch_.a.data();
            read(i, g);
            if (op_.accumulated) add_to(op_.accumulated + row * n_, n_, g);
            clip_sums_[row] = straight_through(op_.x, row * n_, n_, g);
            undo(op_.nonlinearity, row, n_, g, scratch_.words.data());
            if (op_.added) add_to(op_.added + row * n_, n_, g);
            if (op_.sum) add_up(row, g);
            if (dx && dx != g) std::memcpy(dx, g, n_ * sizeof(float));
            if (dx_.is_narrow()) narrow_row(g, n_, dx_.narrow(row * n_));
            if (op_.rounded.codes) round_row(op_.rounded, row, n_, g, g);
        }
        return 0;
    }

    void add_up(int64_t row, const float* g) {
        float* sum = partial_ + row / op_.part_rows * n_;
        if (row % op_.part_rows == 0) {
            std::memcpy(sum, g, n_ * sizeof(float));
        } else {
            add_to(g, n_, sum);
        }
    }

    const ProjectInputGradient& op_;
    Border<float> dx_;
    int64_t n_;
    float *partial_, *clip_sums_;
    Scratch scratch_;
};

}  // namespace

LSQ_EXPORT void lsq_multiply_project_input_gradient(const ProjectInputGradient& op,
                                                    const TileProduct& product, float* partial,
                                                    float* clip_sums) {
    multiply_rows(product, [&] { return Epilogue(op, partial, clip_sums); });
}

// Rows [first, first + rows) of the product [rows, K]. Blocks come in order.
LSQ_EXPORT void lsq_end_long_project_input_gradient(const ProjectInputGradient& op,
                                                    const LongSum* sums, int64_t first,
                                                    int64_t rows, float* partial,
                                                    float* clip_sums) {
    read_rows(sums, first, rows, op.columns, [&] { return Epilogue(op, partial, clip_sums); });
}

LSQ_EXPORT void lsq_end_float_input_gradient(const ProjectInputGradient& op, const float* product,
                                             float* partial, float* clip_sums) {
    read_rows(product, 0, op.rows, op.columns, [&] { return Epilogue(op, partial, clip_sums); });
}

// Adds up the partial sums.
LSQ_EXPORT void lsq_finish_input_gradient(const ProjectInputGradient& op, const float* partial,
                                          const float* clip_sums) {
    const int64_t n = op.columns, parts = (op.rows + op.part_rows - 1) / op.part_rows;
    if (op.sum) {
#pragma omp parallel for schedule(static)
        for (int64_t begin = 0; begin < n; begin += kStripe) {
            const int64_t end = std::min(begin + kStripe, n);
            std::fill(op.sum + begin, op.sum + end, 0.0f);
            for (int64_t part = 0; part < parts; ++part)
                add_to(partial + part * n + begin, end - begin, op.sum + begin);
        }
    }
    if (op.dclip) {
        double sum = 0.0;
        for (int64_t row = 0; row < op.rows; ++row) sum += clip_sums[row];
        op.dclip[0] = static_cast<float>(sum * op.x.clip_factor);
    }
}
