// Building blocks of the fused loops: everything is done a row at a time, on buffers that stay in the L1 cache.
//
// M rows, N columns. Codes are int8, packed masks hold element i in bit i % 8 of byte i / 8, all floats are float32.
// The arithmetic (order of operations, division, rounding half to even) is that of lsq/ops/rounding.py, so codes agree.
// Compiled without floating-point contraction. Loops are written for the auto-vectoriser.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "philox.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace lsq {

constexpr int kMaxBlocks = 64;  // partial sums per column: a fixed partition, so results do not depend on threads
constexpr int kGradientCode = 127;
constexpr float kSmallestGradient = 1e-35f;

enum Kind { kInt8 = 0, kInt32 = 1, kFloat = 2 };

// A product as the next operation reads it: int8 with scale [1], int32 with scale [N], or float32.
struct Product {
    const void* values;
    int64_t kind;
    const float* scale;

    void read(int64_t row, int64_t n, float* out) const {
        if (kind == kInt8) {
            const int8_t* codes = static_cast<const int8_t*>(values) + row * n;
            const float s = scale[0];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(codes[i]) * s;
        } else if (kind == kInt32) {
            const int32_t* sums = static_cast<const int32_t*>(values) + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(sums[i]) * scale[i];
        } else {
            std::memcpy(out, static_cast<const float*>(values) + row * n, n * sizeof(float));
        }
    }
};

// Dropout with masks that are drawn again wherever they are needed.
struct Dropout {
    const int64_t* key;
    int64_t stream;
    int64_t threshold;  // 0: no dropout
    float keep;         // 1 / (1 - probability)

    // Elements [first, first + n) of the tensor stand in x; `words` is scratch for n + 4 numbers.
    void apply(int64_t first, int64_t n, float* x, uint32_t* words) const {
        if (threshold == 0) return;
        const int64_t offset = first % 4;
        philox(key[0], stream, first - offset, n + offset, words);
        const uint32_t limit = static_cast<uint32_t>(threshold);
        const uint32_t* drawn = words + offset;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = drawn[i] >= limit ? x[i] * keep : 0.0f;
    }
};

inline void pack_bits(const uint8_t* flags, int64_t n, uint8_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + i, 8);
        out[i / 8] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
    }
    if (i < n) {
        uint8_t last = 0;
        for (int64_t j = i; j < n; ++j) last |= static_cast<uint8_t>(flags[j] << (j - i));
        out[i / 8] = last;
    }
}

// Where rounded values go. Rows must start at a byte of `clipped`: N is a multiple of 8, or there is one row.
struct Rounding {
    int8_t* codes;
    uint8_t* clipped;  // may be null
    float* error;      // may be null: (code - x / scale) / Q, 0 where clipped

    // `scaled` is x / scale, `outside` marks |x| > clip.
    // Returns whether a value was NaN; its code is 0. rintf ties to even.
    bool write(int64_t first, int64_t n, const float* scaled, const uint8_t* outside, float q) const {
        int8_t* out = codes + first;
        int missing = 0;
#pragma omp simd reduction(| : missing)
        for (int64_t i = 0; i < n; ++i) {
            const float x = scaled[i];
            missing |= x != x;
            const float low = x < -q ? -q : x;
            const float bounded = low > q ? q : low;
            const float safe = x == x ? bounded : 0.0f;
            out[i] = static_cast<int8_t>(static_cast<int32_t>(std::nearbyint(safe)));
        }
        if (clipped) pack_bits(outside, n, clipped + first / 8);
        if (error) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                error[first + i] = outside[i] ? 0.0f : (static_cast<float>(out[i]) - scaled[i]) / q;
            }
        }
        return missing != 0;
    }

    // Round float values under `clip`; scratch: n floats, n bytes.
    bool round(int64_t first, int64_t n, const float* x, float clip, float q, float* scaled, uint8_t* outside) const {
        const float scale = clip / q;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) scaled[i] = x[i] / scale;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) outside[i] = std::fabs(x[i]) > clip;
        return write(first, n, scaled, outside, q);
    }
};

