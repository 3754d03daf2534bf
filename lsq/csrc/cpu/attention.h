// Blocks, operands and dropout of attention's forward and backward loops.
//
// A thread takes a pair of a sentence and a head (in the backward pass all heads that read the same
// keys): up to kKeyBlock keys at a time, and kQueryBlock of the queries that see them, so that both
// fit a core's caches. T queries, S keys, D columns of a head. Matrices in scratch are whole units
// (products.h).
#pragma once

#include <atomic>
#include <numeric>

#include "loops.h"
#include "tile_products.h"
#include "tiles.h"

namespace lsq {

// Padding of a row of keys, lest all rows share a few lines of the cache.
constexpr int64_t kSkew = 16;
constexpr int64_t kQueryBlock = kUnit, kKeyBlock = 512;  // at a time
// The backward pass takes up to so many keys as one block: more blocks compute all probabilities
// twice.
constexpr int64_t kBackwardKeys = 1024;

// q, k or v: codes, or floats.
struct Operand : Projected {
    bool coded() const { return rows.coded.codes; }
    float scale() const { return coded() ? rows.coded.scale[0] : 1.0f; }

    // Rows [first, first + count) of columns [at, at + width) of the codes.
    Window<int8_t> codes(int64_t first, int64_t count, int64_t at, int64_t width) const {
        return {rows.coded.codes + first * columns + column + at, columns, count, width};
    }

    // Calls body(Window) with those rows of codes or floats.
    template <class Body>
    void window(int64_t first, int64_t count, int64_t at, int64_t width, const Body& body) const {
        if (coded()) {
            body(codes(first, count, at, width));
        } else {
            body(Window<float>{rows.floats + first * columns + column + at, columns, count, width});
        }
    }
};

// A sentence and a head. Rows behind all sentences are one more sentence, without keys.
struct Pair {
    int64_t head, first, queries, first_key, keys;
    bool causal;
    int64_t window, block;  // keys that a query sees, 0 for all; keys at a time

    // Up to `together` keys form one block.
    Pair(const Heads& heads, int64_t sentence, int64_t head, int64_t together)
        : head(head), causal(heads.causal), window(heads.window) {
        const bool behind = sentence == heads.sentences;
        first = heads.cu_seqlens[sentence], first_key = heads.key_cu_seqlens[sentence];
        queries = (behind ? heads.rows : heads.cu_seqlens[sentence + 1]) - first;
        keys = behind ? 0 : heads.key_cu_seqlens[sentence + 1] - first_key;
        const int64_t most = keys <= together ? together : kKeyBlock;
        block = window ? std::min(kKeyBlock, whole_units(window)) : most;
    }

    int64_t keys_from(int64_t key) const { return std::min(block, keys - key); }

    // Number of keys before the window of a query.
    int64_t before(int64_t query) const {
        return window ? std::max<int64_t>(query + 1 + keys - queries - window, 0) : 0;
    }
};

// Some queries of a pair, and keys up to the last one that the last of these queries sees.
struct Block {
    const Pair& pair;
    int64_t query, queries, key, keys;  // first of each, within the sentence, and how many
    int64_t opening;                    // first key of the first block that these queries meet

    Block(const Pair& pair, int64_t query, int64_t key)
        : pair(pair), query(query), queries(std::min(kQueryBlock, pair.queries - query)), key(key),
          keys(pair.keys_from(key)), opening(pair.before(query) / pair.block * pair.block) {
        keys = seen(queries - 1);
    }

    bool opens() const { return key == opening; }
    // The first block counts even without keys.
    bool meets() const { return opens() || (key > opening && keys); }

    // Number of these keys that query `i` sees, from the first on.
    int64_t seen(int64_t i) const {
        if (!pair.causal) return keys;
        return std::clamp<int64_t>(query + i + 1 + pair.keys - pair.queries - key, 0, keys);
    }
    // Number of these keys before the window of query `i`.
    int64_t hidden(int64_t i) const {
        return std::clamp<int64_t>(pair.before(query + i) - key, 0, keys);
    }
    int64_t row() const { return pair.first + query; }  // of the first query
};

// Sizes and order of work of both passes.
struct Case {
    const Heads& heads;
    int64_t each, together;  // heads of queries that a pair has; keys that are one block
    Operand q, k, v;
    float share, factor;        // from products to scores: of values, of codes
    std::vector<float> biases;  // [N, distances]
    int64_t stride;             // of rows of a head in scratch
    int64_t queries;            // of the longest sentence
    int64_t keys;               // of the longest block of keys
    int64_t wide;               // of rows of scores
    Blocks groups;  // of sentences, with the rows behind all of them as the last sentence
    std::vector<int64_t> order;  // pairs, group after group, those with the most work first

