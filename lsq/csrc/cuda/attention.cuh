// Where a block stands in attention: its tile among the rows of all sentences, what a query sees,
// what dropout leaves.
#pragma once

#include "attention_bias.cuh"

namespace lsq {

// Which tile of rows a block has. Sentence b owns slots cu_seqlens[b] / TILE + b and those after
// it, which are enough for its rows however they begin; some stay empty. Rows behind the last
// sentence are one sentence more.
struct Place {
    int sentence;
    int first;  // row of the sentence with which the tile begins
    int begin;  // of the sentence among all rows
    int count;  // rows of the tile, 0 for an empty slot

    // `rows`: all that there are.
    __device__ __forceinline__ Place(const int32_t* cu_seqlens, int64_t sentences, int64_t rows)
        : sentence(0) {
        const int place = blockIdx.x, all = static_cast<int>(sentences);
        int end = all + 1;  // the sentence lies in [sentence, end)
        while (end - sentence > 1) {
            const int middle = (sentence + end) / 2;
            if (cu_seqlens[middle] / TILE + middle <= place) {
                sentence = middle;
            } else {
                end = middle;
            }
        }
        begin = cu_seqlens[sentence];
        first = (place - begin / TILE - sentence) * TILE;
        const int left =
            (sentence < all ? cu_seqlens[sentence + 1] : static_cast<int>(rows)) - begin - first;
        count = max(0, min(left, TILE));
    }
};

// The queries and keys of a sentence. Rows behind all sentences have no keys, and no queries.
struct Sentence {
    int query, queries, key, keys;  // first row of each, and how many there are
    int window;                     // keys that a query sees at most; 0: all
    bool causal;

    __device__ __forceinline__ Sentence(const Heads& heads, int number)
        : query(0), queries(0), key(0), keys(0), window(static_cast<int>(heads.window)),
          causal(heads.causal) {
        if (number == heads.sentences) return;
        const int32_t *cu_seqlens = heads.cu_seqlens, *key_cu_seqlens = heads.key_cu_seqlens;
        query = cu_seqlens[number], queries = cu_seqlens[number + 1] - query;
        key = key_cu_seqlens[number], keys = key_cu_seqlens[number + 1] - key;
    }

    // Keys that query `i` sees, from the first on.
    __device__ __forceinline__ int seen(int i) const {
        return causal ? max(0, min(i + 1 + keys - queries, keys)) : keys;
    }
    // The same of a tile's keys, which begin with `first`.
    __device__ __forceinline__ int seen(int i, int first) const {
        return max(0, min(seen(i) - first, TILE));
    }

    // How far a key stands behind a query.
    __device__ __forceinline__ int distance(int i, int key_number) const {
        return key_number - (i + keys - queries);
    }

    // Keys that stand before those that query `i` sees; without a window there are none.
    __device__ __forceinline__ int before(int i) const {
        return window ? max(0, i + 1 + keys - queries - window) : 0;
    }
    // Queries up to the last one whose window has that key.
    __device__ __forceinline__ int queries_of(int key_number) const {
        return window ? min(key_number + window + queries - keys, queries) : queries;
    }
    // The first key of the first tile that queries from `i` on see.
    __device__ __forceinline__ int first_tile(int i) const { return before(i) / TILE * TILE; }
};

// What a lane's two queries see of a tile's keys: those from `first` up to `last`.
struct Sight {
    int first[2], last[2];

    __device__ __forceinline__ bool sees(int eight, int i) const {
        const int key = lane_column(eight) + i % 2;
        return key < last[i / 2] && key >= first[i / 2];
    }
};

// What dropout multiplies probabilities by.
struct PairMask {
    const DropoutMask dropout;
    const int64_t key;
    const int64_t heads;

    __device__ __forceinline__ explicit PairMask(const Heads& of)
        : dropout(of.dropout), key(dropout.threshold ? dropout.key[0] : 0), heads(of.count) {}

    // Those of a lane's four of eight keys, the first of which has number `first`; row: of the
    // tile's first query. Of two lanes that share groups of words, the even one draws those of the
    // upper row. All lanes must call this.
    __device__ __forceinline__ void four(int64_t row, int head, int64_t first,
                                         float (&factor)[4]) const {
        if (dropout.threshold == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) factor[i] = 1.0f;
            return;
        }
        const bool odd = lane() % 2;
        const int64_t element =
            probability_element(row + lane_row(odd), heads, head) + first + lane() % 4 / 2 * 4;
        const PhiloxWords group = philox_group(key, dropout.subsequence, element / 4);
        const uint32_t* own = group.word;
        const uint32_t low = __shfl_xor_sync(kAllLanes, odd ? own[0] : own[2], 1);
        const uint32_t high = __shfl_xor_sync(kAllLanes, odd ? own[1] : own[3], 1);
        const uint32_t words[4] = {odd ? low : own[0], odd ? high : own[1], odd ? own[2] : low,
                                   odd ? own[3] : high};
#pragma unroll
        for (int i = 0; i < 4; ++i) factor[i] = dropout.apply(1.0f, words[i]);
    }
};

}  // namespace lsq
