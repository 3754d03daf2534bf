// Product and epilogue for the gradient of an input in one kernel: M rows, K columns, P values to
// multiply, K and P multiples of 16. The result is floats: rounding needs a row's largest value,
// and a tile lacks the whole row.
#define TRANSPOSED_COLUMNS !WGMMA  // wgmma reads transposed codes alone
#include "input_gradient_epilogue.cuh"
#include "product_rows.cuh"

// weight int8 [K, P]: transposed codes, null if the kernel reads op.weight.codes -> dx, and partial
// [kWarpsDown * gridDim.y, width], one row for each row of warps: sums [K] for the bias, then
// [kWarpsAcross * gridDim.x] parts of the clip's gradient.
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_input_gradient_product(const ProjectInputGradient op, In<int8_t> weight, int64_t inner,
                               Out<float> partial, int64_t width) {
    wait_for_launches();
    extern __shared__ __align__(kPattern) unsigned char stages[];
    Sums sums = {};
#if TRANSPOSED_COLUMNS
    const TransposedColumns columns(static_cast<const int8_t*>(op.weight.codes), block_column(),
                                    op.columns, inner, inner);
#else
    const TileCopy<kProductThreads, TILE_N> columns(weight, block_column(), op.columns, inner);
#endif
    accumulate({op.gradient.codes, block_row(), op.rows, inner}, columns, stages, sums);
    const InputGradientEnd end{op};
    const float* row_scale = op.gradient.scale;
    Float* dx = op.dx;
    const int64_t column = sums_column();
    float bias[kVector] = {}, clip = 0.0f;
    for_sums(sums, stages, [&](int64_t row, const int32_t (&sum)[kVector]) {
        if (row >= op.rows || column >= op.columns) return;
        const int64_t element = row * op.columns + column;
        const float scale = row_scale[row];
        float gradient[kVector];
        scale8(sum, scale, gradient);
        clip += end.apply8(element, gradient);
        add8(gradient, bias);
        store8(dx + element, gradient);
    });
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    float* sums_of_warp = partial + (kWarpsDown * blockIdx.y + warp / kWarpsAcross) * width;
    add_up_rows(bias);
    if (lane < kRowGroups && column < op.columns) store8(sums_of_warp + column, bias);
    clip = warp_reduce<Sum>(clip);
    if (lane == 0)
        sums_of_warp[op.columns + kWarpsAcross * blockIdx.x + warp % kWarpsAcross] = clip;
}
LSQ_EXPORT(lsq_input_gradient_product)
