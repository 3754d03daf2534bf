// Product and epilogue for the gradient of a weight in one kernel: N rows, K columns, P values to
// multiply, K and P multiples of 16; blocks along the third dimension of the grid share P.
#define TRANSPOSED_ROWS !WGMMA  // wgmma reads transposed codes alone
#include "product_rows.cuh"
#include "weight_gradient_epilogue.cuh"

namespace {
// Adds up the parts of a product whose steps along K are split among gridDim.z blocks: the last
// that has a tile adds the others' sums to its own. -> whether these are the whole sums now.
// parts int32 [tiles, gridDim.z, TILE_M * TILE_N], each as it lies in registers; a ticket a tile.
// All threads of the tile must call this.
LSQ_INLINE bool add_up_parts(Tile tile, Sums& sums, int32_t* parts, uint32_t* tickets) {
    if (gridDim.z == 1) return true;
    __shared__ bool last[kTilesAtOnce];
    int32_t* first = parts + static_cast<int64_t>(tile.number) * gridDim.z * (TILE_M * TILE_N) +
                     4 * tile_thread();
    const auto quad = [&](int64_t part, int i, int j) {
        return first + part * (TILE_M * TILE_N) + (i * kColumnTiles + j) * 4 * kTileThreads;
    };
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
            const int32_t* four = sums.of[i][j];
            store_words(quad(blockIdx.z, i, j), make_int4(four[0], four[1], four[2], four[3]));
        }
    }
    if (!last_of(tickets + tile.number, gridDim.z, tile_thread() == 0, last[tile_of_block()],
                 [] { sync_tile(); }))
        return false;
#pragma unroll 1
    for (int64_t part = 0; part < gridDim.z; ++part) {
        if (part == blockIdx.z) continue;
#pragma unroll 1
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int at = 0; at < kRowTiles; ++at) {  // registers have no index
                if (at != i) continue;
#pragma unroll
                for (int j = 0; j < kColumnTiles; ++j) {
                    const int4 four = load_words<int4>(quad(part, at, j));
                    sums.of[at][j][0] += four.x, sums.of[at][j][1] += four.y;
                    sums.of[at][j][2] += four.z, sums.of[at][j][3] += four.w;
                }
            }
        }
    }
    return true;
}

}  // namespace

// gradient int8 [at least N, P]: transposed codes, null if the kernel reads op.gradient.codes (of
// `outputs` columns); x int8 [K, P], column_scale [K] -> dweight [N, K], clip_sums: parts of the
// clips' gradients. Clips for rows: [kWarpsAcross * tiles across, N], a row of each column of
// warps; one clip: [tiles, warps].
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_weight_gradient_product(const ProjectWeightGradient op, In<int8_t> gradient, In<int8_t> x,
                                In<float> column_scale, int64_t outputs, int64_t inner,
                                Out<float> clip_sums, Out<int32_t> parts, Out<uint32_t> tickets) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const auto rows_of = [&](Tile tile) {
#if TRANSPOSED_ROWS
        return TransposedRows(op.gradient.codes, tile.row(), outputs, op.rows, inner);
#else
        return TileCopy<kCopyThreads, TILE_M>(gradient, tile.row(), op.weight_rows, inner);
#endif
    };
    const auto columns_of = [&](Tile tile) {
        return TileCopy<kCopyThreads, TILE_N>(x, tile.column(), op.columns, inner);
    };
    const WeightGradientEnd end{op};
    const auto end_tile = [&](Tile tile, Sums& sums, unsigned char* shared) {
        if (!add_up_parts(tile, sums, parts, tickets)) return;
        const int64_t column = sums_column(tile);
        const bool has_column = column < op.columns;
        float scale[kVector] = {}, sum_of_warp = 0.0f;
        if (has_column) {
            load8(column_scale + column, scale);
            const float input = shared_scale(op.x.coded);
#pragma unroll
            for (int i = 0; i < kVector; ++i) scale[i] *= input;
        }
        const int lane = threadIdx.x % kWarp, warp = tile_thread() / kWarp;
        float* sums_of_rows =
            clip_sums + (kWarpsAcross * tile.across + warp % kWarpsAcross) * op.weight_rows;
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            float clip = 0.0f;
            if (row < op.weight_rows && has_column) {
                const WeightRow of_row = end.row(row);
                float product[kVector];
#pragma unroll
                for (int i = 0; i < kVector; ++i)
                    product[i] = static_cast<float>(sum[i]) * scale[i] * of_row.inverse;
                clip = end.write8(of_row, row * op.columns + column, product);
            }
            if (op.clips > 1) {
                clip = warp_reduce<Sum, kRowGroups>(clip);
                if (row < op.weight_rows && lane % kRowGroups == 0)
                    sums_of_rows[row] = clip * op.clip_factor;
            } else {
                sum_of_warp += clip;
            }
        });
        if (op.clips > 1) return;
        sum_of_warp = warp_reduce<Sum>(sum_of_warp);
        if (lane == 0)
            clip_sums[kWarpsDown * kWarpsAcross * tile.number + warp] =
                sum_of_warp * op.clip_factor;
    };
    for_tiles(op.weight_rows, op.columns, inner, stages, rows_of, columns_of, end_tile);
}
LSQ_EXPORT(lsq_weight_gradient_product)
