// Packs gradients into messages of the codec `lean`, sums and unpacks these: lsq/ops/lean_messages.py
// is the definition. Threads share the blocks of a message.
#include "floats.h"
#include "rows.h"

using namespace lsq;

namespace {

constexpr int64_t kBlock = 32;
constexpr int kHighest = 254, kNotFinite = 255, kNarrowest = 3, kWidest = 8;
constexpr float kLargest = 0x1p127f;
// Mantissas of 2^(j/8).
constexpr uint32_t kEighths[8] = {0,        0x0B95C2, 0x1837F0, 0x25FED7,
                                  0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7};

// The least number of the grid that is not below x, positive and finite.
int grid_number(float x) {
    const uint32_t bits = bits_of(x), mantissa = bits & 0x7FFFFF;
    int within = 0;
    for (uint32_t eighth : kEighths) within += eighth < mantissa;
    return static_cast<int>(bits >> 23) * 8 + within;
}

float on_grid(int g) { return float_of(static_cast<uint32_t>(g >> 3) << 23 | kEighths[g & 7]); }

int width_of(int scale, int level) {
    if (scale == 0 || scale == kNotFinite) return 0;
    const int sixteenths = scale + level;
    return sixteenths < 0 ? 0 : std::clamp(sixteenths / 16, kNarrowest, kWidest);
}

// What codes of each width stand for where m = 1.
struct Values {
    float of[kWidest + 1][256] = {};

    Values() {
        for (int width = kNarrowest; width <= kWidest; ++width) {
            const int half = 1 << (width - 1);
            for (int code = 0; code < half; ++code) {
                of[width][code] = static_cast<float>(std::pow(code / (half - 1.0), 4.0 / 3.0));
                of[width][code + half] = -of[width][code];
            }
        }
    }
};
const Values kValues;

struct Message {
    int64_t blocks, room;  // room: of planes
    uint8_t* data;

    Message(const LeanMessages& messages, int64_t number)
        : blocks(messages.length / kBlock), room(messages.planes),
          data(messages.data + number * bytes()) {}
    int64_t bytes() const { return (4 * room + 2 + blocks + 15) / 16 * 16; }
    uint32_t* planes() const { return reinterpret_cast<uint32_t*>(data); }
    uint8_t* scales() const { return data + 4 * room + 2; }
    int top() const {
        uint16_t top;
        std::memcpy(&top, data + 4 * room, sizeof top);
        return top;
    }
    void set_top(int g) const {
        const uint16_t top = static_cast<uint16_t>(g);
        std::memcpy(data + 4 * room, &top, sizeof top);
    }
    // 0 for blocks that vanish: below the grid lies no number.
    float m(int64_t block) const {
        return on_grid(std::max(top() + scales()[block] - kHighest, 0));
    }

    // Where the planes of each block begin, and where the last ones end.
    std::vector<uint32_t> starts() const {
        const uint8_t* scale = scales();
        int64_t counts[256] = {};
        for (int64_t block = 0; block < blocks; ++block) ++counts[scale[block]];
        const auto needed = [&](int level) {
            int64_t planes = 0;
            for (int k = 1; k < kNotFinite; ++k) planes += counts[k] * width_of(k, level);
            return planes;
        };
        int level = -kNotFinite, above = 16 * kWidest;  // the first fits, the second is not needed
        while (above - level > 1) {
            const int middle = (level + above) >> 1;
            (needed(middle) <= room ? level : above) = middle;
        }
        uint8_t low[256], high[256];
        for (int k = 0; k < 256; ++k) low[k] = width_of(k, level), high[k] = width_of(k, level + 1);
        int64_t spare = room - needed(level);
        std::vector<uint32_t> starts(blocks + 1);
        uint32_t at = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            starts[block] = at;
            const int k = scale[block];
            spare -= high[k] - low[k];
            at += spare >= 0 ? high[k] : low[k];
        }
        starts[blocks] = at;
        return starts;
    }
};

// Bit p of 32 codes -> the plane.
uint32_t plane_of(const uint8_t* codes, int p) {
#if defined(__AVX2__)
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    return _mm256_movemask_epi8(_mm256_sll_epi16(bytes, _mm_cvtsi32_si128(7 - p)));
#else
    uint32_t plane = 0;
    for (int first = 0; first < kBlock; first += 8) {
        uint64_t eight;
        std::memcpy(&eight, codes + first, sizeof eight);
        const uint64_t bits = (eight >> p & 0x0101010101010101) * 0x0102040810204080;
        plane |= static_cast<uint32_t>(bits >> 56) << first;
    }
    return plane;
#endif
}

// The planes of a block -> its codes.
void codes_of(const uint32_t* planes, int width, uint8_t* codes) {
#if defined(__AVX2__)
    const __m256i byte = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202,
                                           0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x(0x8040201008040201);
    __m256i sum = _mm256_setzero_si256();
    for (int p = 0; p < width; ++p) {
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(planes[p]), byte);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
        sum = _mm256_or_si256(sum, _mm256_and_si256(set, _mm256_set1_epi8(1 << p)));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), sum);
#else
    for (int first = 0; first < kBlock; first += 8) {
        uint64_t eight = 0;
        for (int p = 0; p < width; ++p) {
            const uint64_t bytes = (planes[p] >> first & 0xFF) * 0x0101010101010101;
            const uint64_t set = (bytes & 0x8040201008040201) + 0x7F7F7F7F7F7F7F7F;
            eight |= (set >> 7 & 0x0101010101010101) << p;
        }
        std::memcpy(codes + first, &eight, sizeof eight);
    }
#endif
}

