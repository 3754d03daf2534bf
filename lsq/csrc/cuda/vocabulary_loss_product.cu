// Logits of codes, by tiles that are summed in registers: M rows, P words, K values, both
// multiples of 16. lsq/ops/vocabulary_loss.py is the reference; vocabulary_sums.cu joins the tiles
// of a row.
#include "vocabulary_loss_tile.cuh"

namespace {

static_assert(TILE_M <= kTileThreads, "a thread joins a row");
static_assert(kRowsBytes + TILE_M * (kWarpsAcross * 2 * sizeof(float4) + 4) <= kEndBytes,
              "fits beside the rows");

// Over the threads that share a row.
LSQ_INLINE TwoLargest of_all_groups(TwoLargest largest) {
#pragma unroll
    for (int distance = kRowGroups / 2; distance; distance /= 2) {
        largest.add({__shfl_xor_sync(kAllLanes, largest.first, distance),
                     __shfl_xor_sync(kAllLanes, largest.second, distance),
                     __shfl_xor_sync(kAllLanes, largest.word, distance)});
    }
    return largest;
}

}  // namespace

// parts [2, tiles across, M]: halves of LogitSums; chosen [M]: logits of known targets.
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_vocabulary_loss_product(const VocabularyLoss op, int64_t inner, Out<float> parts,
                                Out<float> chosen) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const Prediction& given = op.prediction;
    const int64_t rows = given.rows;
    const auto end_tile = [&](Tile tile, const Sums& sums, unsigned char* shared) {
        constexpr int kWarpRows = kWarpsAcross * TILE_M;
        // [2, kWarpRows] halves of LogitSums.
        float4* of_warps = reinterpret_cast<float4*>(beside_rows(shared));
        int32_t* targets =
            reinterpret_cast<int32_t*>(of_warps + 2 * kWarpRows);  // [TILE_M], of targets
        const int thread = tile_thread();
        const int64_t own = tile.row() + thread;
        const bool has_row = thread < TILE_M && own < rows;
        if (thread < TILE_M)
            targets[thread] = has_row ? index_in_tile(tile, given.target[own]) : -1;
        sync_tile();
        const LogitColumns columns(tile, given.x.coded, given.weight, given.vocabulary);
        const int first = static_cast<int>(columns.first - tile.column());
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            const int line = static_cast<int>(row - tile.row());
            LogitSums part;
            float x[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[i] = static_cast<float>(sum[i]) * columns.alpha[i];
                part.total += x[i];
            }
            fill_up(columns.words, -infinity(), x);
            const int at = targets[line] - first;
            const bool has_target = at >= 0 && at < columns.words;
            if (has_target) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    if (i == at) chosen[row] = x[i];
                }
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) part.largest = Maximum::join(x[i], part.largest);
            part.largest = warp_reduce<Maximum, kRowGroups>(part.largest);
            const float shift = shift_of(part.largest);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[i] = bounded_exponential(x[i] - shift);
                part.sum += x[i];
            }
            if (has_target) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) x[i] = i == at ? 0.0f : x[i];
            }
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                part.others.add(
                    {x[i] * columns.scale[i], 0.0f, static_cast<uint32_t>(columns.first + i)});
            }
            part.others = of_all_groups(part.others);
            part.sum = warp_reduce<Sum, kRowGroups>(part.sum);
            part.total = warp_reduce<Sum, kRowGroups>(part.total);
            if (thread % kRowGroups == 0)
                part.store(of_warps + first / kWarpColumns * TILE_M + line, kWarpRows);
        });
        sync_tile();
        if (!has_row) return;
        LogitSums whole = LogitSums::load(of_warps + thread, kWarpRows);
#pragma unroll
        for (int warp = 1; warp < kWarpsAcross; ++warp) {
            whole.add(LogitSums::load(of_warps + warp * TILE_M + thread, kWarpRows));
        }
        float* to = parts;
        whole.store(reinterpret_cast<float4*>(to) + tile.across * rows + own,
                    tiles_across(given.columns) * rows);
    };
    for_logits(given.x.coded.codes, rows, given.weight.codes, given.columns, inner, stages,
               end_tile);
}
LSQ_EXPORT(lsq_vocabulary_loss_product)
