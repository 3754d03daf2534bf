// Attention over packed rows, forward and backward; lsq/ops/attention.py is the reference.
//
// A block has one head and one tile of queries, or of keys for their gradients, and goes over the sentence's other
// tiles: with a running maximum and sum (FlashAttention-2, Dao 2023) forward, from the log of the sum backward. Nothing
// is added by atomics. Products of codes are exact in float32.
#include "attention.cuh"

namespace {

// 1 / sqrt(WIDTH), and what a product of queries and keys is multiplied by.
struct Factor {
    float share, scores;

    __device__ __forceinline__ Factor(const Operand& q, const Operand& k)
        : share(static_cast<float>(1.0 / sqrt(static_cast<double>(WIDTH)))), scores(q.scale * k.scale * share) {}
};

// sums * factor to the columns of a head in rows of a float32 matrix.
__device__ __forceinline__ void store_sums(const Sums& sums, float factor, int count, float* out, int64_t columns) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            if (own(i) >= count || column_of(four) >= WIDTH) continue;
            const float* sum = sums[i][four];
            store_words(out + own(i) * columns + column_of(four),
                        make_float4(sum[0] * factor, sum[1] * factor, sum[2] * factor, sum[3] * factor));
        }
    }
}

// What the backward kernels read of their operation.
struct Backward {
    Operand q, k, v, upstream;
    Factor factor;
    DropoutMask dropout;
    const float* log_sum;
    int64_t heads;

    __device__ __forceinline__ explicit Backward(const AttentionGradient& op)
        : q(op.heads.q), k(op.heads.k), v(op.heads.v),
          upstream(Projected{Coded{}, op.dcontext, 0, op.heads.count * WIDTH}), factor(q, k), dropout(op.heads.dropout),
          log_sum(op.log_sum), heads(op.heads.count) {}

    // The probability of a key, whose product with the query is `product`.
    __device__ __forceinline__ float probability(float product, int64_t row, int head) const {
        return bounded_exponential(product * factor.scores - log_sum[row * heads + head]);
    }
    __device__ __forceinline__ int64_t element(int64_t row, int head, int64_t key) const {
        return probability_element(row, heads, head) + key;
    }
};

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kForward) lsq_attention(const Attention op, Out<uint32_t> ticket) {
    __shared__ Tile queries, others;  // `others`: keys, then values, in the end the context
    __shared__ PairTile pairs;
    const Operand q(op.heads.q), k(op.heads.k), v(op.heads.v);
    const Factor factor(q, k);
    const DropoutMask dropout{op.heads.dropout};
    const int head = blockIdx.y;
    const Place place(op.heads.starts, op.heads.sentences, op.heads.rows);
    const Sentence sentence(op.heads, place.sentence);
    const int64_t row = place.begin + place.first;  // of the first query
    load_tile(q, row, place.count, head, queries);
    float largest[kOwn], total[kOwn];
    Sums sums = {};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) largest[i] = -infinity(), total[i] = 0.0f;
    const int64_t last = place.count ? sentence.seen(place.first + place.count - 1) : 0;
    for (int64_t begin = 0; begin < last; begin += TILE) {
        const int count = static_cast<int>(min(last - begin, static_cast<int64_t>(TILE)));
        __syncthreads();  // the tile of values has been read
        load_tile(k, sentence.key + begin, count, head, others);
        __syncthreads();
        Pairs scores;
        multiply_pairs(queries, others, scores);
        __syncthreads();
        load_tile(v, sentence.key + begin, count, head, others);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int64_t seen = sentence.seen(place.first + own(i));
            float highest = -infinity();
#pragma unroll
            for (int j = 0; j < kOther; ++j) {
                scores[i][j] = begin + other(j) < seen ? scores[i][j] * factor.scores : -infinity();
                highest = Maximum::join(scores[i][j], highest);
            }
            highest = Maximum::join(warp_reduce<Maximum, kAcross>(highest), largest[i]);
            // Until a key is seen, everything is 0.
            const float base = highest == -infinity() ? 0.0f : highest;
            const float shrink = bounded_exponential(largest[i] - base);
            largest[i] = highest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < kOther; ++j) {
                scores[i][j] = bounded_exponential(scores[i][j] - base);
                sum += scores[i][j];
                const int64_t element = probability_element(row + own(i), op.heads.count, head) + begin + other(j);
                scores[i][j] = drop(dropout, element, scores[i][j]);
            }
            total[i] = total[i] * shrink + warp_reduce<Sum, kAcross>(sum);
