// Attention over packed sequences; lsq/ops/attention.py is the reference.
//
// A block has one head and one tile of queries, and loops over the tiles of keys that they see with
// a running maximum and sum (FlashAttention-2, Dao 2023). Scores of codes are exact.
#include "attention.cuh"

using ScoreTile = Select<CODED, CodeTile, FloatTile<kOperandParts>>;
using Score = Select<CODED, int32_t, float>;

namespace {

struct Tiles {
    ScoreTile queries, keys;
    FloatTile<kOperandParts> values;
};

// Least threads of a multiprocessor.
constexpr int kHeld = WIDTH > 64 ? 320 : 512;
constexpr int kContextStride = WIDTH + 8;

// The context reuses the tiles' memory.
union Shared {
    Tiles tiles;
    alignas(16) float context[TILE * kContextStride];
};

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kHeld / kThreads)
    lsq_attention(const Attention op, Out<uint32_t> ticket) {
    wait_for_launches();
    __shared__ Shared shared;
    __shared__ Biases biases;
    Tiles& tiles = shared.tiles;
    const Operand q(op.heads.q), k(op.heads.k), v(op.heads.v);
    const float factor = q.scale * k.scale * score_share(op.heads);
    const PairMask mask(op.heads);
    const int head = blockIdx.y, key_head = head / SHARING;
    const TileRows tile(op.heads.cu_seqlens, op.heads.sentences, op.heads.rows);
    const Sentence sentence(op.heads, tile.sentence);
    const int row = tile.begin + tile.first;  // of the first query
    load_tile(q, row, tile.count, head, tiles.queries);
    commit_copies();
    biases.load(op.heads, head);
    float largest[2] = {-infinity(), -infinity()}, total[2] = {};
    Sums sums = {};
    const int last = tile.count ? sentence.seen(tile.first + tile.count - 1) : 0;
    for (int begin = sentence.first_tile(tile.first); begin < last; begin += TILE) {
        const int count = min(last - begin, TILE);
        __syncthreads();  // the tiles before have been read
        load_tile(k, sentence.key + begin, count, key_head, tiles.keys);
        commit_copies();
        load_tile(v, sentence.key + begin, count, key_head, tiles.values);
        wait_copies<0>();
        __syncthreads();
        // Keys that some query of the warp sees.
        const int mine = min(sentence.seen(tile.first + warp_row() + kRows - 1, begin), count);
        if (warp_row() >= tile.count || mine == 0) continue;
        Score products[TILE / 8][4];
        multiply_rows(tiles.queries, tiles.keys, mine, products);
        Sight sight;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sight.first[half] = sentence.before(tile.first + lane_row(half)) - begin;
            sight.last[half] = sentence.seen(tile.first + lane_row(half), begin);
        }
        Pairs p;
        float highest[2] = {-infinity(), -infinity()};
#pragma unroll
        for (int eight = 0; eight < TILE / 8; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int distance = sentence.distance(tile.first + lane_row(i / 2),
                                                       begin + lane_column(eight) + i % 2);
                const float score =
                    biases.add(static_cast<float>(products[eight][i]) * factor, distance);
                p[eight][i] = sight.sees(eight, i) ? score : -infinity();
                highest[i / 2] = Maximum::join(p[eight][i], highest[i / 2]);
            }
        }
        float base[2], shrink[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            highest[half] = Maximum::join(warp_reduce<Maximum, 4>(highest[half]), largest[half]);
            // Until a key is seen, everything is 0.
            base[half] = highest[half] == -infinity() ? 0.0f : highest[half];
            shrink[half] = bounded_exponential(largest[half] - base[half]);
            largest[half] = highest[half];
            total[half] *= shrink[half];
        }
#pragma unroll
        for (int eight = 0; eight < TILE / 8; ++eight) {
            if (eight / 2 * kRows >= mine) continue;
            float kept[4];
            mask.four(row, head, begin + 8 * eight, kept);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[eight][i] = bounded_exponential(p[eight][i] - base[i / 2]);
                total[i / 2] += p[eight][i];
                p[eight][i] *= kept[i];
            }
        }
#pragma unroll
        for (int eight = 0; eight < kColumns / 8; ++eight) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[eight][i] *= shrink[i / 2];
        }
        add_products(OfRows{p}, tiles.values, mine, 0, sums);
    }
    wait_copies<0>();  // of queries that see no key
    __syncthreads();
    float* log_sum = op.log_sum;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int mine = lane_row(half);
        total[half] = warp_reduce<Sum, 4>(total[half]);
        if (mine >= tile.count) continue;
        const bool blind = sentence.seen(tile.first + mine) == 0;
        const float share = v.scale / total[half];
#pragma unroll
        for (int eight = 0; eight < WIDTH / 8; ++eight) {
            const float* two = sums[eight] + 2 * half;
            const float2 context =
                blind ? make_float2(0.0f, 0.0f) : make_float2(two[0] * share, two[1] * share);
            store_words(shared.context + (mine * kContextStride + lane_column(eight)), context);
        }
        if (log_sum && lane() % 4 == 0) {
            log_sum[(row + mine) * op.heads.count + head] =
                blind ? -infinity() : largest[half] + logf(total[half]);
        }
    }
    __syncthreads();
    const CodeSink codes{op.rounded};
    Float* out = op.out;
    Magnitude rounded = 0;
    constexpr int kVectors = WIDTH / kVector;
    for (int part = threadIdx.x; part < tile.count * kVectors; part += kThreads) {
        const int own_row = part / kVectors, column = part % kVectors * kVector;
        float x[kVector];
        load8(shared.context + (own_row * kContextStride + column), x);
        const int64_t element = ((row + own_row) * op.heads.count + head) * WIDTH + column;
        if (out) store8(out + element, x);
        rounded = Largest::join(rounded, codes.write8(element, x));
    }
    codes.finish<kThreads>(ticket, rounded);
}
LSQ_EXPORT(lsq_attention)
