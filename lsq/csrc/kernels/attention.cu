// Softmax over keys with padding and future masks and dropout, in place, and its gradient; lsq/ops/attention.py is the
// reference.
//
// B sentences, N heads, T queries, S keys. Rows of scores [B * N * T, S] lie `stride` apart, a multiple of 8. Each is
// held by LANES threads, VECTORS vectors of 8 a thread, several rows in a block. Random numbers belong to the elements
// of the tensor without its gaps. The backward pass makes the probabilities again; it reads and writes a matrix once.
#include "random.cuh"
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / LANES;  // of a block

using Values = float[VECTORS][kVector];  // what one thread holds of a row

__device__ __forceinline__ int column_of(int vector) { return kVector * (threadIdx.x % LANES + vector * LANES); }

// The row of scores that a thread works on; one that does not exist shows no keys.
struct Row {
    int64_t number;
    bool inside;
    int visible;             // keys from this one on lie in the future
    const uint8_t* padding;  // [S], or null

    __device__ __forceinline__ Row(
        const uint8_t* padding, bool causal, int64_t rows, int64_t heads, int64_t time, int64_t source) {
        number = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / LANES;
        inside = number < rows;
        // Divisions of 32 bits, which are several times as fast: there are fewer than 2^31 rows.
        const uint32_t matrix = static_cast<uint32_t>(number) / static_cast<uint32_t>(time);
        const int query = static_cast<int>(number - matrix * time);
        visible = !inside ? 0 : static_cast<int>(causal ? query + 1 + source - time : source);
        this->padding = padding ? padding + matrix / static_cast<uint32_t>(heads) * source : nullptr;
    }

    // Bit i says that key column + i cannot be seen.
    __device__ __forceinline__ uint32_t hidden8(int column) const {
        const int left = visible - column;
        uint32_t hidden = left < kVector ? 0xFFu << left & 0xFFu : 0;
        if (!padding) return hidden;
        if (left >= kVector && reinterpret_cast<uint64_t>(padding + column) % kVector == 0) {
            const uint2 flags = load_words<uint2>(padding + column);
#pragma unroll
            for (int i = 0; i < kVector; ++i) hidden |= ((i < 4 ? flags.x : flags.y) >> (8 * (i % 4)) & 1u) << i;
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (i < left) hidden |= static_cast<uint32_t>(padding[column + i]) << i;
            }
        }
        return hidden;
    }

    // x = softmax of the scores; NaN where no key can be seen. All threads of the block must call this.
    __device__ __forceinline__ void probabilities(const Float* scores, Values& x) const {
        float largest = -infinity();
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int column = column_of(v);
            if (column < visible) load8(scores + column, x[v]);
            const uint32_t hidden = column < visible ? hidden8(column) : 0xFFu;
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[v][i] = hidden >> i & 1 ? -infinity() : x[v][i];
                largest = Maximum::join(x[v][i], largest);
            }
        }
        largest = group_reduce<Maximum, LANES, kThreads>(largest);
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[v][i] = bounded_exponential(x[v][i] - largest);
                sum += x[v][i];
            }
        }
        const float share = 1.0f / group_reduce<Sum, LANES, kThreads>(sum);
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] *= share;
        }
    }
};

// Words of elements [element, element + 8) of a tensor with rows of `source` elements.
__device__ __forceinline__ void draw8(
    const Dropout& dropout, int64_t element, int64_t source, uint32_t (&words)[kVector]) {
    if (source % 4 == 0) {
        random8(dropout.key[0], dropout.stream, element, words);
    } else {
        random8_unaligned(dropout.key[0], dropout.stream, element, words);
    }
}

}  // namespace

// scores [B * N * T, stride] -> probabilities after dropout, in place; padding bool [B, S] or null.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_masked_softmax(
    Out<Float> scores, In<uint8_t> padding, In<int64_t> key, int64_t stream, int64_t threshold, float keep,
    int64_t causal, int64_t rows, int64_t heads, int64_t time, int64_t source, int64_t stride) {
    const Dropout dropout{key, stream, threshold, keep};
    const Row row(padding, causal, rows, heads, time, source);
    Float* here = scores + row.number * stride;
    Values x;
    row.probabilities(here, x);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v);
        if (!row.inside || column >= stride) continue;
        if (threshold) {
            uint32_t words[kVector];
            draw8(dropout, row.number * source + column, source, words);
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[v][i] = dropout.apply(x[v][i], words[i]);
        }
        store8(here + column, x[v]);
    }
}
LSQ_EXPORT(lsq_masked_softmax)

// The same for `scores`; gradient [B * N * T, stride] of those -> gradient of the scores, in place.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_masked_softmax_backward(
    Out<Float> scores, Out<Float> gradient, In<uint8_t> padding, In<int64_t> key, int64_t stream, int64_t threshold,
    float keep, int64_t causal, int64_t rows, int64_t heads, int64_t time, int64_t source, int64_t stride) {
    const Dropout dropout{key, stream, threshold, keep};
    const Row row(padding, causal, rows, heads, time, source);
    Float* here = scores + row.number * stride;
    Float* slope = gradient + row.number * stride;
    Values p, g = {};
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (column_of(v) < row.visible) load8(slope + column_of(v), g[v]);
    }
    row.probabilities(here, p);
    float sum = 0.0f;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v);
        if (!row.inside || column >= stride) continue;
        if (threshold) {
            uint32_t words[kVector];
            draw8(dropout, row.number * source + column, source, words);
            float dropped[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                dropped[i] = dropout.apply(p[v][i], words[i]);
                g[v][i] = dropout.apply(g[v][i], words[i]);
            }
            store8(here + column, dropped);
        } else {
            store8(here + column, p[v]);
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            g[v][i] = column + i < row.visible ? g[v][i] * p[v][i] : 0.0f;
            sum += g[v][i];
        }
    }
    sum = group_reduce<Sum, LANES, kThreads>(sum);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const int column = column_of(v);
        if (!row.inside || column >= stride) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) g[v][i] -= p[v][i] * sum;
        store8(slope + column, g[v]);
    }
}
LSQ_EXPORT(lsq_masked_softmax_backward)