#pragma unroll
            for (int four = 0; four < kFours; ++four) {
#pragma unroll
                for (int c = 0; c < 4; ++c) sums[i][four][c] *= shrink;
            }
        }
        store_pairs(scores, pairs);
        __syncthreads();
        add_products(pairs, others, count, sums);
    }
    __syncthreads();
    float* log_sum = op.log_sum;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        const bool blind = own(i) < place.count && sentence.seen(place.first + own(i)) == 0;
        const float share = blind ? 0.0f : v.scale / total[i];
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            if (column_of(four) >= WIDTH) continue;
            float* to = others + own(i) * kStride + column_of(four);
#pragma unroll
            for (int c = 0; c < 4; ++c) to[c] = blind ? 0.0f : sums[i][four][c] * share;
        }
        if (log_sum && across() == 0 && own(i) < place.count) {
            log_sum[(row + own(i)) * op.heads.count + head] = blind ? -infinity() : largest[i] + logf(total[i]);
        }
    }
    __syncthreads();
    const CodeSink codes{op.rounded};
    Float* out = op.out;
    bool missing = false;
    constexpr int kVectors = WIDTH / kVector;
    for (int part = threadIdx.x; part < place.count * kVectors; part += kThreads) {
        const int own_row = part / kVectors, column = part % kVectors * kVector;
        float x[kVector];
        load8(others + own_row * kStride + column, x);
        const int64_t element = ((row + own_row) * op.heads.count + head) * WIDTH + column;
        if (out) store8(out + element, x);
        missing |= codes.write8(element, x);
    }
    codes.finish<kThreads>(ticket, missing);
}
LSQ_EXPORT(lsq_attention)

// dq: float32 [M, q_columns]. sums [M, heads]: of each query's probabilities times their gradients.
LSQ_KERNEL __launch_bounds__(kThreads, kBackward)
    lsq_attention_query_gradient(const AttentionGradient op, Out<float> sums, Out<float> dq) {
    __shared__ Tile queries, upstream, keys, values;
    __shared__ PairTile weighted, plain;
    const Backward given(op);
    const int head = blockIdx.y;
    const Place place(op.heads.starts, op.heads.sentences, op.heads.rows);
    const Sentence sentence(op.heads, place.sentence);
    const int64_t row = place.begin + place.first;
    load_tile(given.q, row, place.count, head, queries);
    load_tile(given.upstream, row, place.count, head, upstream);
    // The gradient of a score is p * (g - total) with the total of p * g over all keys: what p * g and p add up to with
    // the keys is kept apart until the total is known.
    float total[kOwn] = {};
    Sums of_weighted = {}, of_plain = {};
    const int64_t last = place.count ? sentence.seen(place.first + place.count - 1) : 0;
    for (int64_t begin = 0; begin < last; begin += TILE) {
        const int count = static_cast<int>(min(last - begin, static_cast<int64_t>(TILE)));
        __syncthreads();
        load_tile(given.k, sentence.key + begin, count, head, keys);
        load_tile(given.v, sentence.key + begin, count, head, values);
        __syncthreads();
        Pairs p, g;
        multiply_pairs(queries, keys, p);
        multiply_pairs(upstream, values, g);
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int64_t seen = own(i) < place.count ? sentence.seen(place.first + own(i)) : 0;
#pragma unroll
            for (int j = 0; j < kOther; ++j) {
                const int64_t key = begin + other(j);
                const bool sees = key < seen;
                p[i][j] = sees ? given.probability(p[i][j], row + own(i), head) : 0.0f;
                const int64_t element = given.element(row + own(i), head, key);
                g[i][j] = sees ? drop(given.dropout, element, g[i][j] * given.v.scale) : 0.0f;
                g[i][j] *= p[i][j];
                total[i] += g[i][j];
            }
        }
        store_pairs(g, weighted);
        store_pairs(p, plain);
        __syncthreads();
        add_products(weighted, keys, count, of_weighted);
        add_products(plain, keys, count, of_plain);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
        total[i] = warp_reduce<Sum, kAcross>(total[i]);
        if (across() == 0 && own(i) < place.count) sums[(row + own(i)) * op.heads.count + head] = total[i];
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
#pragma unroll
            for (int c = 0; c < 4; ++c) of_weighted[i][four][c] -= total[i] * of_plain[i][four][c];
        }
    }
    store_sums(of_weighted, given.k.scale * given.factor.share, place.count,
               dq + (row * given.q.columns + given.q.column + head * WIDTH), given.q.columns);
}
LSQ_EXPORT(lsq_attention_query_gradient)

