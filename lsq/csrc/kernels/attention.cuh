// Tiles of queries and keys of one head of one sentence, in shared memory as float32.
//
// -DWIDTH: columns of a head, a multiple of 8 up to 128; -DTILE: queries or keys of a tile. A block of 128 threads
// stands as 8 x 16: thread (y, x) works on rows y + 8 i of one tile, on rows x + 16 j of the other, and on columns 4 x + 64 j.
#pragma once

#include "rounding.cuh"

namespace lsq {

constexpr int kThreads = 128, kAcross = 16, kDown = kThreads / kAcross;
constexpr int kOwn = TILE / kDown, kOther = TILE / kAcross;  // of the two tiles' rows, those that a thread works on
constexpr int kFours = (WIDTH + 4 * kAcross - 1) / (4 * kAcross);
constexpr int kStride = WIDTH + 4;      // of a tile: four threads' vectors of a column lie in different banks
constexpr int kPairStride = TILE + 4;
// Blocks that a multiprocessor holds at once, at least: left to itself, NVRTC 13.0 aims at more and spills.
constexpr int kForward = 3, kBackward = 2;

// Rows of COLUMNS numbers in shared memory.
template <int COLUMNS>
struct alignas(16) SharedRows {
    float value[TILE * COLUMNS];

    __device__ __forceinline__ operator float*() { return value; }
};
using Tile = SharedRows<kStride>;
using PairTile = SharedRows<kPairStride>;  // [own, other]
using Pairs = float[kOwn][kOther];         // what one thread holds of it
using Sums = float[kOwn][kFours][4];       // what one thread holds of [own, WIDTH]

__device__ __forceinline__ int down() { return threadIdx.x / kAcross; }
__device__ __forceinline__ int across() { return threadIdx.x % kAcross; }
__device__ __forceinline__ int own(int i) { return down() + kDown * i; }
__device__ __forceinline__ int other(int j) { return across() + kAcross * j; }
__device__ __forceinline__ int column_of(int four) { return 4 * (across() + kAcross * four); }

// One of q, k and v: codes, or floats where there are no codes.
struct Operand {
    const int8_t* codes;
    const Float* floats;
    int64_t columns, column;  // of the tensor, and where the first head begins
    float scale;

    __device__ __forceinline__ explicit Operand(const Projected& from)
        : codes(from.rows.coded.codes), floats(from.rows.floats), columns(from.columns), column(from.column), scale(1.0f) {
        if (codes) scale = static_cast<const float*>(from.rows.coded.scale)[0];
    }
};

// Rows [first, first + count) of a head to a tile; zeros beyond. All threads of the block must call this, and have left
// the tile.
__device__ __forceinline__ void load_tile(const Operand& from, int64_t first, int count, int head, float* tile) {
    constexpr int kVectors = WIDTH / kVector;
    for (int part = threadIdx.x; part < TILE * kVectors; part += kThreads) {
        const int row = part / kVectors, column = part % kVectors * kVector;
        float x[kVector] = {};
        if (row < count) {
            const int64_t element = (first + row) * from.columns + from.column + head * WIDTH + column;
            if (from.codes) {
                int32_t codes[kVector];
                load8(from.codes + element, codes);
#pragma unroll
                for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(codes[i]);
            } else {
                load8(from.floats + element, x);
            }
        }
        store8(tile + row * kStride + column, x);
    }
}

// products = rows of `mine` times rows of `theirs`.
__device__ __forceinline__ void multiply_pairs(const float* mine, const float* theirs, Pairs& products) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOther; ++j) products[i][j] = 0.0f;
    }