// Writes the message of the values of each block, [32], that read(block, scratch [32]) returns.
template <class Read>
void encode(const Message& message, const Read& read) {
    std::vector<int> numbers(message.blocks);  // on the grid; -1: vanishes, 1 << 16: not finite
    constexpr int kNone = -1, kTooLarge = 1 << 16;
    int top = 0;
#pragma omp parallel for schedule(static) reduction(max : top)
    for (int64_t block = 0; block < message.blocks; ++block) {
        float scratch[kBlock];
        const float* x = read(block, scratch);
        const float largest = largest_magnitude(x, kBlock);
        int& number = numbers[block];
        if (!(largest <= kLargest)) number = kTooLarge;
        else if (largest < kSmallestGradient) number = kNone;
        else top = std::max(top, number = grid_number(largest));
    }
    message.set_top(top);
    uint8_t* scales = message.scales();
    for (int64_t block = 0; block < message.blocks; ++block) {
        const int number = numbers[block];
        scales[block] = number == kTooLarge ? kNotFinite
                        : number == kNone   ? 0
                                            : std::max(kHighest - top + number, 0);
    }
    uint8_t* end = message.data + message.bytes();
    std::fill(scales + message.blocks, end, 0);
    const std::vector<uint32_t> starts = message.starts();
    uint32_t* planes = message.planes();
    std::fill(planes + starts.back(), planes + message.room, 0);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < message.blocks; ++block) {
        const int width = starts[block + 1] - starts[block];
        if (width == 0) continue;
        float scratch[kBlock];
        const float* x = read(block, scratch);
        uint8_t codes[kBlock];
        const int half = 1 << (width - 1);
        const float q = half - 1, reciprocal = 1.0f / message.m(block);
#pragma omp simd
        for (int64_t i = 0; i < kBlock; ++i) {
            const float root = std::sqrt(std::fabs(x[i]) * reciprocal);
            const int code = nearest_code(root * std::sqrt(root) * q);
            codes[i] = code + (bits_of(x[i]) >> 31) * half;
        }
        for (int p = 0; p < width; ++p) planes[starts[block] + p] = plane_of(codes, p);
    }
}

// Sums of messages of the same shard, `stride` apart from number `first` on.
class Terms {
public:
    Terms(const LeanMessages& messages, int64_t first, int64_t count, int64_t stride) {
        for (int64_t m = 0; m < count; ++m) {
            messages_.emplace_back(messages, first + m * stride);
            starts_.push_back(messages_.back().starts());
        }
    }

    // sum [32] = a block of all messages, added up in order.
    void add_up(int64_t block, float* sum) const {
        for (size_t m = 0; m < messages_.size(); ++m) {
            const uint32_t start = starts_[m][block], width = starts_[m][block + 1] - start;
            const bool missing = messages_[m].scales()[block] == kNotFinite;
            const float scale = missing ? not_a_number() : messages_[m].m(block);
            uint8_t codes[kBlock];
            codes_of(messages_[m].planes() + start, width, codes);
            const float* values = kValues.of[width];
            if (m == 0) {
#pragma omp simd
                for (int64_t i = 0; i < kBlock; ++i) sum[i] = values[codes[i]] * scale;
            } else {
#pragma omp simd
                for (int64_t i = 0; i < kBlock; ++i) sum[i] += values[codes[i]] * scale;
            }
        }
    }

private:
    std::vector<Message> messages_;
    std::vector<std::vector<uint32_t>> starts_;
};

template <class T>
void pack(const PackLean& op, const T* x) {
    for (int64_t shard = 0; shard < op.shards; ++shard) {
        encode(Message(op.messages, shard), [&](int64_t block, float* sum) -> const float* {
            const int64_t first = shard * op.messages.length + block * kBlock;
            const int64_t valid = std::min(std::max<int64_t>(op.values - first, 0), kBlock);
            if constexpr (std::is_same_v<T, float>) {
                if (op.rows == 1 && valid == kBlock) return x + first;
            }
            for (int64_t row = 0; row < op.rows; ++row) {
                const T* from = x + row * op.values + first;
                for (int64_t i = 0; i < valid; ++i)
                    sum[i] = row ? sum[i] + widen(from[i]) : widen(from[i]);
            }
            std::fill(sum + valid, sum + kBlock, 0.0f);
            return sum;
        });
    }
}

template <class T>
void unpack(const UnpackLean& op, T* x) {
    const int64_t length = op.messages.length;
    for (int64_t shard = 0; shard < op.shards; ++shard) {
        const Terms terms(op.messages, shard, op.copies, op.shards);
#pragma omp parallel for schedule(static)
        for (int64_t first = 0; first < length; first += kBlock) {
            float sum[kBlock];
            terms.add_up(first / kBlock, sum);
            T* out = x + shard * length + first;
            const int64_t valid = std::min(op.values - (shard * length + first), kBlock);
            for (int64_t i = 0; i < valid; ++i) out[i] = narrow<T>(sum[i] * op.factor);
        }
    }
}

}  // namespace

LSQ_OPERATION(PackLean, op) {
    for_dtype(op.dtype, [&](auto* dtype) {
        pack(op, static_cast<const std::remove_pointer_t<decltype(dtype)>*>(op.x));
    });
}

LSQ_OPERATION(SumLean, op) {
    const Terms terms(op.messages, 0, op.count, 1);
    std::vector<float> sums(op.messages.length);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < op.messages.length / kBlock; ++block) {
        float* sum = sums.data() + block * kBlock;
        terms.add_up(block, sum);
        for (int64_t i = 0; i < kBlock; ++i) sum[i] *= op.factor;
    }
    encode(Message(op.sum, 0), [&](int64_t block, float*) { return &sums[block * kBlock]; });
}

LSQ_OPERATION(UnpackLean, op) {
    for_dtype(op.dtype, [&](auto* dtype) { unpack(op, static_cast<decltype(dtype)>(op.x)); });
}
