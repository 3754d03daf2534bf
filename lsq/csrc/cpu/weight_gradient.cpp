// Operand and epilogue of the product for the gradient of a weight; lsq/ops/weight_gradient.py has
// the formulas.
#include "column_rounding.h"
#include "floats.h"
#include "loops.h"
#include "strips.h"
#include "tile_reader.h"

using namespace lsq;

// For products without tiles: codes [M, K] and column_scale [K].
LSQ_EXPORT void lsq_round_columns(const ProjectWeightGradient& op, int8_t* rounded,
                                  float* column_scale) {
    ColumnRounding(op, column_scale).to_rows(rounded);
}

namespace {

// Applies the epilogue to rows on one thread: dweight, and clip_sums [N], each row's part of its
// clip's gradient.
class Epilogue {
public:
    Epilogue(const ProjectWeightGradient& op, const float* column_scale, float* clip_sums)
        : op_(op), values_(op.weight.values, op.weight.values_dtype),
          dweight_(op.dweight, op.weight.values_dtype), n_(op.columns), column_scale_(column_scale),
          clip_sums_(clip_sums) {}

    // Sums of codes, whose columns have scales. Rows of padding are left out.
    int operator()(int64_t first, int64_t rows, const int32_t* sums, int64_t stride) {
        if (op_.weight.in_out) return end_in_out(first, rows, sums, stride);
#if defined(LSQ_WIDE)
        if (!op_.learned_step) return end_sums(first, rows, sums, stride);
#endif
        return scale(first, rows, sums, stride);
    }

    int operator()(int64_t first, int64_t rows, const LongSum* sums, int64_t stride) {
        if (op_.weight.in_out) return end_in_out(first, rows, &sums->value, stride);
        return scale(first, rows, sums, stride);
    }

    int operator()(int64_t first, int64_t rows, const float* product, int64_t stride) {
        if (op_.weight.in_out) return end_in_out(first, rows, product, stride);
        return end(first, rows, [&](int64_t row) {
            return [line = product + row * stride](int64_t i) { return line[i]; };
        });
    }

private:
    template <class Sum>
    int scale(int64_t first, int64_t rows, const Sum* sums, int64_t stride) {
        return end(first, rows, [&](int64_t row) {
            const Sum* line = sums + row * stride;
            const float *column_scale = column_scale_,
                        inverse = 1.0f / op_.weight.scale[first + row];
            return
                [=](int64_t i) { return static_cast<float>(line[i]) * column_scale[i] * inverse; };
        });
    }

#if defined(LSQ_WIDE)
    // Each row in one pass.
    int end_sums(int64_t first, int64_t rows, const int32_t* sums, int64_t stride) {
        const __m512 zero = _mm512_setzero_ps(), sign = _mm512_set1_ps(-0.0f);
        for (int64_t row = first; row < std::min(first + rows, op_.weight_rows);
             ++row, sums += stride) {
            const __m512 most = _mm512_set1_ps(limit(row)),
                         inverse = _mm512_set1_ps(1.0f / op_.weight.scale[row]);
            const int64_t at = row * n_;
            __m512 clip_sum = zero;
            const bool clips = !op_.weight.absmax;
            each_sixteen(n_, [&](int64_t i, __mmask16 there) {
                const __m512 sum = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums + i));
                const __m512 scaled =
                    _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, column_scale_ + i));
                const __m512 x = _mm512_mul_ps(scaled, inverse);
                if (!clips) return store_past(dweight_, at + i, there, x);
                const __m512 w = load_sixteen(values_, at + i, there);
                const __mmask16 outside =
                    _mm512_cmp_ps_mask(_mm512_andnot_ps(sign, w), most, _CMP_GT_OQ);
                const __mmask16 below =
                    static_cast<__mmask16>(~_mm512_cmp_ps_mask(w, zero, _CMP_GT_OQ));
                clip_sum = _mm512_mask_add_ps(clip_sum, outside, clip_sum,
                                              _mm512_mask_xor_ps(x, below, x, sign));
                store_past(dweight_, at + i, there, _mm512_mask_mov_ps(x, outside, zero));
            });
            clip_sums_[row] = _mm512_reduce_add_ps(clip_sum);
        }
        finish_stream();
        return 0;
    }

