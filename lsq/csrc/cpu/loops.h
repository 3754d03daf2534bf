// Loops over rows on all threads, and sinks of their sums and gradients.
//
// Results do not depend on the number of threads: rows are summed in a fixed partition, partial
// sums in order.
#pragma once

#include "aligned.h"
#include "rows.h"

namespace lsq {

constexpr int kMaxBlocks = 64;  // partial sums per column

// At most kMaxBlocks blocks of M rows, whatever the number of threads.
struct Blocks {
    int64_t rows, count, size;

    explicit Blocks(int64_t m)
        : rows(m), count(std::min<int64_t>(kMaxBlocks, m)), size(m ? (m + count - 1) / count : 0) {}
    int64_t begin(int64_t block) const { return std::min(block * size, rows); }
    int64_t end(int64_t block) const { return std::min((block + 1) * size, rows); }
};

// Sums of columns, one partial row per block, added up in order at the end.
class ColumnSums {
public:
    ColumnSums(int64_t blocks, int64_t n, bool wanted)
        : blocks_(wanted ? blocks : 0), n_(n), partial_(blocks_ * n, 0.0f) {}

    void add(int64_t block, const float* x) {
        if (float* sum = of_block(block)) add_to(x, n_, sum);
    }

    void add_product(int64_t block, const float* x, const float* y) {
        float* sum = of_block(block);
        if (!sum) return;
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) sum[i] += x[i] * y[i];
    }

    // Partial row of a block, or null.
    float* of_block(int64_t block) {
        return partial_.empty() ? nullptr : partial_.data() + block * n_;
    }

    void write(float* out) const {
        if (!out) return;
        std::fill(out, out + n_, 0.0f);
        if (partial_.empty()) return;
        for (int64_t b = 0; b < blocks_; ++b) add_to(partial_.data() + b * n_, n_, out);
    }

private:
    int64_t blocks_, n_;
    Aligned<float> partial_;
};

// Adds up one number per block in order, in double precision.
inline void write_sum(const std::vector<double>& partial, float factor, float* out) {
    if (!out) return;
    double sum = 0.0;
    for (double value : partial) sum += value;
    out[0] = static_cast<float>(sum * factor);
}

inline bool any(const std::vector<uint8_t>& flags) {
    return std::any_of(flags.begin(), flags.end(), [](uint8_t flag) { return flag != 0; });
}

struct Scratch {
    Aligned<float> a, b;
    Aligned<uint32_t> words;
    Aligned<uint8_t> flags;

    explicit Scratch(int64_t n) : a(n), b(n), words(n + 8), flags(n + 8) {}
};

constexpr int64_t kLittle = 4096;  // elements, up to which other threads are not worth waking

// Calls body(row, scratch) -> a magnitude for all rows, in parallel. -> the largest
template <class Body>
Magnitude for_rows(int64_t rows, int64_t n, const Body& body) {
    Magnitude largest = 0;
#pragma omp parallel reduction(max : largest) if (rows * n > kLittle)
    {
        Scratch scratch(n);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row)
            largest = std::max<Magnitude>(largest, body(row, scratch));
    }
    return largest;
}

// Calls body(block, row, scratch) for all rows: blocks in parallel, rows of a block in order.
template <class Body>
void for_blocks(const Blocks& blocks, int64_t n, const Body& body) {
#pragma omp parallel
    {
        Scratch scratch(n);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row)
                body(block, row, scratch);
        }
    }
}

// Takes the gradient of a product [M, N]: sums it for the bias, copies it to `floats`, rounds it to
// `rounded`; each may be null.
class GradientSink {
public:
    GradientSink(const Blocks& blocks, int64_t n, float* floats, const RoundedGradient& rounded,
                 float* bias)
        : n_(n), floats_(floats), rounded_(rounded), bias_(bias),
          bias_sums_(blocks.count, n, bias) {}

    bool wanted() const { return floats_ || rounded_.codes || bias_; }

    // Takes row `row` of the gradient; `scratch` [n] may be g.
    void add(int64_t block, int64_t row, const float* g, float* scratch) {
        bias_sums_.add(block, g);
        if (floats_) std::memcpy(floats_ + row * n_, g, n_ * sizeof(float));
        if (rounded_.codes) round_row(rounded_, row, n_, g, scratch);
    }

#if defined(LSQ_WIDE)
    // Takes a row that first goes straight through its rounding -> its part of the clip's gradient.
    // Rows start at a byte of `clipped`; read(i, lanes) makes 16 values.
    template <class Read>
    float add_straight_through(int64_t block, int64_t row, const Coded& of, const Read& read,
                               float* scratch) {
        const int64_t first = row * n_;
        const float* weight_scale = rounded_.codes ? rounded_.weight_scale : nullptr;
        float* sum = bias_sums_.of_block(block);
        const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
        __m512 clip = _mm512_setzero_ps();
        // Magnitudes order like their bits; NaN is the largest.
        __m512i largest = _mm512_setzero_si512();
        each_sixteen(n_, [&](int64_t i, __mmask16 there) {
            __m512 x = read(i, there);
            if (of.clipped) {
                const __m128i codes = _mm_maskz_loadu_epi8(there, of.codes + first + i);
                x = cut_clipped(x, bits_at(of.clipped, first + i, there), codes, clip);
            }
            if (sum)
                _mm512_mask_storeu_ps(sum + i, there,
                                      _mm512_add_ps(_mm512_maskz_loadu_ps(there, sum + i), x));
            if (floats_) _mm512_mask_storeu_ps(floats_ + first + i, there, x);
            if (!weight_scale) return;
            x = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(there, weight_scale + i));
            largest =
                _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(x), magnitude));
            _mm512_mask_storeu_ps(scratch + i, there, x);
        });
        if (weight_scale)
            round_scaled(rounded_, row, n_, scratch, float_of(_mm512_reduce_max_epu32(largest)));
        return _mm512_reduce_add_ps(clip);
    }

#endif

    void finish() const { bias_sums_.write(bias_); }

private:
    int64_t n_;
    float* floats_;
    const RoundedGradient& rounded_;
    float* bias_;
    ColumnSums bias_sums_;
};

}  // namespace lsq
