// Gradient of logits of codes, which are computed again, by tiles: M rows, P words, K
// values, both multiples of 16.
//
// -DROUNDED=1: rounded at random, by a known bound for each row; 0: Float.
// lsq/ops/vocabulary_loss.py is the reference.
#include "random.cuh"
#include "vocabulary_loss_tile.cuh"

namespace {

// Values of a row of the tile.
struct alignas(16) GradientRow {
    float shift;       // log of the normaliser
    float reciprocal;  // of its scale, 1 for floats; 0: the row's gradient is 0
    short target;      // its index in the tile, or -1
    short likeliest;   // index of the other kept word, or -1
    uint32_t word;     // random, of column 0

    LSQ_INLINE static GradientRow of(const VocabularyLossGradient& op, Tile tile,
                                     int64_t row) {
        const int64_t word = op.prediction.target[row];
        GradientRow made{op.normaliser[row], word != op.prediction.padding ? 1.0f : 0.0f,
                         index_in_tile(tile, word), -1, 0};
#if ROUNDED
        const GradientScale scale = gradient_scale(op.bound[row], op.rounded.largest);
        if (tile.across == 0) op.rounded.scale[row] = scale.scale * op.dloss[0];
        made.reciprocal = scale.reciprocal;
        if (op.kept.likeliest) made.likeliest = index_in_tile(tile, op.kept.likeliest[row]);
        made.word = philox_word(op.rounded.key[0], op.rounded.subsequence, row);
#endif
        return made;
    }
};

static_assert(TILE_M <= kTileThreads, "a thread prepares a row");
static_assert(kRowsBytes + TILE_M * sizeof(GradientRow) <= kEndBytes,
              "fits beside the rows");

}  // namespace

LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_vocabulary_loss_gradient_product(const VocabularyLossGradient op, int64_t inner) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const Prediction& given = op.prediction;
    const auto end_tile = [&](Tile tile, const Sums& sums, unsigned char* shared) {
        GradientRow* of_rows = reinterpret_cast<GradientRow*>(beside_rows(shared));
        const int64_t own = tile.row() + tile_thread();
        if (tile_thread() < TILE_M && own < given.rows)
            store_words(of_rows + tile_thread(), GradientRow::of(op, tile, own));
        sync_tile();
        const LogitColumns columns(tile, given.x.coded, given.weight, given.vocabulary);
        const int first = static_cast<int>(columns.first - tile.column());
        const float factor = gradient_factor(given), each = given.each,
                    target_weight = given.target_weight;
        const bool keeps = op.kept.likeliest != nullptr;
#if ROUNDED
        const float q = op.rounded.largest;
        const uint32_t offset = static_cast<uint32_t>(columns.first) * kWordStep;
#else
        const float upstream = op.dloss[0];
#endif
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            if (row >= given.rows || columns.first >= given.columns) return;
            const GradientRow of_row = load_words<GradientRow>(of_rows + (row - tile.row()));
            const int64_t element = row * given.columns + columns.first;
            float x[kVector] = {};
            if (of_row.reciprocal != 0.0f) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    x[i] = bounded_exponential(static_cast<float>(sum[i]) * columns.alpha[i] -
                                               of_row.shift) *
                               factor -
                           each;
                }
                const int at = of_row.target - first, other = of_row.likeliest - first;
                if (at >= 0 && at < columns.words) {
#pragma unroll
                    for (int i = 0; i < kVector; ++i) {
                        if (i == at) x[i] = keeps ? 0.0f : x[i] - target_weight;
                    }
                }
                if (other >= 0 && other < columns.words) {
#pragma unroll
                    for (int i = 0; i < kVector; ++i) x[i] = i == other ? 0.0f : x[i];
                }
                fill_up(columns.words, 0.0f, x);
            }
#if ROUNDED
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[i] *= columns.scale[i];
            store_words(op.rounded.codes + element,
                        round8_at_random(x, of_row.reciprocal, of_row.word + offset, q));
#else
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[i] *= upstream;
            store8(op.dlogits + element, x);
#endif
        });
    };
    for_logits(given.x.coded.codes, given.rows, given.weight.codes, given.columns, inner, stages,
               end_tile);
}
LSQ_EXPORT(lsq_vocabulary_loss_gradient_product)
