// Packs gradients into messages of int8 codes, sums and unpacks these; see
// lsq/ops/gradient_messages.py.
//
// A block of at most 1,024 values is worked on at a time, in the L1 cache; threads share blocks. v
// values, S shards, L values of a shard, M bytes of a message, N messages, R rows or copies that
// are added up.
#include "floats.h"
#include "rows.h"

using namespace lsq;

namespace {

constexpr int64_t kLargestBlock = 1024;
constexpr int64_t kScaleBytes = sizeof(bfloat16);
constexpr float kLargestCode = 127.0f;
// Bytes that loads run ahead, so that the next block need not wait for memory.
constexpr int64_t kAhead = 8192;

// Prefetches kAhead bytes behind x [n].
template <class T>
void load_ahead(const T* x, int64_t n) {
    const char* from = reinterpret_cast<const char*>(x) + kAhead;
    for (int64_t byte = 0; byte < n * static_cast<int64_t>(sizeof(T)); byte += 64)
        __builtin_prefetch(from + byte);
}

// Layout of a shard in its message: MessageLayout of lsq/ops/gradient_messages.py.
struct Shard {
    int64_t length, block;

    explicit Shard(const Messages& messages) : length(messages.length), block(messages.block) {}
    int64_t blocks() const { return (length + block - 1) / block; }
    int64_t scale_offset(int64_t number) const { return length + kScaleBytes * number; }
    int64_t scales_end() const { return scale_offset(blocks()); }
    int64_t bytes() const { return (scales_end() + 15) / 16 * 16; }
    int64_t size_of(int64_t number) const { return std::min(block, length - number * block); }
    const int8_t* codes(const uint8_t* message, int64_t number) const {
        return reinterpret_cast<const int8_t*>(message + number * block);
    }
    float scale(const uint8_t* message, int64_t number) const {
        bfloat16 scale;
        std::memcpy(&scale, message + scale_offset(number), kScaleBytes);
        return widen(scale);
    }
};

// Writes block `number` of a message, whose values are x [n].
template <class T>
void encode(const Shard& shard, int64_t number, const T* x, uint8_t* message) {
    const int64_t n = shard.size_of(number);
    const GradientScale s = message_scale(largest_magnitude(x, n), kLargestCode);
    const bfloat16 scale{static_cast<uint16_t>(bits_of(s.scale) >> 16)};
    std::memcpy(message + shard.scale_offset(number), &scale, kScaleBytes);
    if (number + 1 == shard.blocks()) {
        std::memset(message + shard.scales_end(), 0, shard.bytes() - shard.scales_end());
    }
    int8_t* codes = reinterpret_cast<int8_t*>(message + number * shard.block);
    if (s.reciprocal == 0.0f) {
        std::memset(codes, 0, n);
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) codes[i] = nearest_code(widen(x[i]) * s.reciprocal);
}

constexpr int kAtOnce = 4;  // messages that one pass over a sum adds

struct Terms {
    const int8_t* codes[kAtOnce];
    float scale[kAtOnce];

    void load(const Shard& shard, int64_t number, const uint8_t* messages, int64_t count,
              int64_t stride) {
        const int64_t n = shard.size_of(number);
        for (int64_t m = 0; m < count; ++m) {
            const uint8_t* message = messages + m * stride;
            codes[m] = shard.codes(message, number);
            scale[m] = shard.scale(message, number);
            load_ahead(codes[m], n);
        }
    }

    template <int COUNT, bool FIRST>
    void add(int64_t n, float* out) const {
        const int8_t *a = codes[0], *b = codes[1], *c = codes[2], *d = codes[3];
        const float s = scale[0], t = scale[1], u = scale[2], v = scale[3];
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) {
            float sum = static_cast<float>(a[i]) * s;
            if (!FIRST) sum = out[i] + sum;
            if (COUNT > 1) sum += static_cast<float>(b[i]) * t;
            if (COUNT > 2) sum += static_cast<float>(c[i]) * u;
            if (COUNT > 3) sum += static_cast<float>(d[i]) * v;
            out[i] = sum;
        }
    }

