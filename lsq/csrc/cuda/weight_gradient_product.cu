// The gradient of a weight in one kernel, product and epilogue: N rows, K columns, a multiple of
// 16, and P values to multiply, a multiple of 16, which blocks along the third dimension of the
// grid share.
//
// product.cuh makes the sums of a tile, product_split.cuh adds up those of its blocks,
// product_rows.cuh hands them on by rows, weight_gradient_epilogue.cuh is what is done to them.
#include "product_rows.cuh"
#include "product_split.cuh"
#include "weight_gradient_epilogue.cuh"

// gradient int8 [at least N, P], x int8 [K, P], column_scale [K] -> dweight [N, K], clip_sums: what
// is added to the gradients of the clips. Of clips for rows, [kWarpsAcross * gridDim.x, N], a row
// of each column of warps; of one clip [tiles, warps].
LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_weight_gradient_product(const ProjectWeightGradient op, In<int8_t> gradient, In<int8_t> x,
                                In<float> column_scale, int64_t inner, Out<float> clip_sums,
                                Out<int32_t> parts, Out<uint32_t> tickets) {
    extern __shared__ __align__(kPattern) unsigned char stages[];
    Sums sums = {};
    accumulate({gradient, block_row(), op.weight_rows, inner},
               {x, block_column(), op.columns, inner}, stages, sums);
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
