// Packs gradients into messages of int8 codes, sums and unpacks these; lsq/ops/gradient_messages.py
// is the reference.
//
// A message has int8 codes, a bfloat16 scale for each block of BLOCK values, and zeros up to a
// multiple of 16 bytes. A thread takes vectors of 8 values; up to 32 threads share a block. S
// shards of L values, a multiple of 32, each a message of M bytes. MANY: there may be several rows
// or copies. v values, N messages, R rows or copies.
#include "vectors.cuh"
#include "reduce.cuh"

#ifndef BLOCK
#define BLOCK 128
#endif

#ifndef MANY
#define MANY 0
#endif

namespace {

static_assert(BLOCK % kVector == 0 && (BLOCK & (BLOCK - 1)) == 0,
              "blocks are whole vectors, a power of two of them");

// A shard of `length` values, a multiple of 32.
struct Shard {
    int64_t length;

    LSQ_INLINE int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }
    LSQ_INLINE int64_t scale_offset(int64_t number) const {
        return length + static_cast<int64_t>(sizeof(bfloat16)) * number;
    }
    LSQ_INLINE int64_t scales_end() const { return scale_offset(blocks()); }
    LSQ_INLINE int64_t bytes() const { return (scales_end() + 15) / 16 * 16; }
};

// Eight codes as they lie in memory.
struct Codes {
    uint32_t word[2];

    LSQ_INLINE void load(const uint8_t* from) {
        const uint2 words = load_words<uint2>(from);
        word[0] = words.x, word[1] = words.y;
    }
    LSQ_INLINE void store(uint8_t* to) const { store_words(to, make_uint2(word[0], word[1])); }
    LSQ_INLINE float value(int i) const {
        return static_cast<float>(static_cast<int8_t>(word[i / 4] >> (8 * (i % 4))));
    }
    LSQ_INLINE void add(int i, int8_t code) {
        word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(code)) << (8 * (i % 4));
    }
};

constexpr int kThreads = 256;
// Threads that share a block of values.
constexpr int kLanes = BLOCK / kVector < kWarp ? BLOCK / kVector : kWarp;
constexpr int kVectors = BLOCK / kVector / kLanes;
// Blocks of values that a block of threads takes.
constexpr int kGroups = kThreads / kLanes;
constexpr int kMessagesAtOnce = kVectors == 1 ? 8 : 4;  // whose loads are under way together
constexpr int kRowsAtOnce = MANY ? 4 / kVectors : 1, kCopiesAtOnce = MANY ? 4 : 1;

// Least blocks of a multiprocessor that packs; one row at a time needs few registers.
constexpr int kLeastBlocks = kVectors > 1 ? 2 : MANY ? 4 : 6;
// By itself (0), NVRTC 13.0 aims at 5 and spills.
constexpr int kLeastBlocksOfSum = kVectors > 1 ? 0 : 4;

using Values = float[kVectors][kVector];  // what one thread holds of a block

// The thread's block of values: its number in the shard, and the first columns of the thread's
// vectors.
struct Block {
    int64_t number;

    LSQ_INLINE Block()
        : number(static_cast<int64_t>(blockIdx.x) * kGroups + threadIdx.x / kLanes) {}
    LSQ_INLINE void columns(int64_t (&column)[kVectors]) const {
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
            column[v] = number * BLOCK + kVector * (threadIdx.x % kLanes + v * kLanes);
    }
};

// Sets sum to minus zero, the neutral element of addition.
template <int V>
LSQ_INLINE void clear(float (&sum)[V][kVector]) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[v][i] = -0.0f;
    }
}

// Adds vectors column[V] of block `number` of `count` messages, `stride` bytes apart, in order.
template <int AT_ONCE, int V>
LSQ_INLINE void add_messages(const uint8_t* messages, int64_t count, int64_t stride,
                             const Shard& shard, int64_t number, const int64_t (&column)[V],
                             float (&sum)[V][kVector]) {
    const int64_t offset = shard.scale_offset(number);
    for (int64_t first = 0; first < count; first += AT_ONCE) {
        Codes codes[AT_ONCE][V] = {};
        float scale[AT_ONCE];
#pragma unroll
        for (int m = 0; m < AT_ONCE; ++m) {
            if (first + m >= count) continue;
            const uint8_t* message = messages + (first + m) * stride;
            scale[m] = widen(load_words<bfloat16>(message + offset));
#pragma unroll
            for (int v = 0; v < V; ++v) {
                if (column[v] < shard.length) codes[m][v].load(message + column[v]);
            }
        }
#pragma unroll
        for (int m = 0; m < AT_ONCE; ++m) {
            if (first + m >= count) continue;
#pragma unroll
            for (int v = 0; v < V; ++v) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) sum[v][i] += codes[m][v].value(i) * scale[m];
            }
        }
    }
}

// The first `count` of eight values at any address, then zeros.
LSQ_INLINE Packed<Float> load_some(const Float* from, int64_t count) {
    float x[kVector] = {};
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < count) x[i] = widen(from[i]);
    }
    Packed<Float> packed;
    pack8(x, packed);
    return packed;
}

