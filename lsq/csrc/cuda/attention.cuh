// A block's tile of rows, the keys that a query sees, dropout, and biases of scores.
#pragma once

#include "attention_tiles.cuh"

namespace lsq {

#ifdef DISTANCES
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif

// Biases of one head's scores by the distance of key and query.
struct Biases {
#ifdef DISTANCES
    static constexpr int kLimit = DISTANCES / 2;
    float line[DISTANCES];

    // All threads of the block must call this, and meet before they read the line.
    LSQ_INLINE void load(const Heads& heads, int head) {
        __syncthreads();  // the line before has been read
        for (int i = threadIdx.x; i < DISTANCES; i += kThreads) {
            line[i] = heads.bias.table[heads.bias.bucket[i] * heads.count + head];
        }
    }

    LSQ_INLINE static int index(int distance) {
        return max(-kLimit, min(distance, kLimit)) + kLimit;
    }
    LSQ_INLINE float add(float score, int distance) const { return score + line[index(distance)]; }
#else
    LSQ_INLINE void load(const Heads&, int) {}
    LSQ_INLINE float add(float score, int) const { return score; }
#endif
};

// Gradient of biases: the block's sums for each bucket of one head.
struct BiasSums {
#ifdef DISTANCES
    float diagonal[2 * TILE - 1], sum[BUCKETS];

    LSQ_INLINE void clear() {
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) sum[bucket] = 0.0f;
    }

    // Adds the gradients of scores [queries, keys]; distance: of the first key from the first
    // query. A thread adds up diagonals, then buckets, in order. All threads of the block must call
    // this.
    LSQ_INLINE void add(const PositionBias& bias, const PairTile& slopes, int queries, int keys,
                        int distance) {
        for (int i = threadIdx.x; i < 2 * TILE - 1; i += kThreads) {
            float total = 0.0f;
            for (int query = 0; query < queries; ++query) {
                const int key = query + i - (TILE - 1);
                if (key < 0 || key >= keys) continue;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    total +=
                        widen(*reinterpret_cast<const bfloat16*>(slopes.at(part, query, 2 * key)));
                }
            }
            diagonal[i] = total;
        }
        __syncthreads();
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) {
            for (int i = 0; i < 2 * TILE - 1; ++i) {
                const int index = Biases::index(distance + i - (TILE - 1));
                if (bias.bucket[index] == bucket) sum[bucket] += diagonal[i];
            }
        }
    }

    LSQ_INLINE void write(const Heads& heads, int head, float* out) const {
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) {
            out[(blockIdx.x * BUCKETS + bucket) * heads.count + head] = sum[bucket];
        }
    }
#else
    LSQ_INLINE void clear() {}
    LSQ_INLINE void add(const PositionBias&, const PairTile&, int, int, int) {}
    LSQ_INLINE void write(const Heads&, int, float*) const {}
#endif
};

// A block's tile of rows. Sentence b owns slots cu_seqlens[b] / TILE + b and following, enough for
// its rows; some stay empty. Rows behind all sentences are one more sentence.
struct TileRows {
    int sentence;
    int first;  // row of the sentence with which the tile begins
    int begin;  // of the sentence among all rows
    int count;  // rows of the tile, 0 for an empty slot

    LSQ_INLINE TileRows(const int32_t* cu_seqlens, int64_t sentences, int64_t rows) : sentence(0) {
        const int slot = blockIdx.x, all = static_cast<int>(sentences);
        int end = all + 1;  // the sentence lies in [sentence, end)
        while (end - sentence > 1) {
            const int middle = (sentence + end) / 2;
            if (cu_seqlens[middle] / TILE + middle <= slot) {
                sentence = middle;
            } else {
                end = middle;
            }
        }
        begin = cu_seqlens[sentence];
        first = (slot - begin / TILE - sentence) * TILE;
        const int left =
            (sentence < all ? cu_seqlens[sentence + 1] : static_cast<int>(rows)) - begin - first;
        count = max(0, min(left, TILE));
    }
};

// Queries and keys of a sentence. Rows behind all sentences have neither.
struct Sentence {
    int query, queries, key, keys;  // first row of each, and how many there are
    int window;                     // keys that a query sees at most; 0: all
    bool causal;

    LSQ_INLINE Sentence(const Heads& heads, int number)
        : query(0), queries(0), key(0), keys(0), window(static_cast<int>(heads.window)),
          causal(heads.causal) {
        if (number == heads.sentences) return;
        const int32_t *cu_seqlens = heads.cu_seqlens, *key_cu_seqlens = heads.key_cu_seqlens;
        query = cu_seqlens[number], queries = cu_seqlens[number + 1] - query;
        key = key_cu_seqlens[number], keys = key_cu_seqlens[number + 1] - key;
    }

    // Number of keys up to the last one that query `i` sees; of all keys, or of a tile's from
    // `first` on.
    LSQ_INLINE int seen(int i) const {
        return causal ? max(0, min(i + 1 + keys - queries, keys)) : keys;
    }
    LSQ_INLINE int seen(int i, int first) const { return max(0, min(seen(i) - first, TILE)); }

    // Distance of a key from a query.
    LSQ_INLINE int distance(int i, int key_number) const {
        return key_number - (i + keys - queries);
    }

    // Number of keys before the window of query `i`.
    LSQ_INLINE int before(int i) const {
        return window ? max(0, i + 1 + keys - queries - window) : 0;
    }
    // Number of queries up to the last one whose window has that key.
    LSQ_INLINE int queries_of(int key_number) const {
        return window ? min(key_number + window + queries - keys, queries) : queries;
    }
    // First key of the first tile that queries from `i` on see.
    LSQ_INLINE int first_tile(int i) const { return before(i) / TILE * TILE; }
};

// Keys of a tile that a lane's two queries see: from `first` up to `last`.
struct Sight {
    int first[2], last[2];

    LSQ_INLINE bool sees(int eight, int i) const {
        const int key = lane_column(eight) + i % 2;
        return key < last[i / 2] && key >= first[i / 2];
    }
};

// Dropout factors of probabilities.
struct PairMask {
    const DropoutMask dropout;
    const int64_t key;
    const int64_t heads;

    LSQ_INLINE explicit PairMask(const Heads& of)
        : dropout(of.dropout), key(dropout.threshold ? dropout.key[0] : 0), heads(of.count) {}

    // Factors of a lane's four of eight keys from number `first` on; row: of the tile's first
    // query. Of two lanes that share words, the even one draws those of the upper row. All lanes
    // must call this.
    LSQ_INLINE void four(int64_t row, int head, int64_t first, float (&factor)[4]) const {
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
