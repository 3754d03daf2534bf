// Gated activation of a feed-forward block and its gradient; lsq/ops/gated.py has the formulas.
#include "nonlinearity.h"
#include "floats.h"
#include "loops.h"

using namespace lsq;

namespace {

// Row `row` of n values, perhaps in `scratch`.
const float* values_of(const Rows& rows, int64_t row, int64_t n, float* scratch) {
    if (!rows.coded.codes) return rows.floats + row * n;
    decode(rows.coded.codes + row * n, n, rows.coded.scale[0], scratch);
    return scratch;
}

// x [n] -> activations and, unless null, their slopes.
void activate(Activation kind, int64_t n, const float* x, float* value, float* slope) {
    with_activation(kind, [=](auto kind) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) value[i] = activated<kind>(x[i]);
        if (!slope) return;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) slope[i] = activation_slope<kind>(x[i]);
    });
}

constexpr int kCodes = 256;  // entries of a table: codes as unsigned bytes

// Looks up n codes.
#if defined(LSQ_WIDE)
void look_up(const float* table, const int8_t* codes, int64_t n, float* found) {
    __m512 part[kCodes / 16];  // in registers: gathering takes twice as long
    for (int i = 0; i < kCodes / 16; ++i) part[i] = _mm512_loadu_ps(table + 16 * i);
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        const __m512i index = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(there, codes + i));
        // The last five bits choose within 32 entries, one bit after the other between those.
        __m512 among[8];
        for (int j = 0; j < 8; ++j)
            among[j] = _mm512_permutex2var_ps(part[2 * j], index, part[2 * j + 1]);
        for (int left = 4, bit = 32; left > 0; left /= 2, bit *= 2) {
            const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(bit));
            for (int j = 0; j < left; ++j)
                among[j] = _mm512_mask_mov_ps(among[2 * j], upper, among[2 * j + 1]);
        }
        _mm512_mask_storeu_ps(found + i, there, among[0]);
    });
}
#else
void look_up(const float* table, const int8_t* codes, int64_t n, float* found) {
    for (int64_t i = 0; i < n; ++i) found[i] = table[static_cast<uint8_t>(codes[i])];
}
#endif

// Activations of a gate. Codes have few values: a table of the same bits is faster than arithmetic.
class Gate {
public:
    Gate(const Rows& rows, Activation kind) : rows_(rows), kind_(kind) {
        if (!rows.coded.codes) return;
        const float scale = rows.coded.scale[0];
        float x[kCodes];
        for (int byte = 0; byte < kCodes; ++byte)
            x[byte] = static_cast<float>(static_cast<int8_t>(byte)) * scale;
        activate(kind, kCodes, x, values_, slopes_);
    }

    // Activations of row `row` of n values and, unless null, their slopes.
    void read(int64_t row, int64_t n, float* value, float* slope) const {
        if (!rows_.coded.codes) return activate(kind_, n, rows_.floats + row * n, value, slope);
        const int8_t* codes = rows_.coded.codes + row * n;
        look_up(values_, codes, n, value);
        if (slope) look_up(slopes_, codes, n, slope);
    }

private:
    const Rows& rows_;
    Activation kind_;
    float values_[kCodes], slopes_[kCodes];
};

// Gradient of the gate or of the up projection, with sums of blocks of rows.
class Side {
public:
    Side(const Rows& of, const SummedGradient& end, const Blocks& blocks, int64_t n)
        : of_(of.coded), end_(end), n_(n), clips_(blocks.count, 0.0),
          sink_(blocks, n, end.floats, end.rounded, end.sum) {}

    // Row `row` of the gradient is a * b [n] before the mask; changes a.
    void add(int64_t block, int64_t row, float* a, const float* b) {
#if defined(LSQ_WIDE)
        if (n_ % 8 == 0 && !of_.error) {
            clips_[block] += sink_.add_straight_through(
                block, row, of_,
                [=](int64_t i, __mmask16 there) {
                    return _mm512_mul_ps(_mm512_maskz_loadu_ps(there, a + i),
                                         _mm512_maskz_loadu_ps(there, b + i));
                },
                a);
            return;
        }
#endif
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) a[i] *= b[i];
        clips_[block] += straight_through(of_, row * n_, n_, a);
        sink_.add(block, row, a, a);
    }

    void finish() const {
        sink_.finish();
        write_sum(clips_, of_.clip_factor, end_.clip);
    }

private:
    const Coded& of_;
    const SummedGradient& end_;
    int64_t n_;
    std::vector<double> clips_;
    GradientSink sink_;
};

}  // namespace

LSQ_OPERATION(Gated, op) {
    const int64_t n = op.columns;
    const Gate gate(op.gate, op.activation);
    const Magnitude largest = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) -> Magnitude {
        float* y = op.out ? op.out + row * n : scratch.a.data();
        const float* up = values_of(op.up, row, n, scratch.b.data());
        gate.read(row, n, y, nullptr);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) y[i] *= up[i];
        apply(op.dropout, row * n, n, y, scratch.words.data());
        return op.rounded.codes ? round_row(op.rounded, row * n, n, y, scratch.flags.data()) : 0;
    });
    finish(op.rounded, largest);
}

LSQ_OPERATION(GatedGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    const Gate gate(op.gate, op.activation);
    const Border<const float> gradient(op.gradient, op.gradient_dtype);
    Side of_gate(op.gate, op.dgate, blocks, n), of_up(op.up, op.dup, blocks, n);
#pragma omp parallel
    {
        Scratch scratch(n), given(n);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                float *slope = scratch.a.data(), *value = scratch.b.data(),
                      *through = given.b.data();
                const float* up = values_of(op.up, row, n, through);
                const float* g = read(gradient, row * n, n, given.a.data());
                if (op.dropout.threshold) {
                    if (g != given.a.data()) std::memcpy(given.a.data(), g, n * sizeof(float));
                    g = given.a.data();
                    apply(op.dropout, row * n, n, given.a.data(), scratch.words.data());
                }
                gate.read(row, n, value, slope);
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) through[i] = g[i] * up[i];
                of_gate.add(block, row, slope, through);
                of_up.add(block, row, value, g);
            }
        }
    }
    of_gate.finish();
    of_up.finish();
}
