// Adam on a matrix whose weight or moments have 8 bits; lsq/ops/compact_adam.py is the reference,
// lsq/quant/compact.py defines the codes.
#include <cstring>

#include "aligned.h"
#include "floats.h"
#include "philox.h"
#include "structs.h"

using namespace lsq;

namespace {

constexpr int64_t kBlock = 256;  // columns whose moments share a scale
constexpr int kLargest = 127, kParts = 2 * kLargest, kZero = 128;
constexpr uint32_t kWeight = 0, kFirst = 1, kSecond = 2;  // subsequences of random numbers
constexpr float kUnit = 5.9604644775390625e-8f;           // 2^-24

float uniform(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word >> 8)) * kUnit; }

// floor(x) for |x| < 2^31, which every instruction set vectorises.
int32_t floor_of(float x) {
    const int32_t cut = static_cast<int32_t>(x);
    return cut - (static_cast<float>(cut) > x ? 1 : 0);
}

bool usable(float scale) { return scale > 0.0f && scale < infinity(); }

// A block of a row: moments before and after the step.
struct Block {
    float first[kBlock], root[kBlock], second[kBlock];
};

struct Step {
    float size, first, second, epsilon, decay, factor;  // first, second: 1 - beta1, 1 - beta2

    explicit Step(const CompactAdam& op)
        : size(op.numbers[0]), first(op.numbers[1]), second(op.numbers[2]), epsilon(op.numbers[3]),
          decay(op.numbers[4]), factor(op.gradient_factor[0]) {}

    void apply(const float* gradient, int64_t n, Block& block, float* weight) const {
        const Step step = *this;
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            const float g = gradient[i] * step.factor;
            const float mean = block.first[i] * (1.0f - step.first) + g * step.first;
            const float square = block.second[i] * (1.0f - step.second) + g * step.second * g;
            const float root = std::sqrt(square), decayed = weight[i] - weight[i] * step.decay;
            weight[i] = decayed - mean / (root + step.epsilon) * step.size;
            block.first[i] = mean;
            block.second[i] = square;
            block.root[i] = root;
        }
    }
};

void read_first(const Moment& from, int64_t at, float scale, int64_t n, float* x) {
    if (from.floats) {
        std::memcpy(x, from.floats + at, n * sizeof(float));
        return;
    }
    const uint8_t* codes = from.codes + at;
    const float unit = scale * (1.0f / (kLargest * kLargest));
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float code = static_cast<float>(codes[i] - kZero);
        x[i] = code * std::fabs(code) * unit;
    }
}

void read_second(const Moment& from, int64_t at, float scale, int64_t n, float* x) {
    if (from.floats) {
        std::memcpy(x, from.floats + at, n * sizeof(float));
        return;
    }
    const uint8_t* codes = from.codes + at;
    const float unit = scale * (1.0f / (255 * 255));
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float code = static_cast<float>(codes[i]), root = code * code * unit;
        x[i] = root * root;
    }
}

// -> the scale
float write_first(const float* x, int64_t n, uint32_t word, uint8_t* codes) {
    const float scale = largest_magnitude(x, n);
    const float factor = usable(scale) ? kLargest * kLargest / scale : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float square = factor > 0.0f ? std::fabs(x[i]) * factor : 0.0f;
        const int32_t below = static_cast<int32_t>(std::sqrt(square));
        const float lower = static_cast<float>(below * below);
        const float share = (square - lower) / static_cast<float>(2 * below + 1);
        const int32_t above = below + floor_of(share + uniform(word + static_cast<uint32_t>(i) * kWordStep));
        const int32_t code = above < kLargest ? above : kLargest;
        codes[i] = static_cast<uint8_t>(kZero + (x[i] < 0.0f ? -code : code));
    }
    return scale;
}

float write_second(const float* root, int64_t n, uint32_t word, uint8_t* codes) {
    const float scale = largest_magnitude(root, n);
    const float factor = usable(scale) ? 255 * 255 / scale : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const float square = factor > 0.0f ? root[i] * factor : 0.0f;
        const int32_t below = static_cast<int32_t>(std::sqrt(square));
        const float lower = static_cast<float>(below * below);
        const float upper = static_cast<float>((below + 1) * (below + 1));
        const float share =
            (square * square - lower * lower) / (upper * upper - lower * lower);
        const int32_t above = below + floor_of(share + uniform(word + static_cast<uint32_t>(i) * kWordStep));
        const int32_t code = above < 255 ? above : 255;
        const int32_t least = root[i] > 0.0f ? 1 : 0;
        codes[i] = static_cast<uint8_t>(code > least ? code : least);
    }
    return scale;
}