// The scale that goes with rounded values: NaN when a value was NaN, so that NaN reaches whatever reads the codes.
inline float poisoned(float scale, bool missing) {
    return missing ? std::numeric_limits<float>::quiet_NaN() : scale;
}

// Straight-through: zero the gradients of clipped values and return their contribution to the clip's gradient.
struct StraightThrough {
    const int8_t* codes;
    const uint8_t* clipped;  // null: nothing was rounded
    const float* error;      // null: PACT

    float apply(int64_t first, int64_t n, float* gradient) const {
        if (!clipped) return 0.0f;
        const int8_t* q = codes + first;
        float sum = 0.0f;
        if (error) {
            for (int64_t i = 0; i < n; ++i) sum += gradient[i] * error[first + i];
        }
        for (int64_t i = 0; i < n; i += 8) {
            const uint8_t byte = clipped[(first + i) / 8];
            if (!byte) continue;
            for (int64_t j = i; j < std::min(i + 8, n); ++j) {
                if (byte >> (j - i) & 1) {
                    sum += q[j] > 0 ? gradient[j] : -gradient[j];
                    gradient[j] = 0.0f;
                }
            }
        }
        return sum;
    }
};

// Largest |x|, where NaN counts as larger than infinity: magnitudes order like their bits.
inline float largest_magnitude(const float* x, int64_t n) {
    uint32_t largest = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, 4);
        bits &= 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    float result;
    std::memcpy(&result, &largest, 4);
    return result;
}

struct GradientScale {
    float scale, reciprocal;
};

inline GradientScale gradient_scale(float largest) {
    if (!(largest < std::numeric_limits<float>::infinity())) return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    if (largest < kSmallestGradient) return {0.0f, 0.0f};
    return {largest / kGradientCode, kGradientCode / largest};
}

inline int8_t round_at_random(float scaled, uint32_t word) {
    const float uniform = static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;  // 2^-24
    float rounded = std::floor(scaled + uniform);
    rounded = rounded < -kGradientCode ? -kGradientCode : rounded;
    rounded = rounded > kGradientCode ? kGradientCode : rounded;
    return static_cast<int8_t>(static_cast<int32_t>(rounded == rounded ? rounded : 0.0f));
}

// Where the gradient of a product goes: as it is, or rounded per row at random after multiplying by the weight's scale.
struct GradientSink {
    void* out;                  // float [M, N], or int8 codes [M, N]
    float* row_scale;           // null: float
    const float* weight_scale;  // [N]
    const int64_t* key;
    int64_t stream;

    // Scratch: n + 4 words. Changes `gradient`.
    void write(int64_t row, int64_t n, float* gradient, uint32_t* words) const {
        if (!row_scale) {
            std::memcpy(static_cast<float*>(out) + row * n, gradient, n * sizeof(float));
            return;
        }
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) gradient[i] *= weight_scale[i];
        const GradientScale s = gradient_scale(largest_magnitude(gradient, n));
        row_scale[row] = s.scale;
        const int64_t offset = row * n % 4;
        philox(key[0], stream, row * n - offset, n + offset, words);
        int8_t* codes = static_cast<int8_t*>(out) + row * n;
        const uint32_t* drawn = words + offset;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) codes[i] = round_at_random(gradient[i] * s.reciprocal, drawn[i]);
    }
};

// Splits M rows into at most kMaxBlocks blocks that do not depend on the number of threads.
struct Blocks {
    int64_t rows, count, size;

    explicit Blocks(int64_t m) : rows(m), count(std::min<int64_t>(kMaxBlocks, m)), size(m ? (m + count - 1) / count : 0) {}
    int64_t begin(int64_t block) const { return std::min(block * size, rows); }
    int64_t end(int64_t block) const { return std::min((block + 1) * size, rows); }
};

// Sums per column, one partial row a block, added up in order at the end.
class ColumnSums {
public:
    ColumnSums(int64_t blocks, int64_t n, bool wanted)
        : blocks_(blocks), n_(n), partial_(wanted ? blocks * n : 0, 0.0f) {}