#endif
    // line_of(i)(column) is the gradient of row first + i. Results go past the caches.
    template <class Lines>
    int end(int64_t first, int64_t rows, const Lines& line_of) {
        float *g = row_.at_least(2 * n_), *scratch = g + n_;
        for (int64_t row = first; row < std::min(first + rows, op_.weight_rows); ++row) {
            const float* w = weights(row * n_, n_, scratch);
            clip_sums_[row] = cut(row, w, line_of(row - first), g);
            if (op_.learned_step) clip_sums_[row] += learned_step_sum(row, w, g);
            write(g, n_, row * n_);
        }
        finish_stream();
        return 0;
    }

    // A weight [K, N], by transposed blocks.
    template <class T>
    int end_in_out(int64_t first, int64_t rows, const T* product, int64_t stride) {
        const int64_t past = std::min(first + rows, op_.weight_rows), width = op_.weight_rows;
        for (int64_t row = first; row < past; row += kTileSide) {
            const int64_t count = std::min(kTileSide, past - row);
            float sums[kTileSide] = {}, limits[kTileSide] = {}, inverse[kTileSide] = {};
            for (int64_t j = 0; j < count; ++j) {
                limits[j] = limit(row + j);
                inverse[j] = column_scale_ ? 1.0f / op_.weight.scale[row + j] : 1.0f;
            }
            for (int64_t begin = 0; begin < n_; begin += kTileSide) {
                const int64_t columns = std::min(kTileSide, n_ - begin);
                const T* from = product + (row - first) * stride + begin;
                alignas(64) T block[kTileSide][kTileSide] = {};
                if (count == kTileSide && columns == kTileSide) {
                    transpose_units(reinterpret_cast<const int8_t*>(from), stride * sizeof(T),
                                    reinterpret_cast<int8_t*>(block));
                } else {
                    for (int64_t j = 0; j < count; ++j) {
                        for (int64_t i = 0; i < columns; ++i) block[i][j] = from[j * stride + i];
                    }
                }
                for (int64_t i = 0; i < columns; ++i) {
                    const int64_t at = (begin + i) * width + row;
                    const float scale = column_scale_ ? column_scale_[begin + i] : 1.0f;
                    alignas(64) float wide[kTileSide] = {}, g[kTileSide];
                    const float* w = weights(at, count, wide);
                    if (w != wide)
                        w = static_cast<float*>(std::memcpy(wide, w, count * sizeof(float)));
#pragma omp simd
                    for (int64_t j = 0; j < kTileSide; ++j) {
                        const float x = static_cast<float>(block[i][j]) * scale * inverse[j];
                        const bool outside = std::fabs(w[j]) > limits[j];
                        const float across = w[j] > 0.0f ? x : -x;
                        sums[j] += outside ? across : 0.0f;
                        g[j] = outside ? 0.0f : x;
                    }
                    if (op_.learned_step) add_learned_step(row, count, begin + i, w, g, sums);
                    write(g, count, at);
                }
            }
            std::copy(sums, sums + count, clip_sums_ + row);
        }
        finish_stream();
        return 0;
    }

    // Adds the learned-step part of the clips' gradients: weights w of rows [row, row + count) in a
    // column; g is 0 outside.
    void add_learned_step(int64_t row, int64_t count, int64_t column, const float* w,
                          const float* g, float* sums) const {
        for (int64_t j = 0; j < count; ++j) {
            const float step = op_.weight.scale[row + j];
            const float decoded =
                static_cast<float>(op_.weight.codes[(row + j) * n_ + column]) * step;
            if (std::fabs(w[j]) <= limit(row + j))
                sums[j] += g[j] * (decoded - w[j]) / limit(row + j);
        }
    }

    // Weights [first, first + n); zeros where no limit cuts them: they may exist as codes alone.
    const float* weights(int64_t first, int64_t n, float* scratch) const {
        if (!op_.weight.absmax) return read(values_, first, n, scratch);
        std::fill(scratch, scratch + n, 0.0f);
        return scratch;
    }

    float limit(int64_t row) const {
        return op_.weight.absmax ? infinity() : op_.weight.clip[op_.clips > 1 ? row : 0];
    }

    void write(const float* g, int64_t n, int64_t first) const {
        if (dweight_.is_narrow()) {
            narrow_row(g, n, dweight_.narrow(first));
        } else {
            stream(g, n, dweight_.wide(first));
        }
    }

    // Learned-step part of the clip's gradient: weights w [n]; g is 0 outside.
    float learned_step_sum(int64_t row, const float* w, const float* g) const {
        const float most = limit(row), step = op_.weight.scale[row];
        const int8_t* codes = op_.weight.codes + row * n_;
        const int64_t n = n_;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const float decoded = static_cast<float>(codes[i]) * step;
            sum += std::fabs(w[i]) > most ? 0.0f : g[i] * (decoded - w[i]) / most;
        }
        return sum;
    }

    // Gradients of weights w [n], zero of clipped ones. -> their part of the clip's gradient
    template <class Line>
    float cut(int64_t row, const float* w, const Line& line, float* g) const {
        const float most = limit(row);
        const int64_t n = n_;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < n; ++i) {
            const float x = line(i);
            const bool outside = std::fabs(w[i]) > most;
            const float across = w[i] > 0.0f ? x : -x;
            sum += outside ? across : 0.0f;
            g[i] = outside ? 0.0f : x;
        }
        return sum;
    }

    const ProjectWeightGradient& op_;
    Border<const float> values_;
    Border<float> dweight_;
    int64_t n_;
    const float* column_scale_;
    float* clip_sums_;
    Kept<float> row_;
};

}  // namespace

