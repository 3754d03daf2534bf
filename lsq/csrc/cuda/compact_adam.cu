// Adam on a matrix whose weight or moments have 8 bits, a block for each row.
//
// lsq/ops/compact_adam.py is the reference, lsq/quant/compact.py defines the codes.
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int kBlock = 256, kTurns = kBlock / kWarp;  // columns whose moments share a scale
constexpr int kLargest = 127, kParts = 2 * kLargest, kZero = 128;
constexpr uint32_t kWeight = 0, kFirst = 1, kSecond = 2;  // subsequences of random numbers

LSQ_INLINE float uniform(uint32_t word) {
    return static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;  // 2^-24
}

LSQ_INLINE uint32_t word_at(uint32_t word, int64_t column) {
    return word + static_cast<uint32_t>(column) * kWordStep;
}

// A share in [0, 1], rounded at random.
LSQ_INLINE int32_t rounded(float share, uint32_t word) {
    return static_cast<int32_t>(floorf(share + uniform(word)));
}

LSQ_INLINE bool usable(float scale) { return scale > 0.0f && scale < infinity(); }

struct Row {
    const CompactAdam& op;
    float* weight;  // [K], floats of this row
    int64_t row;
    uint32_t of_first, of_second;
    float size, first, second, epsilon, decay, factor;  // first, second: 1 - beta1, 1 - beta2

    LSQ_INLINE Row(const CompactAdam& operation, float* floats, int64_t number)
        : op(operation), weight(floats), row(number) {
        const int64_t* key = op.key;
        of_first = philox_word(key[0], kFirst, row), of_second = philox_word(key[0], kSecond, row);
        const float *numbers = op.numbers, *gradient_factor = op.gradient_factor;
        size = numbers[0], first = numbers[1], second = numbers[2], epsilon = numbers[3],
        decay = numbers[4], factor = gradient_factor[0];
    }

    LSQ_INLINE float before(int64_t column) const {
        const int64_t at = row * op.columns + column;
        const float* floats = op.weight.floats;
        if (floats) return floats[at];
        const int8_t *codes = op.weight.codes, *remainder = op.weight.remainder;
        const float* scales = op.weight.scale;
        const float scale = scales[row], value = static_cast<float>(codes[at]) * scale;
        if (!remainder) return value;
        return value + static_cast<float>(remainder[at]) * (scale * (1.0f / kParts));
    }

    LSQ_INLINE float first_moment(int64_t at, float scale) const {
        const float* floats = op.first.floats;
        if (floats) return floats[at];
        const uint8_t* codes = op.first.codes;
        const float code = static_cast<float>(codes[at] - kZero);
        return code * fabsf(code) * (scale * (1.0f / (kLargest * kLargest)));
    }

    LSQ_INLINE float second_moment(int64_t at, float scale) const {
        const float* floats = op.second.floats;
        if (floats) return floats[at];
        const uint8_t* codes = op.second.codes;
        const float code = static_cast<float>(codes[at]);
        const float root = code * code * (scale * (1.0f / (255 * 255)));
        return root * root;
    }

    // Steps the columns of block `number`, by one warp. -> the largest magnitude of a weight
    LSQ_INLINE Magnitude step(int64_t number) const {
        const int lane = threadIdx.x % kWarp;
        const int64_t n = op.columns, scale_at = row * op.blocks + number;
        float *first_scales = op.first.scale, *second_scales = op.second.scale;
        const float first_scale = first_scales ? first_scales[scale_at] : 0.0f;
        const float second_scale = second_scales ? second_scales[scale_at] : 0.0f;
        const float* gradient = op.gradient;
        float mean[kTurns] = {}, root[kTurns] = {};
        Magnitude of_weight = 0, of_mean = 0, of_root = 0;
#pragma unroll
        for (int j = 0; j < kTurns; ++j) {
            const int64_t column = number * kBlock + j * kWarp + lane, at = row * n + column;
            if (column >= n) continue;
            const float g = gradient[at] * factor;
            mean[j] = first_moment(at, first_scale) * (1.0f - first) + g * first;
            const float square =
                second_moment(at, second_scale) * (1.0f - second) + g * second * g;
            root[j] = sqrtf(square);
            const float w = before(column), decayed = w - w * decay;
            const float after = decayed - mean[j] / (root[j] + epsilon) * size;
            weight[column] = after;
            float *means = op.first.floats, *squares = op.second.floats;
            if (means) means[at] = mean[j];
            if (squares) squares[at] = square;
            of_weight = Largest::join(of_weight, magnitude_of(after));
            of_mean = Largest::join(of_mean, magnitude_of(mean[j]));
            of_root = Largest::join(of_root, magnitude_of(root[j]));
        }
        if (first_scales) write_first(number, mean, float_of(warp_reduce<Largest>(of_mean)));
        if (second_scales) write_second(number, root, float_of(warp_reduce<Largest>(of_root)));
        return warp_reduce<Largest>(of_weight);
    }