#pragma unroll 2
    for (int column = 0; column < WIDTH; column += 4) {
        float4 left[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) left[i] = load_words<float4>(mine + own(i) * kStride + column);
#pragma unroll
        for (int j = 0; j < kOther; ++j) {
            const float4 right = load_words<float4>(theirs + other(j) * kStride + column);
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                products[i][j] = fmaf(left[i].x, right.x, products[i][j]);
                products[i][j] = fmaf(left[i].y, right.y, products[i][j]);
                products[i][j] = fmaf(left[i].z, right.z, products[i][j]);
                products[i][j] = fmaf(left[i].w, right.w, products[i][j]);
            }
        }
    }
}

__device__ __forceinline__ void store_pairs(const Pairs& values, float* pairs) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOther; ++j) pairs[own(i) * kPairStride + other(j)] = values[i][j];
    }
}

// sums += pairs [own, others] times rows of a tile.
__device__ __forceinline__ void add_products(const float* pairs, const float* tile, int others, Sums& sums) {
    for (int row = 0; row < others; ++row) {
        float left[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) left[i] = pairs[own(i) * kPairStride + row];
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            if (column_of(four) >= WIDTH) continue;
            const float4 right = load_words<float4>(tile + row * kStride + column_of(four));
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                sums[i][four][0] = fmaf(left[i], right.x, sums[i][four][0]);
                sums[i][four][1] = fmaf(left[i], right.y, sums[i][four][1]);
                sums[i][four][2] = fmaf(left[i], right.z, sums[i][four][2]);
                sums[i][four][3] = fmaf(left[i], right.w, sums[i][four][3]);
            }
        }
    }
}

// Which tile of rows a block has. Sentence b owns places starts[b] / TILE + b and those after it, which are enough for
// its rows however they begin; some stay empty. Rows behind the last sentence are one sentence more.
struct Place {
    int64_t sentence;
    int64_t first;  // row of the sentence with which the tile begins
    int64_t begin;  // of the sentence among all rows
    int count;      // rows of the tile, 0 for an empty place

    // `rows`: all that there are.
    __device__ __forceinline__ Place(const int32_t* starts, int64_t sentences, int64_t rows) : sentence(0) {
        const int64_t place = blockIdx.x;
        int64_t end = sentences + 1;  // the sentence lies in [sentence, end)
        while (end - sentence > 1) {
            const int64_t middle = (sentence + end) / 2;
            if (starts[middle] / TILE + middle <= place) {
                sentence = middle;
            } else {
                end = middle;
            }
        }
        begin = starts[sentence];
        first = (place - begin / TILE - sentence) * TILE;
        const int64_t left = (sentence < sentences ? starts[sentence + 1] : rows) - begin - first;
        count = static_cast<int>(left < 0 ? 0 : left < TILE ? left : TILE);
    }
};

// The queries and keys of a sentence. Rows behind all sentences have no keys, and no queries.
struct Sentence {
    int64_t query, queries, key, keys;  // first row of each, and how many there are
    bool causal;

    __device__ __forceinline__ Sentence(const Heads& heads, int64_t number)
        : query(0), queries(0), key(0), keys(0), causal(heads.causal) {
        if (number == heads.sentences) return;
        const int32_t *starts = heads.starts, *key_starts = heads.key_starts;
        query = starts[number], queries = starts[number + 1] - query;
        key = key_starts[number], keys = key_starts[number + 1] - key;
    }

    // Keys that query `i` sees, from the first on.
    __device__ __forceinline__ int64_t seen(int64_t i) const {
        const int64_t limit = i + 1 + keys - queries;
        return !causal || limit > keys ? keys : limit < 0 ? 0 : limit;
    }
};

// x after dropout; `element`: see Heads.dropout.
__device__ __forceinline__ float drop(const DropoutMask& dropout, int64_t element, float x) {
    if (dropout.threshold == 0) return x;
    const PhiloxWords group = philox_group(dropout.key[0], dropout.subsequence, element / 4);
    const int lane = element % 4;
    const uint32_t low = lane == 0 ? group.word[0] : group.word[1], high = lane == 2 ? group.word[2] : group.word[3];
    return dropout.apply(x, lane < 2 ? low : high);
}

}  // namespace lsq
