// Epilogue of another kernel's product, M rows; see project_epilogue.cuh.
//
// -DSUMS: 1 int32 sums; 2 such sums as floats; 0 floats in the result's memory.
#include "patch.cuh"
#include "project_epilogue.cuh"

#ifndef SUMS
#define SUMS 1
#endif

using ProductSum = Select<SUMS == 2, float, int32_t>;
using Given = Select<SUMS == 0, Float, ProductSum>;

LSQ_KERNEL __launch_bounds__(kPatchThreads, 2)
    lsq_end(const Project op, In<ProductSum> sums, Out<uint32_t> ticket) {
    wait_for_launches();
    const int64_t row = patch_row(), column = patch_column(), columns = op.columns;
    const ProjectEnd end{op};
#if SUMS
    const Given* product = sums;
#else
    const Given* product = end.out;
#endif
    Magnitude largest = 0;
    if (column < columns) {
        Packed<Given> loaded[kPatchRows] = {};
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r < op.rows)
                loaded[r] = load_packed(product + ((row + r) * columns + column));
        }
        float added[kVector];
        end.bias8(column, added);
#if SUMS
        float factor[kVector];
        factor8(op, column, factor);
#endif
#pragma unroll
        for (int r = 0; r < kPatchRows; ++r) {
            if (row + r >= op.rows) continue;
            float y[kVector];
#if SUMS
            ProductSum sum[kVector];
            unpack8(loaded[r], sum);
            const float of_row = row_scale(op.x.coded, row + r) * row_factor(op, row + r);
            scale_sums8(sum, factor, of_row, y);
#else
            unpack8(loaded[r], y);
            scale8(y, row_factor(op, row + r), y);
#endif
            largest = Largest::join(largest, end.write8((row + r) * columns + column, added, y));
        }
    }
    end.codes.finish<kPatchThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_end)
