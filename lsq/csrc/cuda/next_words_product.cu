// Logits of codes, by tiles, reduced to the input of next_words.cu: R rows, P words, H
// values, both multiples of 16. A group is eight neighbouring words. lsq/ops/next_words.py is the
// reference.
#include "vocabulary_loss_tile.cuh"

// groups [R, tiles across * TILE_N / 8]: largest logits, minus infinity beyond the vocabulary, if
// best words are wanted. parts [R, tiles across * kWarpsAcross, 2]: a warp's largest logit of a row
// and sum of exp(logit - largest). op.every, if wanted: logits.
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_next_words_product(const NextWords op, int64_t inner, Out<float> groups, Out<float> parts) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const int64_t rows = op.rows, vocabulary = op.vocabulary;
    const auto end_tile = [&](Tile tile, const Sums& sums, unsigned char* shared) {
        const LogitColumns columns(tile, op.x, op.weight, vocabulary);
        const int64_t width = static_cast<int64_t>(tiles_across(op.columns)) * TILE_N;
        const bool aligned = vocabulary % kVector == 0;
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            float x[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(sum[i]) * columns.alpha[i];
            if (op.every && row < rows) {
                float* every = op.every + row * vocabulary + columns.first;
                if (aligned && columns.words) store8(every, x);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    if (!aligned && i < columns.words) every[i] = x[i];
                }
            }
            fill_up(columns.words, -infinity(), x);
            float largest = -infinity();
#pragma unroll
            for (int i = 0; i < kVector; ++i) largest = Maximum::join(x[i], largest);
            if (op.words && row < rows) groups[(row * width + columns.first) / kVector] = largest;
            largest = warp_reduce<Maximum, kRowGroups>(largest);
            const float shift = shift_of(largest);
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < kVector; ++i) total += bounded_exponential(x[i] - shift);
            total = warp_reduce<Sum, kRowGroups>(total);
            if (threadIdx.x % kRowGroups || row >= rows) return;
            store_words(parts + 2 * ((row * width + columns.first) / kWarpColumns),
                        make_float2(largest, total));
        });
    };
    for_logits(op.x.codes, rows, op.weight.codes, op.columns, inner, stages, end_tile);
}
LSQ_EXPORT(lsq_next_words_product)
