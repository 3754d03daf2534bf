// Rounds to the values of a number format; lsq/ops/fake_quantize.py has the formulas.
#include "fake_quantize.h"
#include "loops.h"
#include "nonlinearity.h"

using namespace lsq;

namespace {

constexpr int64_t kFlat = 2048;  // values whose clipped bits are found at a time

// Stored scales of all blocks [down, across].
class Scales {
public:
    explicit Scales(const FakeQuantize& op)
        : op_(op), block_(std::max<int64_t>(1, op.block_rows)),
          width_(std::max<int64_t>(1, op.block_columns)), down_((op.rows + block_ - 1) / block_),
          across_((op.columns + width_ - 1) / width_), scales_(down_ * across_) {
#pragma omp parallel for schedule(static)
        for (int64_t strip = 0; strip < down_; ++strip) {
            op.given ? take_clip(strip) : measure(strip);
            float* line = scales_.data() + strip * across_;
            for (int64_t i = 0; i < across_; ++i) line[i] /= op.largest;
            if (op.stored != kMultiplied) {
                for (int64_t i = 0; i < across_; ++i) line[i] = stored_scale(line[i], op.stored);
            } else if (op.each_row) {
                multiply(line, across_, largest_of(line, across_));
            }
        }
        if (op.stored != kMultiplied || op.each_row) return;
        const int64_t n = down_ * across_;
        multiply(scales_.data(), n,
                 op.clips == 1 ? op.clip[0] / op.largest : largest_of(scales_.data(), n));
    }

    // Calls use(first column, columns, scale) for each block of a row.
    template <class Use>
    void of_row(int64_t row, const Use& use) const {
        const float* line = scales_.data() + row / block_ * across_;
        for (int64_t i = 0; i < across_; ++i)
            use(i * width_, std::min(width_, op_.columns - i * width_), line[i]);
    }

private:
    void take_clip(int64_t strip) {
        std::fill_n(scales_.data() + strip * across_, across_, op_.clip[op_.clips > 1 ? strip : 0]);
    }

    // Largest magnitudes within the clip; NaN for what is not finite.
    void measure(int64_t strip) {
        float* line = scales_.data() + strip * across_;
        const int64_t begin = strip * block_, end = std::min(begin + block_, op_.rows);
        bool missing = false;
        for (int64_t row = begin; row < end; ++row) {
            const Clip clip = clip_of(op_, row);
            missing |= clip.most != clip.most;
            const float* x = op_.x + row * op_.columns;
            for (int64_t i = 0; i < across_; ++i) {
                const int64_t first = i * width_, past = std::min(first + width_, op_.columns);
                // Magnitudes order like their bits, and NaN is larger than infinity.
                uint32_t largest = bits_of(line[i]);
#pragma omp simd reduction(max : largest)
                for (int64_t j = first; j < past; ++j) {
                    const uint32_t bits = bits_of(clip(x[j])) & 0x7FFFFFFFu;
                    largest = bits > largest ? bits : largest;
                }
                line[i] = float_of(largest);
            }
        }
        for (int64_t i = 0; i < across_; ++i)
            line[i] = poisoned(line[i], missing || !(line[i] < infinity()));
    }

    // NaN unless all are finite.
    static float largest_of(const float* scales, int64_t n) {
        uint32_t largest = 0;
        for (int64_t i = 0; i < n; ++i)
            largest = std::max(largest, bits_of(scales[i]) & 0x7FFFFFFFu);
        return poisoned(float_of(largest), !(float_of(largest) < infinity()));
    }

    // Rounds scales to multiples of most / largest_multiplier.
    void multiply(float* scales, int64_t n, float most) const {
        const Levels levels(op_.multipliers);
        const float unit = most / op_.largest_multiplier;
        for (int64_t i = 0; i < n; ++i) {
            const float multiple = levels.nearest(unit == 0.0f ? 0.0f : scales[i] / unit) * unit;
            scales[i] = poisoned(multiple, scales[i] != scales[i]);
        }
    }

    const FakeQuantize& op_;
    int64_t block_, width_, down_, across_;
    Aligned<float> scales_;
};

bool any_missing(const float* x, int64_t n) {
    int missing = 0;
#pragma omp simd reduction(| : missing)
    for (int64_t i = 0; i < n; ++i) missing |= x[i] != x[i];
    return missing;
}

}  // namespace

LSQ_OPERATION(FakeQuantize, op) {
    const int64_t n = op.columns, count = op.rows * n;
    const Scales scales(op);
    const Levels levels(op.levels);
    for_rows(op.rows, n, [&](int64_t row, Scratch&) -> int {
        const Clip clip = clip_of(op, row);
        const float* x = op.x + row * n;
        float* out = op.out + row * n;
        float* scale_of_codes = op.coded.scale + row * op.coded.scale_columns;
        scales.of_row(row, [&](int64_t first, int64_t columns, float scale) {
            int8_t* codes = op.coded.codes + row * n + first;
            if (!op.coded.codes)
                return decoded<Coding::none>(levels, clip, scale, columns, x + first, out + first,
                                             nullptr, 0.0f);
            if (op.whole == 0.0f) {
                decoded<Coding::ranks>(levels, clip, scale, columns, x + first, out + first, codes,
                                       0.0f);
            } else {
                decoded<Coding::whole>(levels, clip, scale, columns, x + first, out + first, codes,
                                       op.whole);
                scale /= op.whole;
            }
            *scale_of_codes++ = poisoned(scale, op.given && any_missing(x + first, columns));
        });
        return 0;
    });
    if (!op.clipped) return;
    const float clip = op.clip[0];
    const int64_t chunks = (count + kFlat - 1) / kFlat;
#pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t first = chunk * kFlat, columns = std::min(kFlat, count - first);
        const float* x = op.x + first;
        uint8_t outside[kFlat];
#pragma omp simd
        for (int64_t i = 0; i < columns; ++i) outside[i] = std::fabs(x[i]) > clip;
        pack_bits(outside, columns, op.clipped + first / 8);
    }
}

LSQ_OPERATION(FakeQuantizeGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    std::vector<double> clips(blocks.count, 0.0);
    ColumnSums sums(blocks.count, n, op.sum);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        const int64_t first = row * n;
        float* g = op.dx ? op.dx + first : scratch.a.data();
        const float* out = op.out + first;
        std::memcpy(g, op.gradient + first, n * sizeof(float));
        float clip = 0.0f;
        each_bit(op.clipped, first, n, [&](int64_t i) {
            clip += out[i] > 0.0f ? g[i] : -g[i];
            g[i] = 0.0f;
        });
        clips[block] += clip;
        undo(op.nonlinearity, row, n, g, scratch.words.data());
        if (op.added) add_to(op.added + first, n, g);
        sums.add(block, g);
    });
    sums.write(op.sum);
    write_sum(clips, 1.0f, op.dclip);
}

LSQ_OPERATION(RoundAtRandom, op) {
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) -> int {
        const float* x = op.x + row * n;
        float* out = op.out + row * n;
        const GradientScale s = gradient_scale(largest_magnitude(x, n), op.largest);
        int8_t* codes = reinterpret_cast<int8_t*>(scratch.flags.data());
        if (s.reciprocal == 0.0f) {  // vanishing, or not finite
            std::memset(codes, 0, n);
        } else {
            round_at_random(x, n, s.reciprocal, philox_word(op.key[0], op.subsequence, row),
                            op.largest, codes);
        }
        decode(codes, n, s.scale, out);
        return 0;
    });
}
