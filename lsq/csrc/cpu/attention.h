// What attention's forward and backward loops share: who computes what, and how operands are read.
//
// A pair of a sentence and a head is one thread's: it takes kBlock queries at a time against all keys of the sentence,
// so what it holds grows with the keys alone. T queries, S keys, D columns of a head; rows in scratch are whole panels.
#pragma once

#include <numeric>

#include "loops.h"
#include "products.h"

namespace lsq {

constexpr int64_t kBlock = 32;  // queries at a time

// One of q, k and v: codes, or floats where there are no codes.
struct Operand : Projected {
    float scale() const { return rows.coded.codes ? rows.coded.scale[0] : 1.0f; }

    // Rows [first, first + count) of columns [at, at + width) to `out`, rows `stride` apart and zero beyond the columns.
    void read(int64_t first, int64_t count, int64_t at, int64_t width, float* out, int64_t stride) const {
        for (int64_t row = 0; row < count; ++row, out += stride) {
            const int64_t element = (first + row) * columns + column + at;
            if (rows.coded.codes) {
                const int8_t* from = rows.coded.codes + element;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) out[i] = static_cast<float>(from[i]);
            } else {
                std::memcpy(out, rows.floats + element, width * sizeof(float));
            }
            std::fill(out + width, out + stride, 0.0f);
        }
    }
};

// A pair of a sentence and a head. Rows behind all sentences are one sentence more, without keys.
struct Pair {
    int64_t head, first, queries, first_key, keys;
    bool causal;

    Pair(const Heads& heads, int64_t number) : head(number % heads.count), causal(heads.causal) {
        const int64_t sentence = number / heads.count;
        const bool behind = sentence == heads.sentences;
        first = heads.starts[sentence], first_key = heads.key_starts[sentence];
        queries = (behind ? heads.rows : heads.starts[sentence + 1]) - first;
        keys = behind ? 0 : heads.key_starts[sentence + 1] - first_key;
    }

    // Keys that query `i` of the sentence sees.
    int64_t seen(int64_t i) const {
        return causal ? std::clamp<int64_t>(i + 1 + keys - queries, 0, keys) : keys;
    }
};

// What both passes make of the heads that they read.
struct Case {
    const Heads& heads;
    Operand q, k, v;
    float share, factor;  // 1 / sqrt(D); what a product of queries and keys is multiplied by
    int64_t stride;       // of rows of a head in scratch
    int64_t most;         // keys of the longest sentence, in whole panels
    int64_t wide;         // of rows of scores: not a power of two, lest all rows share a few lines of the cache
    std::vector<int64_t> order;  // pairs, the longest first; those of rows behind all sentences are the last

    explicit Case(const Heads& heads)
        : heads(heads), q{heads.q}, k{heads.k}, v{heads.v},
          share(static_cast<float>(1.0 / std::sqrt(static_cast<double>(heads.width)))),
          factor(q.scale() * k.scale() * share), stride(whole_panels(heads.width)), most(0), wide(0),
          order((heads.sentences + 1) * heads.count) {
        const auto keys = [&](int64_t pair) { return Pair(heads, pair).keys; };
        for (size_t pair = 0; pair < order.size(); ++pair) most = std::max(most, whole_panels(keys(pair)));
        wide = most + 16;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys(a) > keys(b); });
    }
};

// Scratch of one thread.
class Worker {
public:
    explicit Worker(const Case& given)
        : given_(given), heads_(given.heads), stride_(given.stride), k_(given.most * stride_), v_(given.most * stride_),
          k_panels_(given.most * stride_), shuffled_(2 * kPanel * stride_), queries_(kBlock * stride_),
          scores_(kBlock * given.wide), words_(given.most + 8) {}

protected:
    // Keys and values of the pair as floats, rows filled up with zeros to whole panels.
    void read_keys(const Pair& pair) {
        for (const auto& [from, to] : {std::pair{&given_.k, k_.get()}, std::pair{&given_.v, v_.get()}}) {
            from->read(pair.first_key, pair.keys, pair.head * heads_.width, heads_.width, to, stride_);
            std::fill(to + pair.keys * stride_, to + whole_panels(pair.keys) * stride_, 0.0f);
        }
    }

    // [S, D] -> panels of kPanel keys, [D, kPanel] each.
    void transpose(const Pair& pair, const float* rows, float* out) {
        const int64_t size = kPanel * stride_;
        for (int64_t panel = 0; panel < panels(pair.keys); ++panel) {
            transpose_panel(rows + panel * size, stride_, out + panel * size, shuffled_.get());
        }
    }

    // out [rows, keys] = rows of D numbers times keys or values, transposed.
    void multiply_keys(const float* rows, const float* transposed, int64_t count, int64_t keys, float* out) const {
        multiply(Left<false>{rows, stride_}, Right{transposed, kPanel, kPanel * stride_}, count, keys, heads_.width, false,
                 out, given_.wide);
    }

    // Random words of keys [0, n) of a row.
    void draw(int64_t row, int64_t head, int64_t n) {
        const Dropout& dropout = heads_.dropout;
        philox(dropout.key[0], dropout.subsequence, probability_element(row, heads_.count, head), n, words_.data());
    }

    // Dropout by the words that were drawn last.
    void drop(int64_t n, float* x) const {
        if (!heads_.dropout.threshold) return;
        const uint32_t limit = static_cast<uint32_t>(heads_.dropout.threshold);
        const uint32_t* words = words_.data();
        const float keep = heads_.dropout.keep;
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) x[j] = words[j] >= limit ? x[j] * keep : 0.0f;
    }

    const Case& given_;
    const Heads& heads_;
    int64_t stride_;
    AlignedFloats k_, v_, k_panels_, shuffled_, queries_, scores_;
    std::vector<uint32_t> words_;
};

}  // namespace lsq