// dkv: float32 [S, k_columns], gradients of keys and values; sums as above.
LSQ_KERNEL __launch_bounds__(kThreads, kBackward)
    lsq_attention_key_gradient(const AttentionGradient op, In<float> sums, Out<float> dkv) {
    __shared__ Tile queries, upstream, keys, values;
    __shared__ PairTile dropped, slopes;
    const Backward given(op);
    const float* totals = sums;
    const int head = blockIdx.y;
    const Place place(op.heads.key_starts, op.heads.sentences, op.heads.key_rows);
    const Sentence sentence(op.heads, place.sentence);
    const int64_t row = place.begin + place.first;
    load_tile(given.k, row, place.count, head, keys);
    load_tile(given.v, row, place.count, head, values);
    Sums dk = {}, dv = {};
    // Under a causal mask, queries before this one see none of the keys.
    const int64_t earliest = sentence.causal ? max(place.first + sentence.queries - sentence.keys, int64_t{0}) : 0;
    for (int64_t begin = earliest / TILE * TILE; place.count && begin < sentence.queries; begin += TILE) {
        const int count = static_cast<int>(min(sentence.queries - begin, static_cast<int64_t>(TILE)));
        __syncthreads();
        load_tile(given.q, sentence.query + begin, count, head, queries);
        load_tile(given.upstream, sentence.query + begin, count, head, upstream);
        __syncthreads();
        Pairs p, g;
        multiply_pairs(keys, queries, p);
        multiply_pairs(values, upstream, g);
#pragma unroll
        for (int j = 0; j < kOther; ++j) {
            const int64_t query = begin + other(j), query_row = sentence.query + query;
            const int64_t seen = other(j) < count ? sentence.seen(query) : 0;
            const float total = seen ? totals[query_row * op.heads.count + head] : 0.0f;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                const int64_t key = place.first + own(i), element = given.element(query_row, head, key);
                const bool sees = key < seen;
                const float probability = sees ? given.probability(p[i][j], query_row, head) : 0.0f;
                const float slope = sees ? drop(given.dropout, element, g[i][j] * given.v.scale) : 0.0f;
                g[i][j] = probability * (slope - total);
                p[i][j] = sees ? drop(given.dropout, element, probability) : 0.0f;
            }
        }
        store_pairs(g, slopes);
        store_pairs(p, dropped);
        __syncthreads();
        add_products(slopes, queries, count, dk);
        add_products(dropped, upstream, count, dv);
    }
    const int64_t columns = given.k.columns;
    float* out = dkv + (row * columns + head * WIDTH);
    store_sums(dk, given.q.scale * given.factor.share, place.count, out + given.k.column, columns);
    store_sums(dv, 1.0f, place.count, out + given.v.column, columns);
}
LSQ_EXPORT(lsq_attention_key_gradient)