void join_row(const MasterWeight& from, int64_t row, int64_t n, float* x) {
    const int8_t* codes = from.codes + row * n;
    const float scale = from.scale[row];
    if (!from.remainder) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(codes[i]) * scale;
        return;
    }
    const int8_t* remainder = from.remainder + row * n;
    const float unit = scale * (1.0f / kParts);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i)
        x[i] = static_cast<float>(codes[i]) * scale + static_cast<float>(remainder[i]) * unit;
}

// `word`: random bits, unused to round to the nearest.
template <bool RANDOM>
void split_row(const float* x, int64_t row, int64_t n, uint32_t word, const MasterWeight& to) {
    int8_t *codes = to.codes + row * n, *remainder = to.remainder ? to.remainder + row * n : nullptr;
    const float clip = clip_of(bits_of(largest_magnitude(x, n)), to.scale[row] * kLargest);
    if (!(clip < infinity())) {
        std::memset(codes, 0, n);
        if (remainder) std::memset(remainder, 0, n);
        to.scale[row] = not_a_number();
        return;
    }
    const uint32_t dither = RANDOM ? word & 0x7Fu : 0x40u;
    const float scale = float_of((bits_of(clip / kLargest) + dither) & ~0x7Fu);
    const int32_t parts = remainder ? kParts : 1, most = kLargest * parts;
    const float factor = parts / scale;
    to.scale[row] = scale;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t at = word + static_cast<uint32_t>(i) * kWordStep;
        int32_t whole = floor_of(x[i] * factor + (RANDOM ? uniform(at) : 0.5f));
        const bool largest = std::fabs(x[i]) == clip;
        whole = whole < -most || (largest && x[i] < 0.0f) ? -most : whole;
        whole = whole > most || (largest && x[i] > 0.0f) ? most : whole;
        const int32_t code =
            remainder ? static_cast<int32_t>(nearbyintf(whole * (1.0f / kParts))) : whole;
        codes[i] = static_cast<int8_t>(code);
        if (remainder) remainder[i] = static_cast<int8_t>(whole - code * kParts);
    }
}

void step_row(const CompactAdam& op, const Step& step, int64_t row, float* scratch) {
    const int64_t n = op.columns;
    const auto word = [&](uint32_t subsequence) {
        return philox_word(static_cast<uint64_t>(op.key[0]), subsequence,
                           static_cast<uint64_t>(row));
    };
    float* weight = op.weight.floats ? op.weight.floats + row * n : scratch;
    if (op.weight.codes) join_row(op.weight, row, n, weight);
    const uint32_t of_first = word(kFirst), of_second = word(kSecond);
    Block block;
    for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t count = std::min(kBlock, n - begin), at = row * n + begin;
        const int64_t number = row * op.blocks + begin / kBlock;
        const uint32_t turned = static_cast<uint32_t>(begin) * kWordStep;
        read_first(op.first, at, op.first.codes ? op.first.scale[number] : 0.0f, count, block.first);
        read_second(op.second, at, op.second.codes ? op.second.scale[number] : 0.0f, count,
                    block.second);
        step.apply(op.gradient + at, count, block, weight + begin);
        if (op.first.floats) {
            std::memcpy(op.first.floats + at, block.first, count * sizeof(float));
        } else {
            op.first.scale[number] =
                write_first(block.first, count, of_first + turned, op.first.codes + at);
        }
        if (op.second.floats) {
            std::memcpy(op.second.floats + at, block.second, count * sizeof(float));
        } else {
            op.second.scale[number] =
                write_second(block.root, count, of_second + turned, op.second.codes + at);
        }
    }
    if (op.weight.codes) split_row<true>(weight, row, n, word(kWeight), op.weight);
}

}  // namespace

LSQ_OPERATION(CompactAdam, op) {
    constexpr int64_t kFewValues = 16384;
    const Step step(op);
#pragma omp parallel if (op.rows * op.columns > kFewValues)
    {
        Aligned<float> scratch(op.columns);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.rows; ++row) step_row(op, step, row, scratch.data());
    }
}

LSQ_OPERATION(SplitWeight, op) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < op.rows; ++row)
        split_row<false>(op.values + row * op.columns, row, op.columns, 0, op.weight);
}