// Adds the rows of x [rows, values] in order: vectors column[V] of a shard of `length` values from
// `element` on. Values beyond the end are zero.
template <int V>
LSQ_INLINE void add_rows(const Float* x, int64_t rows, int64_t values, int64_t element,
                         int64_t length, const int64_t (&column)[V], float (&sum)[V][kVector]) {
    const bool aligned = rows == 1 || values % kVector == 0;
    for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
        Packed<Float> loaded[kRowsAtOnce][V] = {};
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                const int64_t begin = element + column[v];
                if (first + r >= rows || column[v] >= length) continue;
                if (aligned && begin + kVector <= values) {
                    loaded[r][v] = load_packed(x + (first + r) * values + begin);
                } else {
                    loaded[r][v] = load_some(x + (first + r) * values + begin, values - begin);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
            if (first + r >= rows) continue;
#pragma unroll
            for (int v = 0; v < V; ++v) {
                float wide[kVector];
                unpack8(loaded[r][v], wide);
                add8(wide, sum[v]);
            }
        }
    }
}

LSQ_INLINE void write_scale(const Shard& shard, int64_t number, float scale, uint8_t* message) {
    store_words(message + shard.scale_offset(number),
                bfloat16{static_cast<uint16_t>(bits_of(scale) >> 16)});
    if (number + 1 < shard.blocks()) return;
    const int64_t end = shard.bytes();
    for (int64_t byte = shard.scales_end(); byte < end; byte += sizeof(bfloat16)) {
        store_words(message + byte, bfloat16{0});
    }
}

// Writes the thread's vectors x of block `number` as codes into a message. All threads of the block
// call it.
LSQ_INLINE void encode(const Shard& shard, int64_t number, const int64_t (&column)[kVectors],
                       const Values& x, uint8_t* message) {
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) largest = largest8(x[v], largest);
    const GradientScale s = message_scale(float_of(warp_reduce<Largest, kLanes>(largest)), 127.0f);
    if (number >= shard.blocks()) return;
    if (threadIdx.x % kLanes == 0) write_scale(shard, number, s.scale, message);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (column[v] >= shard.length) continue;
        Codes codes = {};
        if (s.reciprocal != 0.0f) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) codes.add(i, nearest_code(x[v][i] * s.reciprocal));
        }
        codes.store(message + column[v]);
    }
}

}  // namespace

// Grid: blocks of a shard, S.
LSQ_KERNEL __launch_bounds__(kThreads, kLeastBlocks) lsq_pack_gradients(const PackGradients op) {
    wait_for_launches();
    const Shard shard{op.messages.length};
    const Block block;
    int64_t column[kVectors];
    block.columns(column);
    Values sum;
    clear(sum);
    const int64_t element = static_cast<int64_t>(blockIdx.y) * shard.length;
    const void* x = op.x;
    add_rows(static_cast<const Float*>(x), MANY ? op.rows : 1, op.values, element, shard.length,
             column, sum);
    encode(shard, block.number, column, sum, op.messages.data + blockIdx.y * shard.bytes());
}
LSQ_EXPORT(lsq_pack_gradients)

// Grid: blocks of the shard.
LSQ_KERNEL __launch_bounds__(kThreads, kLeastBlocksOfSum) lsq_sum_messages(const SumMessages op) {
    wait_for_launches();
    const Shard shard{op.messages.length};
    const Block block;
    int64_t column[kVectors];
    block.columns(column);
    Values sum;
    clear(sum);
    if (block.number < shard.blocks()) {
        add_messages<kMessagesAtOnce>(static_cast<const uint8_t*>(op.messages.data), op.count,
                                      shard.bytes(), shard, block.number, column, sum);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[v][i] *= op.factor;
    }
    encode(shard, block.number, column, sum, op.sum.data);
}
LSQ_EXPORT(lsq_sum_messages)

// Grid: vectors of a shard, S.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_unpack_gradients(const UnpackGradients op) {
    wait_for_launches();
    const Shard shard{op.messages.length};
    const int64_t column[1] = {kVector *
                               (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x)};
    const int64_t element = blockIdx.y * shard.length + column[0];
    if (column[0] >= shard.length || element >= op.values) return;
    float sum[1][kVector];
    clear(sum);
    const uint8_t* message = op.messages.data + blockIdx.y * shard.bytes();
    const int64_t stride = gridDim.y * shard.bytes(), count = MANY ? op.copies : 1;
    add_messages<kCopiesAtOnce>(message, count, stride, shard, column[0] / BLOCK, column, sum);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[0][i] *= op.factor;
    void* x = op.x;
    Float* out = static_cast<Float*>(x) + element;
    if (element + kVector <= op.values) {
        store8(out, sum[0]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (element + i < op.values) out[i] = narrow<Float>(sum[0][i]);
    }
}
LSQ_EXPORT(lsq_unpack_gradients)
