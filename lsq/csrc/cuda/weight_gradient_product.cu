// Product and epilogue for the gradient of a weight in one kernel: N rows, K columns, P values to
// multiply, K and P multiples of 16; blocks along the third dimension of the grid share P.
#define TRANSPOSED_ROWS !WGMMA  // wgmma reads transposed codes alone
#include "product_rows.cuh"
#include "weight_gradient_epilogue.cuh"

namespace {
// Adds up the parts of a product whose steps along K are split among gridDim.z blocks: the last
// block of a tile adds the others' sums to its own. -> whether this block has the whole sums now.
// parts int32 [tiles, gridDim.z, TILE_M * TILE_N], each as it lies in registers; a ticket a tile.
// All threads of the block must call this.
LSQ_INLINE bool add_up_parts(Sums& sums, int32_t* parts, uint32_t* tickets) {
    if (gridDim.z == 1) return true;
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    int32_t* first = parts + tile * gridDim.z * (TILE_M * TILE_N) + 4 * threadIdx.x;
    const auto quad = [&](int64_t part, int i, int j) {
        return first + part * (TILE_M * TILE_N) + (i * kColumnTiles + j) * 4 * kProductThreads;
    };
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
            const int32_t* four = sums.of[i][j];
            store_words(quad(blockIdx.z, i, j), make_int4(four[0], four[1], four[2], four[3]));
        }
    }
    if (!last_of(tickets + tile, gridDim.z)) return false;
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
// clips' gradients. Clips for rows: [kWarpsAcross * gridDim.x, N], a row of each column of warps;
// one clip: [tiles, warps].
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_weight_gradient_product(const ProjectWeightGradient op, In<int8_t> gradient, In<int8_t> x,
                                In<float> column_scale, int64_t outputs, int64_t inner,
                                Out<float> clip_sums, Out<int32_t> parts, Out<uint32_t> tickets) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    Sums sums = {};
#if TRANSPOSED_ROWS
    const TransposedRows rows(op.gradient.codes, block_row(), outputs, op.rows, inner);
#else
    const TileCopy<kProductThreads, TILE_M> rows(gradient, block_row(), op.weight_rows, inner);
#endif
    accumulate(rows, {x, block_column(), op.columns, inner}, stages, sums);
    if (!add_up_parts(sums, parts, tickets)) return;
    const WeightGradientEnd end{op};
    const int64_t column = sums_column();
    const bool has_column = column < op.columns;
    float scale[kVector] = {}, sum_of_warp = 0.0f;
    if (has_column) {
        load8(column_scale + column, scale);
        const float input = shared_scale(op.x.coded);
#pragma unroll
        for (int i = 0; i < kVector; ++i) scale[i] *= input;
    }
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float* sums_of_rows =
        clip_sums + (kWarpsAcross * blockIdx.x + warp % kWarpsAcross) * op.weight_rows;
    for_sums(sums, stages, [&](int64_t row, const int32_t (&sum)[kVector]) {
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
    const int64_t tile = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
    if (lane == 0)
        clip_sums[kWarpsDown * kWarpsAcross * tile + warp] = sum_of_warp * op.clip_factor;
}
LSQ_EXPORT(lsq_weight_gradient_product)
