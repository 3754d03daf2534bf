// Gradients of attention over packed sequences; lsq/ops/attention.py is the reference.
//
// Probabilities are computed again from the log of their sum. A block has one head and one tile of
// queries, or of keys, and loops over the sentence's other tiles, without atomics. If all keys of a
// sentence lie in one tile, its block also makes the queries' gradients.
#include "attention.cuh"

namespace {

// Least threads of a multiprocessor, by the registers of the kernels.
constexpr bool kLarge = WIDTH > 64 || kSingle || kBiased;
constexpr int kFewThreads = 256, kManyThreads = 384;

struct Tiles {
    FloatTile<kOperandParts> queries, keys, values;
    FloatTile<kFloatParts> upstream;
    // Left factors of dv and dk; they wait for all warps' queries.
    PairTile dropped, slopes;
};

static_assert(sizeof(Tiles) == SHARED, "bytes of shared memory that launches ask for");

// Operands of both kernels.
struct Backward {
    Operand q, k, v, upstream;
    PairMask mask;
    const float* log_sum;
    float share, factor;
    Biases& biases;

    LSQ_INLINE Backward(const AttentionGradient& op, Biases& biases)
        : q(op.heads.q), k(op.heads.k), v(op.heads.v),
          upstream(Projected{Coded{}, op.dcontext, 0, op.heads.count * WIDTH}), mask(op.heads),
          log_sum(op.log_sum), share(score_share(op.heads)), factor(q.scale * k.scale * share),
          biases(biases) {}

    LSQ_INLINE bool one_tile(const Sentence& sentence) const {
        return sentence.keys > 0 && sentence.keys <= TILE;
    }

    // All threads of the block must call these, and have left the tiles.
    LSQ_INLINE void load_queries(int64_t row, int count, int head, Tiles& tiles) const {
        load_tile(q, row, count, head, tiles.queries);
        load_tile(upstream, row, count, head, tiles.upstream);
    }
    LSQ_INLINE void load_keys(int64_t row, int count, int head, Tiles& tiles) const {
        load_tile(k, row, count, head, tiles.keys);
        load_tile(v, row, count, head, tiles.values);
    }
};

// A pair of tiles: first query and key within the sentence, their numbers, the head.
struct Meeting {
    int query, key, queries, keys, head;
};

// The warp's rows of p, probabilities, and g, their gradients; 0 for hidden keys. dropped(eight,
// four): gets p after dropout.
template <class Dropped>
LSQ_INLINE void probabilities(const Backward& given, const Tiles& tiles, const Sentence& sentence,
                              const Meeting& at, Pairs& p, Pairs& g, const Dropped& dropped) {
    multiply_rows(tiles.queries, tiles.keys, at.keys, p);
    multiply_rows(tiles.upstream, tiles.values, at.keys, g);
    const int row = sentence.query + at.query;
    Sight sight;
    float log_sum[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bool inside = lane_row(half) < at.queries;
        sight.first[half] = sentence.before(at.query + lane_row(half)) - at.key;
        sight.last[half] = inside ? sentence.seen(at.query + lane_row(half), at.key) : 0;
        log_sum[half] =
            inside ? given.log_sum[(row + lane_row(half)) * given.mask.heads + at.head] : 0.0f;
    }
#pragma unroll
    for (int eight = 0; eight < TILE / 8; ++eight) {
        if (eight / 2 * kRows >= at.keys) continue;
        float four[4];
        given.mask.four(row, at.head, at.key + 8 * eight, four);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const bool sees = sight.sees(eight, i);
            const int distance =
                sentence.distance(at.query + lane_row(i / 2), at.key + lane_column(eight) + i % 2);
            const float score = given.biases.add(p[eight][i] * given.factor, distance);
            p[eight][i] = sees ? bounded_exponential(score - log_sum[i / 2]) : 0.0f;
            g[eight][i] = sees ? g[eight][i] * given.v.scale * four[i] : 0.0f;
            four[i] = sees ? p[eight][i] * four[i] : 0.0f;
        }
        dropped(eight, four);
    }
}