    template <bool FIRST>
    void add(int64_t count, int64_t n, float* out) const {
        if (count == 1) add<1, FIRST>(n, out);
        if (count == 2) add<2, FIRST>(n, out);
        if (count == 3) add<3, FIRST>(n, out);
        if (count == 4) add<4, FIRST>(n, out);
    }
};

// out [n] = the sum over `count` messages, `stride` bytes apart, of block `number`, in order.
void add_up(const Shard& shard, int64_t number, const uint8_t* messages, int64_t count,
            int64_t stride, float* out) {
    const int64_t n = shard.size_of(number);
    Terms terms;
    for (int64_t first = 0; first < count; first += kAtOnce) {
        const int64_t here = std::min<int64_t>(kAtOnce, count - first);
        terms.load(shard, number, messages + first * stride, here, stride);
        first ? terms.add<false>(here, n, out) : terms.add<true>(here, n, out);
    }
}

template <class T>
void pack(const PackGradients& op, const T* x) {
    const Shard shard(op.messages);
    const int64_t blocks = shard.blocks();
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < op.shards * blocks; ++block) {
        const int64_t number = block % blocks,
                      first = block / blocks * shard.length + number * shard.block;
        const int64_t n = shard.size_of(number),
                      valid = std::min(std::max<int64_t>(op.values - first, 0), n);
        uint8_t* message = op.messages.data + block / blocks * shard.bytes();
        if (op.rows == 1 && valid == n) {
            load_ahead(x + first, n);
            encode(shard, number, x + first, message);
            continue;
        }
        float sum[kLargestBlock];
        for (int64_t row = 0; row < op.rows; ++row) {
            const T* from = x + row * op.values + first;
            load_ahead(from, valid);
            if (row == 0) {
#pragma omp simd
                for (int64_t i = 0; i < valid; ++i) sum[i] = widen(from[i]);
            } else {
#pragma omp simd
                for (int64_t i = 0; i < valid; ++i) sum[i] += widen(from[i]);
            }
        }
        std::fill(sum + valid, sum + n, 0.0f);
        encode(shard, number, sum, message);
    }
}

template <class T>
void unpack(const UnpackGradients& op, T* x) {
    const Shard shard(op.messages);
    const int64_t blocks = shard.blocks();
    const float factor = op.factor;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < op.shards * blocks; ++at) {
        const int64_t number = at % blocks,
                      first = at / blocks * shard.length + number * shard.block;
        const int64_t valid = std::min(op.values - first, shard.size_of(number));
        if (valid <= 0) continue;
        const uint8_t* message = op.messages.data + at / blocks * shard.bytes();
        T* out = x + first;
        if (op.copies == 1) {
            Terms terms;
            terms.load(shard, number, message, 1, 0);
            const int8_t* codes = terms.codes[0];
            const float scale = terms.scale[0];
#pragma omp simd
            for (int64_t i = 0; i < valid; ++i)
                out[i] = narrow<T>(static_cast<float>(codes[i]) * scale * factor);
            continue;
        }
        float sum[kLargestBlock];
        add_up(shard, number, message, op.copies, op.shards * shard.bytes(), sum);
#pragma omp simd
        for (int64_t i = 0; i < valid; ++i) out[i] = narrow<T>(sum[i] * factor);
    }
}

}  // namespace

LSQ_OPERATION(PackGradients, op) {
    for_dtype(op.dtype, [&](auto* dtype) {
        pack(op, static_cast<const std::remove_pointer_t<decltype(dtype)>*>(op.x));
    });
}

LSQ_OPERATION(SumMessages, op) {
    const Shard from(op.messages), to(op.sum);
    const float factor = op.factor;
#pragma omp parallel for schedule(static)
    for (int64_t number = 0; number < from.blocks(); ++number) {
        float sum[kLargestBlock];
        add_up(from, number, op.messages.data, op.count, from.bytes(), sum);
        const int64_t n = from.size_of(number);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sum[i] *= factor;
        encode(to, number, sum, op.sum.data);
    }
}

LSQ_OPERATION(UnpackGradients, op) {
    for_dtype(op.dtype, [&](auto* dtype) { unpack(op, static_cast<decltype(dtype)>(op.x)); });
}