    explicit Case(const Heads& heads, int64_t each = 1, int64_t together = kKeyBlock)
        : heads(heads), each(each), together(together), q{heads.q}, k{heads.k}, v{heads.v},
          share(heads.softmax_scale
                    ? heads.softmax_scale
                    : static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads.width)))),
          factor(q.scale() * k.scale() * share), stride(whole_units(heads.width)), queries(0),
          keys(0), wide(0), groups(heads.sentences + 1) {
        const PositionBias& bias = heads.bias;
        for (int64_t head = 0; bias.table && head < heads.count; ++head) {
            for (int64_t i = 0; i < bias.distances; ++i) {
                biases.push_back(bias.table[bias.bucket[i] * heads.count + head]);
            }
        }
        std::vector<int64_t> work(groups.count, 0), sorted(groups.count);
        for (int64_t sentence = 0; sentence <= heads.sentences; ++sentence) {
            const Pair pair(heads, sentence, 0, together);
            queries = std::max(queries, whole_units(pair.queries));
            keys = std::max(keys, whole_units(pair.keys_from(0)));
            work[sentence / groups.size] += pair.queries * pair.keys;
        }
        wide = keys + kSkew;
        std::iota(sorted.begin(), sorted.end(), 0);
        std::stable_sort(sorted.begin(), sorted.end(),
                         [&](int64_t a, int64_t b) { return work[a] > work[b]; });
        for (int64_t group : sorted) {
            for (int64_t i = 0; i < pairs(group); ++i)
                order.push_back(groups.begin(group) * heads.count / each + i);
        }
    }

    bool coded() const { return q.coded() && k.coded() && v.coded(); }
    // The factor of scores that is left after add_bias.
    float left_factor() const { return biases.empty() ? factor : 1.0f; }
    Pair pair(int64_t number) const {
        const int64_t of_sentence = heads.count / each;
        return Pair(heads, number / of_sentence, number % of_sentence * each, together);
    }
    int64_t pairs(int64_t group) const {
        return (groups.end(group) - groups.begin(group)) * heads.count / each;
    }
    int64_t group_of(int64_t number) const { return number * each / heads.count / groups.size; }

    int64_t wide_of(const Block& block) const {
        return whole_units(block.pair.keys_from(block.key)) + kSkew;
    }
};

// Reads operands and draws dropout on one thread.
class PairWorker {
protected:
    explicit PairWorker(const Case& given)
        : given_(given), heads_(given.heads), words_(given.keys + kPhiloxWords) {}

    // First column of a head: of queries, and of the keys and values that they read.
    int64_t column(const Pair& pair) const { return pair.head * heads_.width; }
    int64_t key_column(const Pair& pair) const { return pair.head / heads_.group * heads_.width; }

    // Calls body(Window): the block's queries, or all keys or values from the block's first on.
    template <class Body>
    void queries(const Operand& from, const Block& block, const Body& body) const {
        from.window(block.row(), block.queries, column(block.pair), heads_.width, body);
    }
    template <class Body>
    void keys(const Operand& from, const Block& block, const Body& body) const {
        const Pair& pair = block.pair;
        from.window(pair.first_key + block.key, pair.keys_from(block.key), key_column(pair),
                    heads_.width, body);
    }

    // Calls begin(block) for each block of keys, body(block) for the queries of all heads that see
    // some of them, and end(block).
    template <class Begin, class Body, class End>
    void for_blocks(const Pair& pair, const Begin& begin, const Body& body, const End& end) const {
        for (int64_t key = 0; key == 0 || key < pair.keys; key += pair.block) {
            begin(Block(pair, 0, key));
            for (Pair of_head = pair; of_head.head < pair.head + given_.each; ++of_head.head) {
                for (int64_t query = 0; query < pair.queries; query += kQueryBlock) {
                    const Block block(of_head, query, key);
                    if (block.meets()) body(block);
                }
            }
            end(Block(pair, 0, key));
        }
    }