LSQ_INLINE void add_up(const Pairs& p, const Pairs& g, float (&total)[2]) {
#pragma unroll
    for (int eight = 0; eight < TILE / 8; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i / 2] += p[eight][i] * g[eight][i];
    }
}

// sums * factor to `count` rows of a matrix; columns from 16 * first on of a head.
template <int EIGHTS>
LSQ_INLINE void store_sums(const float (&sums)[EIGHTS][4], float factor, int count, int first,
                           Float* out, int64_t columns) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            const int column = 16 * first + lane_column(eight);
            if (lane_row(half) >= count || column >= WIDTH) continue;
            const float low = sums[eight][2 * half] * factor;
            const float high = sums[eight][2 * half + 1] * factor;
            Float* two = out + lane_row(half) * columns + column;
            if constexpr (sizeof(Float) == 4) {
                store_words(two, make_float2(low, high));
            } else {
                store_words(two, bfloat16_pair(low, high));
            }
        }
    }
}

}  // namespace

// dq: [M, q_columns], of sentences whose keys take several tiles, or that have none. sums
// [M, heads]: each query's sum of probabilities times their gradients.
LSQ_KERNEL __launch_bounds__(kThreads, kFewThreads / kThreads)
    lsq_attention_query_gradient(const AttentionGradient op, Out<float> sums, Out<Float> dq) {
    wait_for_launches();
    extern __shared__ __align__(16) unsigned char shared[];
    Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
    __shared__ Biases biases;
    const Backward given(op, biases);
    const TileRows tile(op.heads.cu_seqlens, op.heads.sentences, op.heads.rows);
    const Sentence sentence(op.heads, tile.sentence);
    if (tile.count == 0 || given.one_tile(sentence)) return;
    const int head = blockIdx.y, key_head = head / SHARING;
    const int row = tile.begin + tile.first;
    given.load_queries(row, tile.count, head, tiles);
    biases.load(op.heads, head);
    // The gradient of a score is p * (g - total), total being the sum of p * g over all keys: the
    // products of p * g and of p with the keys are kept apart until it is known.
    float total[2] = {};
    Sums of_weighted = {}, of_plain = {};
    const int last = sentence.seen(tile.first + tile.count - 1);
    for (int begin = sentence.first_tile(tile.first); begin < last; begin += TILE) {
        const int count = min(last - begin, TILE);
        __syncthreads();
        given.load_keys(sentence.key + begin, count, key_head, tiles);
        __syncthreads();
        if (warp_row() >= tile.count) continue;
        Pairs p, g;
        probabilities(given, tiles, sentence, {tile.first, begin, tile.count, count, head}, p, g,
                      [](int, const float (&)[4]) {});
        add_products(OfRows{p}, tiles.keys, count, 0, of_plain);
        add_up(p, g, total);
#pragma unroll
        for (int eight = 0; eight < TILE / 8; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) g[eight][i] *= p[eight][i];
        }
        add_products(OfRows{g}, tiles.keys, count, 0, of_weighted);
    }
    float* totals = sums;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        total[half] = warp_reduce<Sum, 4>(total[half]);
        if (lane() % 4 == 0 && lane_row(half) < tile.count) {
            totals[(row + lane_row(half)) * op.heads.count + head] = total[half];
        }
    }
#pragma unroll
    for (int eight = 0; eight < kColumns / 8; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) of_weighted[eight][i] -= total[i / 2] * of_plain[eight][i];
    }
    store_sums(of_weighted, given.k.scale * given.share, tile.count, 0,
               dq + (row * given.q.columns + given.q.column + head * WIDTH), given.q.columns);
}
LSQ_EXPORT(lsq_attention_query_gradient)