    void add(int64_t block, const float* x) {
        if (partial_.empty()) return;
        float* sum = partial_.data() + block * n_;
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) sum[i] += x[i];
    }

    void add_product(int64_t block, const float* x, const float* y) {
        if (partial_.empty()) return;
        float* sum = partial_.data() + block * n_;
#pragma omp simd
        for (int64_t i = 0; i < n_; ++i) sum[i] += x[i] * y[i];
    }

    void write(float* out) const {
        if (!out || partial_.empty()) return;
        std::fill(out, out + n_, 0.0f);
        for (int64_t b = 0; b < blocks_; ++b) {
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) out[i] += partial_[b * n_ + i];
        }
    }

private:
    int64_t blocks_, n_;
    std::vector<float> partial_;
};

// One number a block, added up in order in double precision.
inline void write_sum(const std::vector<double>& partial, float factor, float* out) {
    if (!out) return;
    double sum = 0.0;
    for (double value : partial) sum += value;
    out[0] = static_cast<float>(sum * factor);
}

inline bool any(const std::vector<uint8_t>& flags) {
    return std::any_of(flags.begin(), flags.end(), [](uint8_t flag) { return flag != 0; });
}

// Scratch of one thread for rows of n columns.
struct Scratch {
    std::vector<float> a, b, c;
    std::vector<uint32_t> words;
    std::vector<uint8_t> flags;

    explicit Scratch(int64_t n) : a(n), b(n), c(n), words(n + 8), flags(n + 8) {}
};

// Calls body(row, scratch) -> int for all rows, in parallel; the results of all rows, or-ed.
template <class Body>
int for_rows(int64_t rows, int64_t n, const Body& body) {
    int found = 0;
#pragma omp parallel reduction(| : found)
    {
        Scratch scratch(n);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; ++row) found |= body(row, scratch);
    }
    return found;
}

// Calls body(block, row, scratch) for all rows, blocks in parallel, the rows of a block in order.
template <class Body>
void for_blocks(const Blocks& blocks, int64_t n, const Body& body) {
#pragma omp parallel
    {
        Scratch scratch(n);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) body(block, row, scratch);
        }
    }
}

// Where the rows of a result go: as codes under clip [1], or, if `largest` is 0, as they are.
struct RowSink {
    void* out;  // int8 codes [M, N], or float [M, N]
    const float* clip;
    int64_t largest;
    float* scale;  // [1]
    uint8_t* clipped;
    float* error;

    // Whether a value was NaN; x is scratch.a, or any row other than scratch.b.
    int write(int64_t row, int64_t n, const float* x, Scratch& scratch) const {
        if (!largest) {
            std::memcpy(static_cast<float*>(out) + row * n, x, n * sizeof(float));
            return 0;
        }
        const Rounding rounding{static_cast<int8_t*>(out), clipped, error};
        const float q = static_cast<float>(largest);
        return rounding.round(row * n, n, x, clip[0], q, scratch.b.data(), scratch.flags.data());
    }

    void finish(int missing) const {
        if (largest) scale[0] = poisoned(clip[0] / static_cast<float>(largest), missing);
    }
};

// The end of every backward loop that has read a product: sums for the bias and the clip, then the product's gradient.
class ProductGradient {
public:
    ProductGradient(const Blocks& blocks, int64_t n, const StraightThrough& straight, const GradientSink& sink, bool bias)
        : n_(n), straight_(straight), sink_(sink), bias_sums_(blocks.count, n, bias), clip_sums_(blocks.count, 0.0) {}

    // g [n] is the gradient of the values read. Changes it.
    void add(int64_t block, int64_t row, float* g, Scratch& scratch) {
        bias_sums_.add(block, g);
        clip_sums_[block] += straight_.apply(row * n_, n_, g);
        sink_.write(row, n_, g, scratch.words.data());
    }

    void finish(float factor, float* dclip, float* dbias) const {
        bias_sums_.write(dbias);
        write_sum(clip_sums_, factor, dclip);
    }

private:
    int64_t n_;
    StraightThrough straight_;
    GradientSink sink_;
    ColumnSums bias_sums_;
    std::vector<double> clip_sums_;
};

}  // namespace lsq