    LSQ_INLINE void write_first(int64_t number, const float (&mean)[kTurns], float scale) const {
        const float factor = usable(scale) ? kLargest * kLargest / scale : 0.0f;
        uint8_t* codes = op.first.codes;
        float* scales = op.first.scale;
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int j = 0; j < kTurns; ++j) {
            const int64_t column = number * kBlock + j * kWarp + lane;
            if (column >= op.columns) continue;
            const float square = factor > 0.0f ? fabsf(mean[j]) * factor : 0.0f;
            const int32_t below = static_cast<int32_t>(sqrtf(square));
            const float lower = static_cast<float>(below * below);
            const float share = (square - lower) / static_cast<float>(2 * below + 1);
            const int32_t above = below + rounded(share, word_at(of_first, column));
            const int32_t code = above < kLargest ? above : kLargest;
            codes[row * op.columns + column] =
                static_cast<uint8_t>(kZero + (mean[j] < 0.0f ? -code : code));
        }
        if (lane == 0) scales[row * op.blocks + number] = scale;
    }

    LSQ_INLINE void write_second(int64_t number, const float (&root)[kTurns], float scale) const {
        const float factor = usable(scale) ? 255 * 255 / scale : 0.0f;
        uint8_t* codes = op.second.codes;
        float* scales = op.second.scale;
        const int lane = threadIdx.x % kWarp;
#pragma unroll
        for (int j = 0; j < kTurns; ++j) {
            const int64_t column = number * kBlock + j * kWarp + lane;
            if (column >= op.columns) continue;
            const float square = factor > 0.0f ? root[j] * factor : 0.0f;
            const int32_t below = static_cast<int32_t>(sqrtf(square));
            const float lower = static_cast<float>(below * below);
            const float upper = static_cast<float>((below + 1) * (below + 1));
            const float share =
                (square * square - lower * lower) / (upper * upper - lower * lower);
            const int32_t above = below + rounded(share, word_at(of_second, column));
            const int32_t code = above < 255 ? above : 255;
            const int32_t least = root[j] > 0.0f ? 1 : 0;
            codes[row * op.columns + column] = static_cast<uint8_t>(code > least ? code : least);
        }
        if (lane == 0) scales[row * op.blocks + number] = scale;
    }

    // Splits the weight, whose magnitudes reach `most`, by all threads of the block.
    LSQ_INLINE void split(Magnitude most) const {
        const int64_t* key = op.key;
        const uint32_t word = philox_word(key[0], kWeight, row);
        float* scales = op.weight.scale;
        int8_t *codes = op.weight.codes, *remainders = op.weight.remainder;
        const float clip = clip_of(most, scales[row] * kLargest);
        const bool finite = clip < infinity();
        const float scale =
            finite ? float_of((bits_of(clip / kLargest) + (word & 0x7Fu)) & ~0x7Fu)
                   : not_a_number();
        const int32_t parts = remainders ? kParts : 1, bound = kLargest * parts;
        const float unit = parts / scale;
        for (int64_t column = threadIdx.x; column < op.columns; column += kThreads) {
            const int64_t at = row * op.columns + column;
            const float x = finite ? weight[column] : 0.0f;
            int32_t whole =
                finite ? static_cast<int32_t>(floorf(x * unit + uniform(word_at(word, column))))
                       : 0;
            const bool largest = fabsf(x) == clip;
            whole = whole < -bound || (largest && x < 0.0f) ? -bound : whole;
            whole = whole > bound || (largest && x > 0.0f) ? bound : whole;
            const int32_t code =
                remainders ? static_cast<int32_t>(nearbyintf(whole * (1.0f / kParts))) : whole;
            codes[at] = static_cast<int8_t>(code);
            if (remainders) remainders[at] = static_cast<int8_t>(whole - code * kParts);
        }
        __syncthreads();  // all have read the old scale
        if (threadIdx.x == 0) scales[row] = scale;
    }
};

}  // namespace

// Floats [N, K] of the new weight, unless it has floats itself.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_compact_adam(const CompactAdam op, Out<float> floats) {
    wait_for_launches();
    const int64_t number = blockIdx.x;
    float *own = op.weight.floats, *scratch = floats;
    const Row row(op, (own ? own : scratch) + number * op.columns, number);
    Magnitude most = 0;
    for (int64_t block = threadIdx.x / kWarp; block < op.blocks; block += kWarps)
        most = Largest::join(most, row.step(block));
    if (own) return;
    row.split(group_reduce<Largest, kThreads, kThreads>(most));
}
LSQ_EXPORT(lsq_compact_adam)