// dkv: [S, k_columns], gradients of keys and values; sums as above; dq of the other
// sentences. of_biases: the block's sums for the table of biases.
LSQ_KERNEL __launch_bounds__(kThreads, (kLarge ? kFewThreads : kManyThreads) / kThreads)
    lsq_attention_key_gradient(const AttentionGradient op, In<float> sums, Out<Float> dq,
                               Out<Float> dkv, Out<float> of_biases) {
    wait_for_launches();
    extern __shared__ __align__(16) unsigned char shared[];
    Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
    __shared__ Biases biases;
    __shared__ BiasSums bias_sums;
    const Backward given(op, biases);
    const TileRows tile(op.heads.key_cu_seqlens, op.heads.sentences, op.heads.key_rows);
    const Sentence sentence(op.heads, tile.sentence);
    const int key_head = blockIdx.y;
    if (tile.count == 0) {
        bias_sums.clear();
        for (int i = 0; i < SHARING; ++i)
            bias_sums.write(op.heads, key_head * SHARING + i, of_biases);
        return;
    }
    const bool alone = given.one_tile(sentence);
    const int row = tile.begin + tile.first;
    given.load_keys(row, tile.count, key_head, tiles);
    Sums dk = {}, dv = {};
    // Causal queries before `earliest` see none of the keys, nor do those behind the window;
    // without any keys, their gradients are zeros.
    const int earliest =
        sentence.causal && !alone ? max(tile.first + sentence.queries - sentence.keys, 0) : 0;
    const int latest = alone ? sentence.queries : sentence.queries_of(tile.first + tile.count - 1);
    for (int head = key_head * SHARING; head < (key_head + 1) * SHARING; ++head) {
        biases.load(op.heads, head);
        bias_sums.clear();
        for (int begin = earliest / TILE * TILE; begin < latest; begin += TILE) {
            const int count = min(sentence.queries - begin, TILE);
            const int query = sentence.query + begin;
            __syncthreads();
            given.load_queries(query, count, head, tiles);
            __syncthreads();
            if (warp_row() < count) {
                Pairs p, g;
                probabilities(given, tiles, sentence, {begin, tile.first, count, tile.count, head},
                              p, g, [&](int eight, const float (&four)[4]) {
                                  store_pairs(four, eight, tiles.dropped);
                              });
                float total[2] = {};
                if (alone) add_up(p, g, total);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    total[half] = warp_reduce<Sum, 4>(total[half]);
                    if (!alone && lane_row(half) < count) {
                        total[half] = sums[(query + lane_row(half)) * op.heads.count + head];
                    }
                }
#pragma unroll
                for (int eight = 0; eight < TILE / 8; ++eight) {
                    if (eight / 2 * kRows >= tile.count) continue;
#pragma unroll
                    for (int i = 0; i < 4; ++i) p[eight][i] *= g[eight][i] - total[i / 2];
                    store_pairs(p[eight], eight, tiles.slopes);
                }
                // A few columns at a time: registers hold the sums of keys and values, too.
                constexpr int kSteps = kColumns % 64 ? 1 : kSingle ? 2 : 4;
#pragma unroll 1
                for (int first = 0; alone && first < kColumns / 16; first += kSteps) {
                    float mine[2 * kSteps][4] = {};
                    add_products(OfRows{p}, tiles.keys, tile.count, first, mine);
                    store_sums(mine, given.k.scale * given.share, count, first,
                               dq + (query * given.q.columns + given.q.column + head * WIDTH),
                               given.q.columns);
                }
            }
            __syncthreads();
            bias_sums.add(op.heads.bias, tiles.slopes, count, tile.count,
                          sentence.distance(begin, tile.first));
            if (warp_row() < tile.count) {
                add_products(OfColumns{tiles.dropped}, tiles.upstream, count, 0, dv);
                add_products(OfColumns{tiles.slopes}, tiles.queries, count, 0, dk);
            }
        }
        bias_sums.write(op.heads, head, of_biases);
    }
    const int64_t columns = given.k.columns;
    Float* out = dkv + (row * columns + key_head * WIDTH);
    store_sums(dk, given.q.scale * given.share, tile.count, 0, out + given.k.column, columns);
    store_sums(dv, 1.0f, tile.count, 0, out + given.v.column, columns);
}
LSQ_EXPORT(lsq_attention_key_gradient)