    // Calls work(j, index) for each key j of query `i`, with the index of its bias among those of a
    // head.
    template <class Work>
    void distances(const Block& block, int64_t i, const Work& work) const {
        const int64_t limit = heads_.bias.distances / 2;
        const int64_t first = block.key - (block.query + i + block.pair.keys - block.pair.queries);
        for (int64_t j = 0; j < block.keys; ++j)
            work(j, std::clamp(first + j, -limit, limit) + limit);
    }

    // Turns products of query `i` into scores, if there are biases.
    void add_bias(const Block& block, int64_t i, float* row) const {
        if (given_.biases.empty()) return;
        const float* bias = given_.biases.data() + block.pair.head * heads_.bias.distances;
        const float factor = given_.factor;
        distances(block, i,
                  [=](int64_t j, int64_t index) { row[j] = row[j] * factor + bias[index]; });
    }

    // Overwrites the scores of keys before the window.
    static void hide(const Block& block, int64_t i, float* row, float number) {
        if (block.pair.window) std::fill_n(row, block.hidden(i), number);
    }

    // Draws random words for query `i` and n keys from `first` on. For few keys an even `i` draws
    // those of i + 1, too; queries come in order.
    void draw(const Block& block, int64_t i, int64_t first, int64_t n) {
        constexpr int64_t kHalf = kPhiloxWords / 2;
        const Dropout& dropout = heads_.dropout;
        if (!dropout.threshold) return;
        const auto element = [&](int64_t query) {
            return probability_element(block.row() + query, heads_.count, block.pair.head) +
                   block.key + first;
        };
        uint32_t* words = reinterpret_cast<uint32_t*>(words_.get());
        if (block.keys - first > kHalf) {
            drawn_ = words;
            const int64_t whole = (n + kPhiloxWords - 1) / kPhiloxWords * kPhiloxWords;
            philox(dropout.key[0], dropout.subsequence, element(i), whole, words);
        } else {
            drawn_ = words + i % 2 * kHalf;
            if (i % 2 == 0)
                philox_pair(dropout.key[0], dropout.subsequence, element(i), element(i + 1), words);
        }
    }

    // Applies the words that were drawn last, from `j` on; the caller still multiplies by keep().
    struct Kept {
        const uint32_t* drawn;
        uint32_t threshold;
        Lanes operator()(int64_t j, Lanes x) const {
            if (!threshold) return x;
            return *reinterpret_cast<const LaneBits*>(drawn + j) >= threshold ? x : Lanes{};
        }
    };
    Kept kept() const { return {drawn_, static_cast<uint32_t>(heads_.dropout.threshold)}; }
    float keep() const { return heads_.dropout.threshold ? heads_.dropout.keep : 1.0f; }

    const Case& given_;
    const Heads& heads_;
    AlignedFloats words_;
    const uint32_t* drawn_ = nullptr;
};

// Multiplies queries with keys on one thread. Products: FloatProducts or its like.
template <class Products>
class Worker : public PairWorker {
public:
    explicit Worker(const Case& given)
        : PairWorker(given), stride_(given.stride), scores_(kQueryBlock * given.wide),
          query_rows_(kQueryBlock, stride_, given.q.coded()),
          key_columns_(given.keys, stride_, given.k.coded()) {}

protected:
    void read_keys(const Block& block) {
        keys(given_.k, block, [&](auto k) { key_columns_.take(k, k.rows, heads_.width); });
    }

    void multiply_keys(const Block& block) {
        queries(given_.q, block, [&](auto q) { query_rows_.take(q, q.rows, heads_.width); });
        Products::multiply(query_rows_, key_columns_, block.queries, block.keys, heads_.width,
                           false, scores_.get(), given_.wide);
    }

    typename Products::Session session_;
    int64_t stride_;
    AlignedFloats scores_;
    typename Products::template Left<false> query_rows_;
    typename Products::template Right<true> key_columns_;
};

// The fastest instructions that attention may use, for tests and benchmarks.
inline std::atomic<Instructions> fastest_allowed{Instructions::amx};

inline bool allowed(Instructions instructions) {
    return instructions <= fastest_allowed && usable(instructions);
}

// Calls body with the fastest products of floats.
template <class Body>
void with_products(const Body& body) {
#ifdef LSQ_AMX
    if (allowed(Instructions::amx)) return body(TileProducts{});
#endif
    body(FloatProducts{});
}

}  // namespace lsq