// Rounds x itself; product.b is only its shape. Leaves column_scale [K].
LSQ_EXPORT void lsq_multiply_project_weight_gradient(const ProjectWeightGradient& op,
                                                     const TileProduct& product,
                                                     float* column_scale, float* clip_sums) {
    ColumnRounding(op, column_scale).to_tiles(product);
    multiply_packed(product, [&] { return Epilogue(op, column_scale, clip_sums); });
}

// Rows [first, first + rows) of the product [rows, K], whose columns have scales column_scale [K].
LSQ_EXPORT void lsq_end_long_project_weight_gradient(const ProjectWeightGradient& op,
                                                     const LongSum* sums, int64_t first,
                                                     int64_t rows, const float* column_scale,
                                                     float* clip_sums) {
    read_rows(sums, first, rows, op.columns, [&] { return Epilogue(op, column_scale, clip_sums); });
}

LSQ_EXPORT void lsq_end_float_weight_gradient(const ProjectWeightGradient& op, const float* product,
                                              float* clip_sums) {
    read_rows(product, 0, op.weight_rows, op.columns,
              [&] { return Epilogue(op, nullptr, clip_sums); });
}

// sums [N] -> dclip.
LSQ_EXPORT void lsq_finish_weight_gradient(const ProjectWeightGradient& op, const float* sums) {
    if (!op.dclip) return;
    const int64_t per_clip = op.weight_rows / op.clips;
    for (int64_t clip = 0; clip < op.clips; ++clip) {
        double sum = 0.0;
        for (int64_t row = clip * per_clip; row < (clip + 1) * per_clip; ++row) sum += sums[row];
        op.dclip[clip] = static_cast<float>(sum * op.clip_factor);
    }
}
