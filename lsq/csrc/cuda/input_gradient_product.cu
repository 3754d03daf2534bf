// Product and epilogue for the gradient of an input in one kernel: M rows, K columns, P values to
// multiply, K and P multiples of 16. The result is floats: rounding needs a row's largest value,
// and a tile lacks the whole row.
#define TRANSPOSED_COLUMNS !WGMMA  // wgmma reads transposed codes alone
#include "input_gradient_epilogue.cuh"
#include "product_rows.cuh"

// weight int8 [K, P]: transposed codes, null if the kernel reads op.weight.codes -> dx, and partial
// [kWarpsDown * tiles down, width], one row for each row of warps: sums [K] for the bias, then
// [kWarpsAcross * tiles across] parts of the clip's gradient.
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_input_gradient_product(const ProjectInputGradient op, In<int8_t> weight, int64_t inner,
                               Out<float> partial, int64_t width) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const auto rows_of = [&](Tile tile) {
        return TileCopy<kCopyThreads, TILE_M>(op.gradient.codes, tile.row(), op.rows, inner);
    };
    const auto columns_of = [&](Tile tile) {
#if TRANSPOSED_COLUMNS
        return TransposedColumns(op.weight.codes, tile.column(), op.columns, inner, inner);
#else
        return TileCopy<kCopyThreads, TILE_N>(weight, tile.column(), op.columns, inner);
#endif
    };
    const InputGradientEnd end{op};
    const float* row_scale = op.gradient.scale;
    Float* dx = op.dx;
    const auto end_tile = [&](Tile tile, const Sums& sums, unsigned char* shared) {
        const int64_t column = sums_column(tile);
        float bias[kVector] = {}, clip = 0.0f;
        for_sums(tile, sums, shared, [&](int64_t row, const int32_t (&sum)[kVector]) {
            if (row >= op.rows || column >= op.columns) return;
            const int64_t element = row * op.columns + column;
            const float scale = row_scale[row];
            float gradient[kVector];
            scale8(sum, scale, gradient);
            clip += end.apply8(element, gradient);
            add8(gradient, bias);
            store8(dx + element, gradient);
        });
        const int lane = threadIdx.x % kWarp, warp = tile_thread() / kWarp;
        float* sums_of_warp = partial + (kWarpsDown * tile.down + warp / kWarpsAcross) * width;
        add_up_rows(bias);
        if (lane < kRowGroups && column < op.columns) store8(sums_of_warp + column, bias);
        clip = warp_reduce<Sum>(clip);
        if (lane == 0)
            sums_of_warp[op.columns + kWarpsAcross * tile.across + warp % kWarpsAcross] = clip;
    };
    for_tiles(op.rows, op.columns, inner, stages, rows_of, columns_of, end_tile);
}
LSQ_EXPORT(lsq_input_gradient_product)
